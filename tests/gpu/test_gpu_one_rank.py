"""One rank on one device. On a machine with a GPU: `make test ARGS="tests/gpu"`; without one
`make test-cuda`.

World size 1 has every stream, mark and kernel of a larger one and no peer, so results must equal
the unsharded run bit for bit, however late a producer's stream is.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardgrad import fully_shard, ops
from shardgrad.programs.cli.doctor import _facts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.usefixtures("one_rank"),
]
DEVICE = torch.device("cuda")


class SideStreams(nn.Module):
    """Two branches, the second on a stream of its own, if it has one; late if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(64, 64)
        self.right = nn.Linear(64, 64)
        self.side: torch.cuda.Stream | None = None
        self.delay_cycles = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        home = torch.cuda.current_stream()
        side = self.side or home
        side.wait_stream(home)
        with torch.cuda.stream(side):
            right = self.right(_Late.apply(x, self.delay_cycles))
        home.wait_stream(side)
        return self.left(x) + right


class _Late(torch.autograd.Function):
    """Identity that keeps its stream busy, in forward and in backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, cycles: int) -> torch.Tensor:
        ctx.cycles = cycles
        _sleep(cycles)
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        _sleep(ctx.cycles)
        return grad.clone(), None


def _sleep(cycles: int) -> None:
    if cycles:
        torch.cuda._sleep(cycles)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(SideStreams() for _ in range(3))).to(DEVICE)


def train(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu()
        for p in model.parameters()
    ]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
def test_side_streams_train_bit_for_bit_like_an_unsharded_run(reshard: bool, late: bool) -> None:
    plain = build()
    sharded = copy.deepcopy(plain)
    mesh = init_device_mesh("cuda", (1,))
    for block in sharded:
        block.side = torch.cuda.Stream()
        block.delay_cycles = 20_000_000 if late else 0
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(sharded, mesh=mesh)
    for ours, theirs in zip(train(sharded), train(plain), strict=True):
        assert torch.equal(ours, theirs)


def test_the_doctor_says_where_references_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "has_kernels", lambda device_type: False)
    found = dict(_facts(DEVICE))["shardgrad ops"]
    assert found == ops.backend() + "; reference on cuda"
