"""Our kernels run with the arguments of their launches, as their order allows: the bits of the CPU
ops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardgrad import ops
from tests.cuda_runtime import inspection
from tests.support.segments import (
    ADAM,
    DTYPES,
    Segment,
    assert_same,
    assert_same_bits,
    hyper,
    run_adam,
    run_norm,
    run_sgd,
)

pytestmark = pytest.mark.skipif(ops.backend() != "compiled", reason="there is no nvcc here")
OP = torch.ops.shardgrad
CUDA = torch.device("cuda")
HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def _kernels_run() -> None:
    # The first launch finds out whether there is one for the host.
    before = inspection.calls().get("kernel that runs", 0)
    OP.sum_chunks([torch.ones(1, device=CUDA)], torch.ones(1, device=CUDA), 1.0, False)
    assert inspection.calls()["kernel that runs"] > before


def on_both(call: Callable[[torch.device], list[Tensor]]) -> None:
    """Requires the same bits of a device and the host, and that kernels gave them."""
    expected = call(HOST)
    before = inspection.calls()
    for ours, theirs in zip(call(CUDA), expected, strict=True):
        if theirs.is_floating_point():
            assert_same_bits(ours.cpu(), theirs)
        else:
            assert torch.equal(ours.cpu(), theirs)
    ran = inspection.calls()["kernel that runs"] - before["kernel that runs"]
    assert ran > 0
    assert not [text for text in inspection.findings() if "shardgrad" in text]


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_movement(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    shapes, ranks, chunk_numel = (9001, 0, 40), 2, 4600
    table = torch.tensor(
        [[9001, 4501, 4510, 3, 1], [0, 0, 0, 4513, 9003], [40, 20, 20, 4520, 9003]]
    )
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(n, generator=generator).to(dtypes[0]) for n in shapes]

    def call(device: torch.device) -> list[Tensor]:
        slot = torch.zeros(ranks * chunk_numel, dtype=dtypes[1], device=device)
        whole = torch.zeros(9050, dtype=dtypes[0], device=device)
        total = torch.ones(chunk_numel, dtype=dtypes[0], device=device)
        for accumulate in (False, True):
            OP.pack([each.to(device) for each in values], slot, table, chunk_numel, 3.0, accumulate)
        chunks = list(slot.view(ranks, -1))
        OP.unpack(slot, whole, table, chunk_numel)
        OP.sum_chunks(chunks, total, 2.0, True)
        return [slot, whole, total]

    on_both(call)


@pytest.mark.parametrize("param", DTYPES, ids=str)
def test_updates_and_norms(param: torch.dtype) -> None:
    master = torch.float32 if param.itemsize == 2 else None

    def call(device: torch.device) -> list[Tensor]:
        s = Segment.of(param=param, master=master, taken=0).to(device)
        run_adam("compiled", s)
        run_sgd("compiled", s, nesterov=True)
        run_adam("compiled", s, found_inf=torch.ones(1, device=device))
        norms = [
            run_norm("compiled", s, norm_type)
            for norm_type in (2.0, 1.0, 0.0, 3.0, torch.inf, -torch.inf)
        ]
        # In float32: the kernels for CPU and CUDA add in different orders.
        return [*s.written().values(), torch.tensor(norms)]

    on_both(call)


@pytest.mark.parametrize("order", ["host", "late", "1"])
def test_a_replay_runs_kernels_with_the_arguments_of_the_capture(order: str) -> None:
    chunks = [torch.ones(5000, device=CUDA), torch.ones(5000, device=CUDA)]
    out, graph = torch.zeros(5000, device=CUDA), torch.cuda.CUDAGraph()
    s = Segment.of(taken=0).to(CUDA)
    eager, values = s.clone(), hyper(*ADAM, device=CUDA)
    with torch.cuda.graph(graph):
        OP.sum_chunks(chunks, out, 4.0, True)
        ops.adam_(
            s.param, s.grad, s.first, s.second, s.master, steps=s.steps, ticket=s.ticket,
            touched=s.touched, rows=s.rows, tiles=s.tiles, hyper=values,
        )  # fmt: skip
    assert not out.any()
    with inspection.order(order):
        for number in range(1, 4):
            chunks[0].fill_(number)
            expected = out + (number + 1) / 4
            ran = inspection.calls()["kernel that runs"]
            graph.replay()
            assert inspection.calls()["kernel that runs"] == ran + 2
            assert torch.equal(out, expected)
            run_adam("compiled", eager)
            assert_same(s, eager)
