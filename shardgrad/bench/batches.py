"""The data: random tokens, which wait on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from shardgrad.bench.task import Task

__all__ = ["DISTINCT_STEPS", "MicroBatch", "micro_batches"]

MicroBatch = tuple[Tensor, Tensor]  # tokens and targets, int64 `[batch, sequence]`

DISTINCT_STEPS = 16  # then the data repeats


def micro_batches(task: Task, rank: int, vocab_size: int, device: torch.device) -> list[list[MicroBatch]]:
    """A rank's micro-batches of `DISTINCT_STEPS` steps; the same whoever asks.

    Args:
        task: for the sizes.
        rank: whose.
        vocab_size: tokens to draw from.
        device: where they shall wait.
    """
    generator = torch.Generator().manual_seed(rank)
    shape = (DISTINCT_STEPS, task.accumulate, task.batch_size, task.seq_len + 1)
    text = torch.randint(vocab_size, shape, generator=generator).to(device)
    return [[(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in step] for step in text]
