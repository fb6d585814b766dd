"""norm_ in both backends, against torch in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from shardgrad import ops
from tests.support.segments import (
    BACKENDS,
    DTYPES,
    SIZES,
    Segment,
    needs_library,
    norm_of,
    run_norm,
)

NORM_TYPES = (2.0, 1.0, 0.0, 3.0, 0.5, math.inf, -math.inf)
# Sums of a few thousand positive float64 numbers: the order decides the last bits only.
CLOSE = {"rel": 1e-13}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def rooted(value: float, norm_type: float) -> float:
    return value if norm_type in (0.0, math.inf, -math.inf) else value ** (1 / norm_type)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_are_torchs_in_float64(backend: str, dtype: torch.dtype, norm_type: float) -> None:
    s = Segment.of(grad=dtype)
    whole = torch.cat(s.grads()).double()
    value, not_finite = run_norm(backend, s, norm_type)
    expected = torch.linalg.vector_norm(whole, norm_type).item()
    assert rooted(value, norm_type) == pytest.approx(expected, **CLOSE)
    assert not_finite == 0


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_only_live_rows_count(backend: str, norm_type: float) -> None:
    s = Segment.of()
    s.touched[[1, 5]] = 0  # of rows 0 and 4
    for i in (0, 4):
        s.grads()[i].fill_(math.nan)
    whole = torch.cat([grad for i, grad in enumerate(s.grads()) if i not in (0, 4)]).double()
    value, not_finite = run_norm(backend, s, norm_type)
    expected = torch.linalg.vector_norm(whole, norm_type).item()
    assert rooted(value, norm_type) == pytest.approx(expected, **CLOSE)
    assert not_finite == 0


@pytest.mark.parametrize("sizes", [SIZES, (0, 0), ()], ids=str)
def test_without_live_elements_the_norm_is_that_of_nothing(
    backend: str, sizes: tuple[int, ...]
) -> None:
    s = Segment.of(sizes)
    s.touched.zero_()
    for norm_type in NORM_TYPES:
        expected = math.inf if norm_type == -math.inf else 0.0
        assert run_norm(backend, s, norm_type) == (expected, 0.0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_is_counted_and_shows(
    backend: str, dtype: torch.dtype, norm_type: float, poison: float
) -> None:
    s = Segment.of(grad=dtype)
    places = ((0, 2), (2, 0), (4, 0), (4, 3000), (4, 6150), (6, 999))
    for row, at in places:
        s.grads()[row][at] = poison
    value, not_finite = run_norm(backend, s, norm_type)
    assert not_finite == len(places)
    if norm_type == 0:
        assert value == sum(SIZES)
    elif norm_type == -math.inf and not math.isnan(poison):
        assert math.isfinite(value)
    else:
        assert math.isnan(value) if math.isnan(poison) else value == math.inf


def test_no_nan_is_lost_between_tiles_and_workers(backend: str) -> None:
    s = Segment.of((2048 * 1026,), grad=torch.bfloat16)  # workers 0 and 1 have a second tile
    for norm_type, at in itertools.product((math.inf, 2.0), (2047, 2048, 2048 * 1025 + 5)):
        kept = s.grads()[0][at].clone()
        s.grads()[0][at] = math.nan
        value, not_finite = run_norm(backend, s, norm_type)
        s.grads()[0][at] = kept
        assert math.isnan(value)
        assert not_finite == 1


def test_finite_float32_gradients_never_overflow(backend: str) -> None:
    s = Segment.of((5000,))
    s.grads()[0].fill_(torch.finfo(torch.float32).max)
    largest = torch.finfo(torch.float32).max
    value, not_finite = run_norm(backend, s)
    assert math.sqrt(value) == pytest.approx(math.sqrt(5000) * largest, **CLOSE)
    assert not_finite == 0


def test_float64_gradients_that_overflow_are_not_counted_as_infinite(backend: str) -> None:
    s = Segment.of((10,), grad=torch.float64)
    s.grads()[0].fill_(1e300)
    assert run_norm(backend, s) == (math.inf, 0.0)


@needs_library
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_the_sum_is_the_same_bit_for_bit_whatever_the_threads(norm_type: float) -> None:
    sizes = (3_000_001 if norm_type in (2.0, 1.0) else 100_001, *range(500))
    s = Segment.of(sizes)
    before = torch.get_num_threads()
    results = set()
    try:
        for threads in (1, 2, 1, 2):
            torch.set_num_threads(threads)
            results.add(run_norm("compiled", s, norm_type))
    finally:
        torch.set_num_threads(before)
    assert len(results) == 1
    assert results.pop()[0] == pytest.approx(run_norm("reference", s, norm_type)[0], **CLOSE)


def example_arguments() -> tuple[Any, ...]:
    s = Segment.of((5, 3000))
    out = torch.zeros(2, dtype=torch.float64)
    scratch = torch.zeros(ops.NORM_SCRATCH_NUMEL, dtype=torch.float64)
    return out, scratch, s.grad, s.touched, s.rows, s.tiles, 2.0


def test_the_operator_keeps_torchs_contract() -> None:
    operator = torch.ops.shardgrad.norm_.default
    torch.library.opcheck(operator, example_arguments())
    with FakeTensorMode():
        assert operator(*example_arguments()) is None
    written = [a.name for a in operator._schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["out", "scratch"]


@needs_library
def test_the_compiled_kernel_allocates_nothing() -> None:
    out, scratch, flat, touched, rows, tiles, _ = example_arguments()
    with torch.profiler.profile(profile_memory=True) as profile:
        ops.norm_(out, scratch, flat, touched=touched, rows=rows, tiles=tiles, norm_type=3.0)
    assert any(event.key == "shardgrad::norm_" for event in profile.key_averages())
    assert all(event.cpu_memory_usage == 0 for event in profile.events())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: a.update(out=torch.zeros(2)), "out must be float64 with 2 elements"),
        (lambda a: a.update(out=torch.zeros(3).double()), "out must be float64 with 2 elements"),
        (
            lambda a: a.update(scratch=torch.zeros(2048).double()),
            "scratch must be float64 with 2049",
        ),
        (lambda a: a.update(flat=torch.zeros(9).int()), "flat must be float32"),
        (lambda a: a.update(norm_type=math.nan), "norm_type must be a number"),
    ],
)
def test_arguments_that_would_leave_their_memory_are_refused(
    backend: str, call: Callable[[dict[str, Any]], None], message: str
) -> None:
    require_refused(backend, call, message)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: a.update(flat=torch.zeros(9)), "row 1 does not fit"),
        (lambda a: a.update(touched=torch.ones(1)), "row 0 does not fit"),
        (lambda a: a.update(tiles=1), "rows have 3 tiles, but tiles says 1"),
    ],
)
def test_rows_that_would_leave_their_memory_are_refused_where_they_are_on_the_host(
    backend: str, call: Callable[[dict[str, Any]], None], message: str
) -> None:
    require_refused(backend, call, message)


def require_refused(backend: str, call: Callable[[dict[str, Any]], None], message: str) -> None:
    names = ("out", "scratch", "flat", "touched", "rows", "tiles", "norm_type")
    arguments: dict[str, Tensor | float] = dict(zip(names, example_arguments(), strict=True))
    call(arguments)
    with pytest.raises(RuntimeError, match=message):
        norm_of(backend)(*arguments.values())
