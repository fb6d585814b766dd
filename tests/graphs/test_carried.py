"""Scalars that cross the border of a graph keep their values, their dtypes, and which of them are
one.
"""

from __future__ import annotations

import pytest
import torch

from shardgrad.graphs.carried import CarriedScalars


def test_scalars_keep_their_dtypes_and_values_whatever_was_carried_before() -> None:
    carried = CarriedScalars()
    single, double = torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64)
    for scalars in ([single, None], [double, single], [single, double]):
        for scalar, kept in zip(scalars, carried.carry(scalars), strict=True):
            assert (scalar is None) == (kept is None)
            assert scalar is None or (kept.dtype == scalar.dtype and torch.equal(kept, scalar))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scalars_lie_at_the_same_addresses_in_each_call_of_one_pattern(dtype: torch.dtype) -> None:
    carried = CarriedScalars()
    seen = set()
    for number in range(3):
        factor, verdict = torch.tensor(float(number), dtype=dtype), torch.tensor(0.0)
        kept = carried.carry([factor, verdict, factor])
        assert kept[0] is kept[2]
        assert (kept[0].item(), kept[1].item()) == (number, 0.0)
        seen.add((*(each.data_ptr() for each in kept), carried.pattern))
    assert len(seen) == 1


def test_another_dtype_or_another_scalar_in_common_is_another_pattern() -> None:
    carried = CarriedScalars()
    one, other, double = (
        torch.tensor(1.0),
        torch.tensor(2.0),
        torch.tensor(1.0, dtype=torch.float64),
    )
    patterns = set()
    for scalars in ([one, other], [one, one], [one, None], [double, one], [double, double]):
        carried.carry(scalars)
        patterns.add(carried.pattern)
    assert len(patterns) == 5
