"""Scalars that cross the border of a graph keep their values, and which of them are one."""

from __future__ import annotations

import torch

from shardgrad.graphs.carried import CarriedScalars


def test_scalars_keep_their_values_whatever_was_carried_before() -> None:
    carried = CarriedScalars()
    one, other = torch.tensor(0.0), torch.tensor(1.0)
    for scalars in ([one, None], [other, one], [one, other]):
        for scalar, kept in zip(scalars, carried.carry(scalars), strict=True):
            assert (scalar is None) == (kept is None)
            assert scalar is None or torch.equal(kept, scalar)


def test_scalars_lie_at_the_same_addresses_in_each_call_of_one_pattern() -> None:
    carried = CarriedScalars()
    seen = set()
    for number in range(3):
        first, second = torch.tensor(float(number)), torch.tensor(0.0)
        kept = carried.carry([first, second, first])
        assert kept[0] is kept[2]
        assert (kept[0].item(), kept[1].item()) == (number, 0.0)
        seen.add((*(each.data_ptr() for each in kept), carried.pattern))
    assert len(seen) == 1


def test_another_scalar_in_common_is_another_pattern() -> None:
    carried = CarriedScalars()
    one, other = torch.tensor(1.0), torch.tensor(2.0)
    patterns = set()
    for scalars in ([one, other], [one, one], [one, None], [None, one]):
        carried.carry(scalars)
        patterns.add(carried.pattern)
    assert len(patterns) == 4
