"""Updates and norms on a device against the reference on the CPU."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from tests.support.gpu import ON_A_GPU
from tests.support.segments import (
    DTYPES,
    Segment,
    assert_same_bits,
    run_adam,
    run_norm,
    run_sgd,
)

pytestmark = ON_A_GPU
DEVICE = torch.device("cuda")
RUN = {"adam": run_adam, "sgd": run_sgd}
CASES = [
    ("adam", {}),
    ("adam", {"decoupled": False, "maximize": True}),
    ("sgd", {}),
    ("sgd", {"momentum": False, "decoupled": True}),
    ("sgd", {"nesterov": True}),
]
MASTERS = {torch.bfloat16: (None, torch.float32, torch.int16), torch.float16: (None, torch.float32)}


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
    rule: str, options: dict[str, Any], param: torch.dtype
) -> None:
    for grad, state, master in itertools.product(
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        MASTERS.get(param, (None,)),
    ):
        expected = Segment.of(param=param, grad=grad, state=state, master=master, taken=0)
        expected.touched[3] = 0
        actual = expected.to(DEVICE)
        scale = torch.tensor(0.37)
        common = {"stochastic_rounding": True, "seed": 5, **options}
        RUN[rule]("reference", expected, scale=scale, **common)
        # The dispatcher chooses the device's kernel.
        RUN[rule]("compiled", actual, scale=scale.to(DEVICE), **common)
        assert actual.ticket.item() == 0
        assert_same_bits(actual.steps.cpu(), expected.steps)
        assert_close(actual, expected)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 0.0, 3.0, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_on_the_device_equal_the_reference(dtype: torch.dtype, norm_type: float) -> None:
    s = Segment.of((5, 0, 2_500_000, 77), grad=dtype)
    s.touched[1] = 0
    on_device = s.to(DEVICE)
    expected = run_norm("reference", s, norm_type)
    results = {run_norm("compiled", on_device, norm_type) for _ in range(3)}
    assert len(results) == 1
    assert results.pop() == pytest.approx(expected, rel=1e-12)
    for poison, at in itertools.product((math.nan, math.inf), (0, 2_499_999)):
        s.grads()[2][at] = poison
        value, not_finite = run_norm("compiled", s.to(DEVICE), norm_type)
        s.grads()[2][at] = 1.0
        assert not_finite == 1
        if math.isnan(poison) and norm_type != 0:
            assert math.isnan(value)
