"""Memory of graphs beside that of eager steps: `python -m tests.cuda_runtime.pool_bytes [LAYERS]`.

Nothing has values, so that untouched memory costs nothing; the allocators are torch's own.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from functools import partial
from typing import Any

os.environ |= {"HOSTCUDA_VALUES": "0", "HOSTCUDA_TIMING": "1"}

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardgrad
from shardgrad.graphs import UncapturableStepWarning
from tests.support.graphed import eager

_WIDTH, _ROWS, _LENGTH = 768, 4, 512
_LAYERS = int(sys.argv[1]) if sys.argv[1:] else 12
_CALLS = 6  # of each kind, more than a capture and its comparison need


def main() -> None:
    """Prints a row for each kind of call (one batch, 4 and 2 micro-batches, three shorter batches,
    and an evaluation): MiB of the pool after it, reserved then, reserved at the peak so far, and at
    the peak of a run without graphs.
    """
    warnings.simplefilter("ignore", UncapturableStepWarning)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    eager = _reserved(is_graphed=False)
    for ours, (*_, plain) in zip(_reserved(is_graphed=True), eager, strict=True):
        print(*(f"{nbytes / 2**20:8.0f}" for nbytes in (*ours, plain)))
    dist.destroy_process_group()


def _reserved(*, is_graphed: bool) -> list[tuple[int, int, int]]:
    gc.collect()  # the model of the run before
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    layers = (
        nn.TransformerEncoderLayer(_WIDTH, 12, 4 * _WIDTH, 0.0, batch_first=True)
        for _ in range(_LAYERS)
    )
    model, mesh = nn.Sequential(*layers).cuda(), init_device_mesh("cuda", (1,))
    for unit in (*model, model):
        shardgrad.fully_shard(unit, mesh=mesh)
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-3)

    def train(*batches: Tensor) -> None:
        for number, x in enumerate(batches, start=1):
            model.set_requires_gradient_sync(number == len(batches))
            model(x).square().mean().backward()
        shardgrad.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(x: Tensor) -> Tensor:
        return model(x).square().mean()

    pool: Any = shardgrad.graphs.GraphPool("cuda")
    graphed = shardgrad.graphed_step if is_graphed else eager
    step, check = (graphed(model, optimizer, pool=pool)(each) for each in (train, evaluate))
    x = torch.ones(_ROWS, _LENGTH, _WIDTH, device="cuda")
    shorter = [x[:, :length].clone() for length in (384, 256, 128)]
    batches = [[x], [x] * 4, [x] * 2, *([each] for each in shorter)]
    found = []
    for call in (*(partial(step, *each) for each in batches), partial(check, x)):
        for _ in range(_CALLS):
            call()
        held = torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
        found.append((pool.nbytes, *held))
    return found


if __name__ == "__main__":
    main()
