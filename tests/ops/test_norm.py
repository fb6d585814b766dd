"""norm_ in both backends, against torch in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.support.segments import (
    DTYPES,
    SIZES,
    Segment,
    run_norm,
)

NORM_TYPES = (2.0, 1.0, 0.0, 3.0, 0.5, math.inf, -math.inf)
# Sums of a few thousand positive float64 numbers: the order decides the last bits only.
CLOSE = {"rel": 1e-13}


def rooted(value: float, norm_type: float) -> float:
    return value if norm_type in (0.0, math.inf, -math.inf) else value ** (1 / norm_type)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dead", [(), (0, 4)], ids=str)
def test_norms_of_live_rows_are_torchs_in_float64(
    backend: str, dead: tuple[int, ...], dtype: torch.dtype, norm_type: float
) -> None:
    s = Segment.of(grad=dtype)
    s.grad[s.grad == s.grad[0]] = math.nan  # what lies between the rows
    for i in dead:
        s.touched[s.pieces[i][5]] = 0
        s.grads()[i].fill_(math.nan)
    whole = torch.cat([grad for i, grad in enumerate(s.grads()) if i not in dead]).double()
    value, not_finite = run_norm(backend, s, norm_type)
    expected = torch.linalg.vector_norm(whole, norm_type).item()
    assert rooted(value, norm_type) == pytest.approx(expected, **CLOSE)
    assert not_finite == 0
    if not math.isinf(norm_type):
        more, _ = run_norm(backend, s, norm_type, 7.0)
        assert more - 7.0 == pytest.approx(value, **CLOSE)


@pytest.mark.parametrize("sizes", [SIZES, (0, 0), ()], ids=str)
def test_without_live_elements_the_norm_is_that_of_nothing(
    backend: str, sizes: tuple[int, ...]
) -> None:
    s = Segment.of(sizes)
    s.touched.zero_()
    for norm_type in NORM_TYPES:
        expected = math.inf if norm_type == -math.inf else 0.0
        assert run_norm(backend, s, norm_type) == (expected, 0.0)
        assert norm_type == -math.inf or run_norm(backend, s, norm_type, 0.1) == (0.1, 0.0)


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
