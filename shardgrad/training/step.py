"""The two things done with batches: one optimizer step, and one validation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

import shardgrad
from shardgrad.diagnosis.flight_recorder import journal
from shardgrad.graphs import GraphPool
from shardgrad.training.checkpoint import TrainState
from shardgrad.training.config import TrainConfig
from shardgrad.training.corpus import Sampler, validation_starts, windows
from shardgrad.training.health import StepResult, gradient_sums
from shardgrad.training.model import next_token_loss
from shardgrad.training.parallel import Place
from shardgrad.training.sharding import set_gradient_sync

MicroBatch = tuple[Tensor, Tensor]  # tokens and targets, int64 `[batch, sequence]`

_IGNORED_TARGET = -100  # what cross_entropy leaves out by default


class TrainStep:
    """One optimizer step: reads the next batch, updates, and advances the state.

    Everything that computes is in `update`, which takes and returns tensors and waits for nothing, so that
    it can be one graph of the device (`--graph`). Schedule and counters are the host's, and stay outside.

    Args:
        state: what the steps change.
        sampler: where batches come from.
        config: for batches, clipping and `--graph`.
        place: this rank.

    Attributes:
        update: computes a step from micro-batches; a `GraphedStep` where steps are captured.
    """

    def __init__(self, state: TrainState, sampler: Sampler, config: TrainConfig, place: Place) -> None:
        self._state = state
        self._sampler = sampler
        self._config = config
        self._place = place
        self._parameters: list[Tensor] = [p for p in state.model.parameters() if p.requires_grad]
        self.update: Callable[[list[MicroBatch]], tuple[Tensor, Tensor, Tensor]] = self._update
        if _is_graphed(config, place.device):
            # A model that cannot be captured is trained all the same, unless somebody insists.
            fallback: Literal["raise", "eager"] = "raise" if config.graph == "on" else "eager"
            graphed = shardgrad.graphed_step(state.model, state.optimizer, on_uncapturable=fallback)
            self.update = graphed(self._update)

    def __call__(self) -> StepResult:
        """Takes one step."""
        state = self._state
        lr = float(state.schedule.get_last_lr()[0])
        journal.enter("data", step=state.step + 1)
        loss, grad_norm, grad_sums = self.update(self._micro_batches())
        state.schedule.step()
        state.step += 1
        state.samples += self._config.global_batch(self._place.world_size)
        return StepResult(loss, grad_norm, grad_sums, lr)

    def _micro_batches(self) -> list[MicroBatch]:
        """This rank's part of the next global batch, on the host."""
        size, place = self._config.batch_size, self._place
        return [
            self._sampler.batch(self._state.samples + (number * place.world_size + place.rank) * size, size)
            for number in range(self._config.accumulate)
        ]

    def _update(self, micro_batches: list[MicroBatch]) -> tuple[Tensor, Tensor, Tensor]:
        """Forward, backward for each micro-batch, clip, update; see `StepResult` for what it returns."""
        model, config, device = self._state.model, self._config, self._place.device
        loss = torch.zeros((), device=device)
        for number, (tokens, targets) in enumerate(micro_batches, start=1):
            set_gradient_sync(model, number == len(micro_batches) or config.sync_every_microbatch)
            journal.enter("forward")
            part = model.loss(tokens.to(device), targets.to(device)) / len(micro_batches)
            journal.enter("backward")
            part.backward()
            loss += part.detach()
        journal.enter("clip")
        grad_sums = gradient_sums(self._parameters)
        # The norm is wanted in any case; an infinite limit clips nothing.
        clip = torch.nn.utils.clip_grad_norm_ if config.engine == "fsdp2" else shardgrad.clip_grad_norm_
        grad_norm = clip(model.parameters(), config.clip or math.inf)
        journal.enter("optimizer")
        self._state.optimizer.step()
        self._state.optimizer.zero_grad()
        return loss, grad_norm, grad_sums


def _is_graphed(config: TrainConfig, device: torch.device) -> bool:
    if config.graph == "auto":
        return config.engine == "shardgrad" and GraphPool(device).can_capture
    return config.graph == "on"


@torch.no_grad()
def validation_loss(model: nn.Module, text: Tensor, config: TrainConfig, place: Place) -> float:
    """Nats per byte on the held-out text, the same sequences whatever the number of ranks.

    Args:
        model: switched to evaluation and back.
        text: uint8 `[bytes]`, held out.
        config: for the number and length of sequences.
        place: ranks share the sequences; all make the same number of forwards, since those are collective.
    """
    starts = validation_starts(len(text), seq_len=config.seq_len, count=config.eval_samples)
    per_round = place.world_size * config.batch_size
    total, count = 0.0, 0
    model.eval()
    for first in range(place.rank * config.batch_size, -(-len(starts) // per_round) * per_round, per_round):
        mine = starts[first : first + config.batch_size]
        padding = config.batch_size - len(mine)
        tokens, targets = windows(text, mine + [0] * padding, config.seq_len)
        targets[len(mine) :] = _IGNORED_TARGET
        logits = model(tokens.to(place.device))
        total += float(next_token_loss(logits, targets.to(place.device), reduction="sum"))
        count += len(mine) * config.seq_len
    model.train()
    sums = place.gather([total, float(count)])
    return sum(row[0] for row in sums) / sum(row[1] for row in sums)
