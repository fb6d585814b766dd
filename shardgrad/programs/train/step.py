"""One optimizer step, and the learning rate of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shardgrad
from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.graphs import GraphPool
from shardgrad.programs.train.checkpoint import TrainState
from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.corpus import Sampler
from shardgrad.programs.train.parallel import World

_CLIP = 1.0  # largest norm of all gradients
_FINAL_RATIO = 0.1  # of the peak of the learning rate, at the end of its decay
_WARMUP_STEPS = 40  # at most, and a tenth of a run

MicroBatch = tuple[Tensor, Tensor]  # tokens and targets, int64 `[batch, sequence]`


class TrainStep:
    """One optimizer step: reads the next batch, updates the weights, and advances the state.

    All device work is in `update`, which takes and returns tensors and never waits for the device,
    so that it can be captured as one CUDA graph. Learning rate and counters are on the host and
    stay outside.

    Args:
        state: the state that steps change.
        sampler: source of batches.
        config: settings of batches, and whether the step is captured.
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
        if config.graph and GraphPool(world.device).can_capture:
            # A model that cannot be captured is trained without a graph.
            graphed = shardgrad.graphed_step(state.model, state.optimizer, on_uncapturable="eager")
            self.update = graphed(self._update)

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Takes one step.

        Returns:
            This rank's mean loss over its micro-batches, fp32 scalar, and the norm of all gradients
            before clipping, both on the device. The next step may overwrite them.
        """
        state, config = self._state, self._config
        recorder.enter("data", step=state.step + 1)
        for group in state.optimizer.param_groups:
            group["lr"] = config.lr * lr_ratio(state.step, steps=config.steps)
        result = self.update(self._micro_batches())
        state.step += 1
        state.samples += config.global_batch(self._world.world_size)
        return result

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
        """Runs forward and backward of each micro-batch, clips, and updates the weights."""
        device = self._world.device
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
        grad_norm = shardgrad.clip_grad_norm_(model.parameters(), _CLIP)
        recorder.enter("optimizer")
        self._state.optimizer.step()
        self._state.optimizer.zero_grad()
        return loss, grad_norm


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Builds AdamW. Matrices have weight decay, vectors (norm weights) do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return shardgrad.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95))


def lr_ratio(step: int, *, steps: int) -> float:
    """Returns the learning rate of a step as a fraction of its peak: linear warmup, then cosine
    decay.

    Args:
        step: number of the step, from 0.
        steps: number of steps of the run; of several, the last one and later
            ones get a tenth.
    """
    warmup_steps = min(_WARMUP_STEPS, steps // 10)
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, steps - 1 - warmup_steps))
    return _FINAL_RATIO + (1 - _FINAL_RATIO) * 0.5 * (1 + math.cos(math.pi * progress))
