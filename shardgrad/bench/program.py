"""A contestant: something that trains, and how the step of most of them is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shardgrad.bench.batches import MicroBatch
from shardgrad.train.model import next_token_loss

__all__ = ["LR", "REDUCE_DTYPE", "Contestant", "Program", "Step", "adamw", "compute_dtype"]

LR = 1e-3
REDUCE_DTYPE = torch.float32

_COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Step = Callable[[list[MicroBatch]], Tensor]


class Scaler(Protocol):
    """What loss scalers have in common."""

    def scale(self, outputs: Tensor) -> Tensor:
        """The loss, multiplied."""

    def unscale_(self, optimizer: Any) -> None:
        """Divides the gradients."""

    def step(self, optimizer: Any) -> Any:
        """Steps, unless a gradient is not finite."""

    def update(self) -> None:
        """Adapts the factor."""


@dataclass
class Contestant:
    """Something that trains.

    Attributes:
        step: takes this rank's micro-batches on the device, makes an optimizer step, returns the mean of
            their losses (fp32 scalar, on the device).
        pool_nbytes: device memory that graphs reserved; asked after the capture.
        close: gives graphs back.
    """

    step: Step
    pool_nbytes: Callable[[], int] = lambda: 0
    close: Callable[[], object] = lambda: None


@dataclass
class Program:
    """A model and an optimizer under some engine, and what differs in a step from engine to engine.

    Attributes:
        forward: tokens to logits.
        optimizer: steps and zeroes.
        clip: given the largest norm, clips the gradients.
        device: of the model.
        clip_norm: 0 for no clipping.
        micro_batch: given whether it is the last, the surroundings of a micro-batch.
        precision: the surroundings of a forward.
        scaler: of the loss; None for none.
    """

    forward: Callable[[Tensor], Tensor]
    optimizer: Any
    clip: Callable[[float], object]
    device: torch.device
    clip_norm: float
    micro_batch: Callable[[bool], AbstractContextManager[Any]] = lambda is_last: nullcontext()
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext
    scaler: Scaler | None = None

    def step(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """A whole training step."""
        loss = self.forward_and_backward(micro_batches)
        self.update()
        self.optimizer.zero_grad()
        return loss

    def forward_and_backward(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Returns the mean loss; gradients are the mean over micro-batches and ranks."""
        count = len(micro_batches)
        total = torch.zeros((), device=self.device)
        for number, (tokens, targets) in enumerate(micro_batches, start=1):
            with self.micro_batch(number == count):
                with self.precision():
                    loss = next_token_loss(self.forward(tokens), targets) / count
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total += loss.detach()
        return total

    def update(self) -> None:
        """Clips and steps."""
        if self.clip_norm:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            self.clip(self.clip_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def compute_dtype(precision: str) -> torch.dtype:
    """What forward and backward compute in."""
    return _COMPUTE_DTYPES[precision]


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    """The optimizer of everybody who does not bring one."""
    return torch.optim.AdamW(params, **{"lr": LR, "fused": True, **options})
