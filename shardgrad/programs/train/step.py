"""One optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import shardgrad
from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.graphs import GraphPool
from shardgrad.programs.train.checkpoint import TrainState
from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.corpus import Sampler
from shardgrad.programs.train.parallel import World

MicroBatch = tuple[Tensor, Tensor]  # tokens and targets, int64 `[batch, sequence]`


@dataclass(frozen=True)
class StepResult:
    """The results of a step, on the device. The next step may overwrite them.

    Args:
        loss: this rank's mean loss over its micro-batches, fp32 scalar.
        grad_norm: norm of all gradients before clipping, a scalar.
        lr: learning rate of the step.
    """

    loss: Tensor
    grad_norm: Tensor
    lr: float


class TrainStep:
    """One optimizer step: reads the next batch, updates the weights, and advances the state.

    All device work is in `update`, which takes and returns tensors and never waits for the device,
    so that it can be captured as one CUDA graph (`--graph`). Schedule and counters are on the host
    and stay outside.

    Args:
        state: the state that steps change.
        sampler: source of batches.
        config: settings of batches, clipping and `--graph`.
        world: this rank.

    Attributes:
        update: function from micro-batches to loss and gradient norm; a `GraphedStep` if steps are
            captured.
    """

    def __init__(
        self, state: TrainState, sampler: Sampler, config: TrainConfig, world: World
    ) -> None:
        self._state = state
        self._sampler = sampler
        self._config = config
        self._world = world
        self.update: Callable[[list[MicroBatch]], tuple[Tensor, Tensor]] = self._update
        if _is_graphed(config, world.device):
            # A model that cannot be captured is trained without a graph, except with `--graph on`.
            fallback: Literal["raise", "eager"] = "raise" if config.graph == "on" else "eager"
            graphed = shardgrad.graphed_step(state.model, state.optimizer, on_uncapturable=fallback)
            self.update = graphed(self._update)

    def __call__(self) -> StepResult:
        """Takes one step."""
        state = self._state
        lr = float(state.schedule.get_last_lr()[0])
        recorder.enter("data", step=state.step + 1)
        loss, grad_norm = self.update(self._micro_batches())
        state.schedule.step()
        state.step += 1
        state.samples += self._config.global_batch(self._world.world_size)
        return StepResult(loss, grad_norm, lr)

    def _micro_batches(self) -> list[MicroBatch]:
        """Returns this rank's part of the next global batch, on the host."""
        size, world = self._config.batch_size, self._world
        return [
            self._sampler.batch(
                self._state.samples + (number * world.world_size + world.rank) * size, size
            )
            for number in range(self._config.accumulate)
        ]

    def _update(self, micro_batches: list[MicroBatch]) -> tuple[Tensor, Tensor]:
        """Runs forward and backward of each micro-batch, clips, and updates the weights.

        Returns:
            `loss` and `grad_norm` of `StepResult`.
        """
        config, device = self._config, self._world.device
        model: Any = self._state.model  # an `FSDPModule`
        loss = torch.zeros((), device=device)
        for number, (tokens, targets) in enumerate(micro_batches, start=1):
            is_last = number == len(micro_batches)
            model.set_requires_gradient_sync(is_last)
            recorder.enter("forward")
            part = model.loss(tokens.to(device), targets.to(device)) / len(micro_batches)
            recorder.enter("backward")
            part.backward()
            loss += part.detach()
        recorder.enter("clip")
        # The norm is reported without clipping too: an infinite limit clips nothing.
        grad_norm = shardgrad.clip_grad_norm_(model.parameters(), config.clip or math.inf)
        recorder.enter("optimizer")
        self._state.optimizer.step()
        self._state.optimizer.zero_grad()
        return loss, grad_norm


def _is_graphed(config: TrainConfig, device: torch.device) -> bool:
    if config.graph == "auto":
        return GraphPool(device).can_capture
    return config.graph == "on"
