"""Updates and norms on a device against the reference on the CPU. Without a GPU, the CPU's
kernels.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardgrad import ops
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

HAS_CUDA = torch.cuda.is_available()
NEEDS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="no GPU")]
RUN = {"adam": run_adam, "sgd": run_sgd}
CASES = [
    ("adam", {}),
    ("adam", {"decoupled": False, "maximize": True}),
    ("sgd", {}),
    ("sgd", {"momentum": False, "decoupled": True}),
    ("sgd", {"nesterov": True}),
]
MASTERS = {torch.bfloat16: (None, torch.float32, torch.int16), torch.float16: (None, torch.float32)}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def assert_close(actual: Segment, expected: Segment) -> None:
    """Equal but for one rounding: a device's `pow`, of which factors are made, may be an ulp
    off.
    """
    for name, tensor in expected.written().items():
        other = actual.written()[name].cpu()
        if not tensor.is_floating_point():
            continue  # a remainder follows its parameter; `exact` has both
        coarser = max(torch.finfo(tensor.dtype).eps, torch.finfo(torch.float32).eps)
        coarser = torch.finfo(torch.float64).eps if tensor.dtype == torch.float64 else coarser
        torch.testing.assert_close(other, tensor, rtol=2 * coarser, atol=2 * coarser)


@pytest.mark.parametrize("param", DTYPES, ids=str)
@pytest.mark.parametrize(("rule", "options"), CASES, ids=str)
def test_updates_on_the_device_equal_the_reference(
    device: torch.device, rule: str, options: dict[str, Any], param: torch.dtype
) -> None:
    for grad, state, master in itertools.product(
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        MASTERS.get(param, (None,)),
    ):
        expected = Segment.of(param=param, grad=grad, state=state, master=master, taken=0)
        expected.touched[3] = 0
        actual = expected.to(device)
        scale = torch.tensor(0.37)
        RUN[rule]("reference", expected, scale=scale, stochastic_rounding=True, seed=5, **options)
        # The dispatcher chooses the device's kernel.
        RUN[rule](
            "compiled", actual, scale=scale.to(device), stochastic_rounding=True, seed=5, **options
        )
        assert actual.ticket.item() == 0
        assert_same_bits(actual.steps.cpu(), expected.steps)
        assert_close(actual, expected)


@pytest.mark.parametrize("master", [torch.float32, torch.int16], ids=str)
def test_exact_weights_on_the_device_go_the_way_of_a_float32_parameter(
    device: torch.device, master: torch.dtype
) -> None:
    s = Segment.of((3000, 5), param=torch.bfloat16, master=master, taken=0).to(device)
    plain = Segment.of((3000, 5), taken=0).to(device)
    plain = replace(plain, param=s.param.float())
    for step in range(5):
        run_adam("compiled", s.with_gradients(step))
        run_adam("compiled", plain.with_gradients(step))
    for exact, expected in zip(s.exact(), plain.params(), strict=True):
        assert_same_bits(exact.cpu(), expected.cpu())


def test_aligned_rows_on_the_device_equal_unaligned_ones(device: torch.device) -> None:
    sizes = (4096, 512, 5001)
    odd = Segment.of(
        sizes, param=torch.bfloat16, grad=torch.bfloat16, master=torch.float32, taken=0
    )
    at = [0, 4096, 4608]
    pieces = [(a, a, a, n, i, i + 1) for i, (a, n) in enumerate(zip(at, sizes, strict=True))]
    rows, tiles = ops.segment_rows(pieces)

    def line_up(flat: Tensor, column: int) -> Tensor:
        lined = torch.zeros(at[-1] + sizes[-1], dtype=flat.dtype)
        for piece, to in zip(odd.cut(flat, column), at, strict=True):
            lined[to : to + piece.numel()] = piece
        return lined

    even = replace(
        odd, pieces=tuple(pieces), rows=rows, tiles=tiles, param=line_up(odd.param, 0),
        grad=line_up(odd.grad, 1), first=line_up(odd.first, 2), second=line_up(odd.second, 2),
        master=line_up(odd.master, 2),
    )  # fmt: skip
    even, odd = even.to(device).clone(), odd.to(device).clone()
    run_adam("compiled", even)
    run_adam("compiled", odd)
    for ours, theirs in zip(even.exact(), odd.exact(), strict=True):
        assert_same_bits(ours.cpu(), theirs.cpu())
    for norm_type in (2.0, math.inf):
        assert run_norm("compiled", even, norm_type) == run_norm("compiled", odd, norm_type)


@pytest.mark.parametrize("rule", RUN)
def test_found_inf_on_the_device_leaves_everything_as_it_is(
    device: torch.device, rule: str
) -> None:
    s = Segment.of(param=torch.bfloat16, master=torch.float32).to(device)
    before = s.clone()
    RUN[rule]("compiled", s, found_inf=torch.ones(1, device=device))
    assert_same(s, before)


@pytest.mark.parametrize("rule", RUN)
def test_ten_thousand_tiny_parameters_on_the_device(device: torch.device, rule: str) -> None:
    expected = Segment.of(tuple(i % 7 for i in range(10_000)), taken=0)
    expected.touched[::3] = 0
    actual = expected.to(device)
    RUN[rule]("compiled", actual)
    RUN[rule]("reference", expected)
    assert_same_bits(actual.steps.cpu(), expected.steps)
    assert_close(actual, expected)


def test_a_segment_without_elements_on_the_device_counts_steps(device: torch.device) -> None:
    s = Segment.of((0, 0)).to(device)
    run_adam("compiled", s)
    assert (s.steps == 4).all()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 0.0, 3.0, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_on_the_device_equal_the_reference(
    device: torch.device, dtype: torch.dtype, norm_type: float
) -> None:
    s = Segment.of((5, 0, 2_500_000, 77), grad=dtype)
    s.touched[1] = 0
    on_device = s.to(device)
    expected = run_norm("reference", s, norm_type)
    results = {run_norm("compiled", on_device, norm_type) for _ in range(3)}
    assert len(results) == 1
    assert results.pop() == pytest.approx(expected, rel=1e-12)
    for poison, at in itertools.product((math.nan, math.inf), (0, 2_499_999)):
        s.grads()[2][at] = poison
        value, not_finite = run_norm("compiled", s.to(device), norm_type)
        s.grads()[2][at] = 1.0
        assert not_finite == 1
        if math.isnan(poison) and norm_type != 0:
            assert math.isnan(value)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no GPU")
def test_a_captured_clip_and_update_replays_like_an_eager_one() -> None:
    device = torch.device("cuda")
    eager = Segment.of(param=torch.bfloat16, grad=torch.bfloat16, master=torch.float32, taken=0).to(
        device
    )
    replayed = eager.clone()
    out = torch.zeros(2, dtype=torch.float64, device=device)
    scratch = torch.zeros(ops.NORM_SCRATCH_NUMEL, dtype=torch.float64, device=device)
    scale, values = torch.ones(1, device=device), hyper(*ADAM, device=device)

    def step(s: Segment) -> None:
        where: dict[str, Any] = {"touched": s.touched, "rows": s.rows, "tiles": s.tiles}
        ops.norm_(out, scratch, s.grad, **where)
        scale.copy_((1.0 / out[0].sqrt().clamp(min=1.0)).reshape(1))
        ops.adam_(
            s.param, s.grad, s.first, s.second, steps=s.steps, ticket=s.ticket, hyper=values,
            master=s.master, scale=scale, **where,
        )  # fmt: skip

    graph = torch.cuda.CUDAGraph()
    before = replayed.clone()
    with torch.cuda.graph(graph):
        step(replayed)
    assert_same(replayed, before)  # capturing runs nothing
    for number in range(5):
        fresh = eager.with_gradients(number).grad
        values[0] = 1e-2 / (number + 1)
        for s in (eager, replayed):
            s.grad.copy_(fresh)
            s.touched[2] = number % 2
        step(eager)
        expected = out.clone()
        graph.replay()
        assert_same_bits(out.cpu(), expected.cpu())
        assert_same(replayed, eager)
