"""Programs on side streams, each of which may be kept busy: what does not wait for it then comes
first.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardgrad
from shardgrad import MixedPrecisionPolicy, fully_shard
from shardgrad.engine.unit import unit_of

LATE_CYCLES = 10_000_000  # about 5 ms: longer than the host takes to launch what follows
WIDTH, ROWS, STEPS = 64, 16, 4
# Matrix products on several streams at once choose the same algorithms each time only with this.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@dataclass(frozen=True)
class Case:
    """What is built, and how it is trained."""

    side_streams: int = 0
    nested: bool = False
    reshard: bool = True
    micro_batches: int = 1
    low_precision: bool = False
    unused: bool = False
    tied: bool = False
    clip: bool = False

    def __str__(self) -> str:
        changed = {
            name: value for name, value in vars(self).items() if value != getattr(Case, name)
        }
        return (
            "-".join(
                name if value is True else f"{name}={value}" for name, value in changed.items()
            )
            or "plain"
        )


CASES = [
    Case(),
    *(Case(side_streams=count) for count in (1, 2, 3, 4)),
    Case(nested=True, side_streams=2),
    Case(reshard=False, side_streams=2),
    Case(micro_batches=3, side_streams=2),
    Case(micro_batches=2, reshard=False, side_streams=1),
    Case(low_precision=True, side_streams=2),
    Case(low_precision=True, micro_batches=3, side_streams=2),
    Case(unused=True, side_streams=2),
    Case(tied=True, side_streams=2),
    Case(clip=True, side_streams=2),
    Case(nested=True, micro_batches=2, low_precision=True, clip=True, side_streams=3),
    Case(nested=True, reshard=False, tied=True, unused=True, clip=True, side_streams=4),
    Case(nested=True, tied=True, micro_batches=3, side_streams=4),
]


def sleep(cycles: int) -> None:
    if cycles:
        torch.cuda._sleep(cycles)


class Late(torch.autograd.Function):
    """Identity that keeps its stream busy, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cycles: int) -> torch.Tensor:
        ctx.cycles = cycles
        sleep(cycles)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        sleep(ctx.cycles)
        return grad.clone(), None


class Block(nn.Module):
    """Branches, each on a stream of its own if there are any, and one that may stay unused."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH) for _ in range(max(1, case.side_streams))
        )
        self.after = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.spare = nn.Linear(WIDTH, WIDTH) if case.unused else None
        self.streams: list[torch.Stream] = []
        self.cycles = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = []
        for number, branch in enumerate(self.branches):
            side = self.streams[number] if self.streams else None
            if side is not None:
                side.wait_stream(torch.accelerator.current_stream())
            with side or contextlib.nullcontext():
                parts.append(branch(Late.apply(x, self.cycles)))
        for side, part in zip(self.streams, parts, strict=False):
            torch.accelerator.current_stream().wait_stream(side)
            part.record_stream(torch.accelerator.current_stream())
            x.record_stream(side)
        return x + self.after(torch.stack(parts).sum(0))


def build(case: Case, device: torch.device, *, cycles: int, sharded: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), *(Block(case) for _ in range(3)), nn.Linear(WIDTH, WIDTH)
    )
    if case.tied:
        model[-1].weight = model[0].weight
    model.to(device)
    blocks = [module for module in model if isinstance(module, Block)]
    for block in blocks:
        if sharded and device.type != "cpu":
            block.streams = [torch.Stream(device) for _ in range(case.side_streams)]
        block.cycles = cycles
    if sharded:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = low if case.low_precision else MixedPrecisionPolicy()
        inner = [block.after for block in blocks] if case.nested else []
        for module in (*inner, *blocks, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=case.reshard, mp_policy=policy)
    return model


def delay_the_engine(model: nn.Module, cycles: int) -> None:
    """Keeps the engine's own streams busy, once it has any."""
    unit = unit_of(model)
    if cycles and unit is not None and unit.context is not None:
        streams = unit.context.comm_ctx.streams
        for stream in (streams.gather, streams.reduce, streams.second):
            if stream is not None:
                with stream:
                    sleep(cycles)


def train(
    case: Case, device: torch.device, *, cycles: int = 0, sharded: bool = True
) -> list[torch.Tensor]:
    """Returns the whole parameters after some steps, on the CPU. Every rank has the same
    batches.
    """
    model = build(case, device, cycles=cycles, sharded=sharded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for micro in range(case.micro_batches):
            if sharded:
                model.set_requires_gradient_sync(micro == case.micro_batches - 1)
            generator = torch.Generator().manual_seed(10 * step + micro)
            x = torch.randn(ROWS, WIDTH, generator=generator).to(device)
            delay_the_engine(model, cycles)
            loss = model(x).float().square().mean()
            delay_the_engine(model, cycles)
            loss.backward()
        if case.clip:
            shardgrad.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [p.detach().cpu() for p in whole]


def differing(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> list[int]:
    """Returns which parameters are not equal, bit for bit."""
    return [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(a, b)]
