"""One rank on one device. On a machine with a GPU: `make test ARGS="tests/gpu"`; elsewhere the CPU
runs it.

World size 1 has every stream, mark and kernel of a larger one and no peer, so results must equal
the unsharded run bit for bit, however late a producer's stream is.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardgrad import fully_shard, ops
from shardgrad.ops import library
from shardgrad.programs.cli import doctor

HAS_CUDA = torch.cuda.is_available()
NEEDS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="no GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]


class SideStreams(nn.Module):
    """Two branches, the second on a stream of its own if the device has any, late if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(64, 64)
        self.right = nn.Linear(64, 64)
        self.side: torch.cuda.Stream | None = None
        self.delay_cycles = 0

    def _on_side(self) -> AbstractContextManager[object]:
        return nullcontext() if self.side is None else torch.cuda.stream(self.side)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream())
        with self._on_side():
            right = self.right(_Late.apply(x, self.delay_cycles))
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)
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


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    chosen = torch.device(request.param)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield chosen
    dist.destroy_process_group()


def build(device: torch.device, layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(SideStreams() for _ in range(layers))).to(device)


def train(model: nn.Module, device: torch.device, steps: int = 4) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu()
        for p in model.parameters()
    ]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
def test_side_streams_train_bit_for_bit_like_an_unsharded_run(
    device: torch.device, reshard: bool, late: bool
) -> None:
    plain = build(device)
    sharded = copy.deepcopy(plain)
    if device.type == "cuda":
        for block in sharded:
            block.side = torch.cuda.Stream()
            block.delay_cycles = 20_000_000 if late else 0
    mesh = init_device_mesh(device.type, (1,))
    for block in sharded:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(sharded, mesh=mesh)
    for ours, theirs in zip(train(sharded, device), train(plain, device), strict=True):
        assert torch.equal(ours, theirs)


def test_only_a_gpu_without_kernels_is_warned_of(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "has_kernels", lambda device_type: False)
    library.check_kernels.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fully_shard(build(device), mesh=init_device_mesh(device.type, (1,)))
    library.check_kernels.cache_clear()
    about = [each for each in told if "kernels for CUDA were not built" in str(each.message)]
    assert len(about) == (device.type == "cuda")
    assert all(each.filename == __file__ for each in about)


def test_the_doctor_says_where_references_run(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "has_kernels", lambda device_type: False)
    found = dict(doctor._facts(device))["shardgrad ops"]
    assert found == ops.backend() + {"cpu": "", "cuda": "; reference on cuda"}[device.type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_on_the_device_equal_the_reference(
    device: torch.device, dtype: torch.dtype
) -> None:
    table = torch.tensor([[7 * 33, 4 * 33, 192, 0, 0], [5, 3, 64, 192, 256]])
    grads = [torch.randn(7, 33), torch.randn(5)]
    results = []
    for where in (torch.device("cpu"), device):
        slot = torch.zeros(2 * 256, dtype=dtype, device=where)
        ops.pack([g.to(where) for g in grads], slot, table, chunk_numel=256, divisor=2.0)
        whole = torch.zeros(320, dtype=dtype, device=where)
        ops.unpack(slot, whole, table, chunk_numel=256)
        total = torch.zeros(256, dtype=torch.float32, device=where)
        ops.sum_chunks(list(slot.chunk(2)), total, divisor=2.0)
        results.append([tensor.cpu() for tensor in (slot, whole, total)])
    for on_cpu, on_device in zip(*results, strict=True):
        assert torch.equal(on_cpu, on_device)
