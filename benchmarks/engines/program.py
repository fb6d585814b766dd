"""What an engine gives to be measured, and how the step of most engines is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.engines.task import Task
from shardgrad.programs.train.model import next_token_loss

# Losses are to tell a wrong gradient from rounding within the warm-up. So the data repeats, and is
# learnt; and epsilon outweighs gradients, as else the first steps of Adam are signs, which rounding
# turns over where a gradient is almost zero: on an H100 a plain model of 1.2B parameters was 2 %
# from the loss of FSDP2 in step 3; with an epsilon of 1e-3 (and a rate in proportion) shardgrad
# was 0.09 % from it in eight.
LR, EPSILON = 2e-3, 1e-2
DISTINCT_STEPS = 2
REDUCE_DTYPE = torch.float32

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

MicroBatch = tuple[Tensor, Tensor]  # tokens and targets, int64 `[batch, sequence]`
Step = Callable[[list[MicroBatch]], Tensor]


@dataclass(frozen=True)
class Trained:
    """A model under an engine.

    Attributes:
        step: takes this rank's micro-batches on the device, makes an optimizer step, returns the
            mean of their losses (fp32 scalar, on the device).
        pool_nbytes: device memory that graphs reserved; asked after the capture.
    """

    step: Step
    pool_nbytes: Callable[[], int] = lambda: 0


@dataclass
class Program:
    """A model and an optimizer under some engine, and what differs in a step from engine to engine.

    Attributes:
        forward: tokens to logits.
        optimizer: steps and zeroes.
        clip: given the largest norm, clips the gradients.
        device: of the model.
        clip_norm: 0 for no clipping.
        micro_batch: given whether it is the last, the context of a micro-batch.
        autocast: the context of a forward.
    """

    forward: Callable[[Tensor], Tensor]
    optimizer: Any
    clip: Callable[[float], object]
    device: torch.device
    clip_norm: float
    micro_batch: Callable[[bool], AbstractContextManager[Any]] = lambda is_last: nullcontext()
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    def step(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """A training step."""
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
                with self.autocast():
                    loss = next_token_loss(self.forward(tokens), targets) / count
                loss.backward()
            total += loss.detach()
        return total

    def update(self) -> None:
        """Clips and steps."""
        if self.clip_norm:
            self.clip(self.clip_norm)
        self.optimizer.step()


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    """The optimizer of every engine that does not bring one."""
    return torch.optim.AdamW(params, **{"lr": LR, "eps": EPSILON, "fused": True, **options})


def muon(model: Any, library: Any) -> Any:
    """Muon for matrices of blocks and AdamW for the rest; both of one library."""
    of_blocks = dict.fromkeys(p for p in model.layers.parameters() if p.ndim == 2)
    others = [p for p in model.parameters() if p not in of_blocks]
    parts = library.Muon(of_blocks, lr=LR), library.AdamW(others, lr=LR)
    return SimpleNamespace(
        step=lambda: [part.step() for part in parts],
        zero_grad=lambda: [part.zero_grad() for part in parts],
    )


def mesh_of(task: Task) -> DeviceMesh:
    """One axis of shards, or an axis of replicas before it."""
    names = ("replicate", "shard")[-len(task.mesh_shape) :]
    return init_device_mesh(task.device, task.mesh_shape, mesh_dim_names=names)


def micro_batches(
    task: Task, rank: int, vocab_size: int, device: torch.device
) -> list[list[MicroBatch]]:
    """A rank's micro-batches of `DISTINCT_STEPS` steps: random tokens, the same in every process.

    Args:
        task: for the sizes.
        rank: whose.
        vocab_size: tokens to draw from.
        device: where they lie.
    """
    generator = torch.Generator().manual_seed(rank)
    shape = (DISTINCT_STEPS, task.accumulate, task.batch_size, task.seq_len + 1)
    text = torch.randint(vocab_size, shape, generator=generator).to(device)
    return [
        [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in step] for step in text
    ]
