"""The two things done with batches: one optimizer step, and one validation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardgrad
from shardgrad.training.checkpoint import TrainState
from shardgrad.training.config import TrainConfig
from shardgrad.training.corpus import Sampler, validation_starts, windows
from shardgrad.training.model import next_token_loss
from shardgrad.training.parallel import Place
from shardgrad.training.sharding import set_gradient_sync

_IGNORED_TARGET = -100  # what cross_entropy leaves out by default


@dataclass(frozen=True)
class StepResult:
    """What a step leaves on the device, unread.

    Args:
        loss: this rank's mean over its micro-batches, fp32 scalar.
        grad_norm: of all gradients before clipping; a DTensor where the gradients are.
        lr: the learning rate that was used.
    """

    loss: Tensor
    grad_norm: Tensor
    lr: float


def train_step(state: TrainState, sampler: Sampler, config: TrainConfig, place: Place) -> StepResult:
    """Forward, backward for each micro-batch, clip, update; advances `state` by one step."""
    loss = torch.zeros((), device=place.device)
    for micro_batch in range(config.accumulate):
        is_last = micro_batch == config.accumulate - 1
        set_gradient_sync(state.model, is_last or config.sync_every_microbatch)
        first = state.samples + (micro_batch * place.world_size + place.rank) * config.batch_size
        tokens, targets = sampler.batch(first, config.batch_size)
        part = state.model.loss(tokens.to(place.device), targets.to(place.device)) / config.accumulate
        part.backward()
        loss += part.detach()
    # The norm is wanted in any case; an infinite limit clips nothing.
    clip = torch.nn.utils.clip_grad_norm_ if config.engine == "fsdp2" else shardgrad.clip_grad_norm_
    grad_norm = clip(state.model.parameters(), config.clip or math.inf)
    lr = float(state.schedule.get_last_lr()[0])
    state.optimizer.step()
    state.schedule.step()
    state.optimizer.zero_grad()
    state.step += 1
    state.samples += config.global_batch(place.world_size)
    return StepResult(loss, grad_norm, lr)


class Health:
    """Remembers, on the device, the first step of this rank that was not finite.

    Reading a loss waits for the device, so a step does not; the answer is read with the metrics, and before a
    checkpoint, so that no checkpoint holds numbers that are lost.
    """

    def __init__(self, device: torch.device) -> None:
        self._first_bad = torch.full((), -1, dtype=torch.int64, device=device)

    def watch(self, step: int, result: StepResult) -> None:
        """Look at a step without waiting for it."""
        norm = result.grad_norm
        norm = norm.to_local() if isinstance(norm, DTensor) else norm
        bad = ~(torch.isfinite(result.loss) & torch.isfinite(norm)) & (self._first_bad < 0)
        self._first_bad.masked_fill_(bad, step)

    def first_bad_step(self) -> int:
        """The step, or -1; waits for the device."""
        return int(self._first_bad.item())


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
