"""Our kernels run with the arguments of their launches, as their order allows: the bits of the CPU
ops.
"""

from __future__ import annotations

import pytest
import torch

from shardgrad import ops
from tests.cuda_runtime import inspection
from tests.support.segments import (
    ADAM,
    Segment,
    assert_same,
    hyper,
    run_adam,
)

pytestmark = pytest.mark.skipif(ops.backend() != "compiled", reason="there is no nvcc here")
OP = torch.ops.shardgrad
CUDA = torch.device("cuda")


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
