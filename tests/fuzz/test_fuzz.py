"""What comes in from outside is taken, or refused by a typed error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.checkpoints import feed_file
from tests.fuzz.targets import TARGETS

INPUTS = 60  # for each target


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_comes_in_is_taken_or_refused_by_a_typed_error(name: str) -> None:
    target = TARGETS[name]

    @settings(
        max_examples=INPUTS,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def feed(data: Any) -> None:
        target.feed(data.draw(target.inputs))

    feed()


def test_no_flipped_bit_of_a_checkpoint_of_torch_goes_unnoticed_or_leaves_something_behind() -> (
    None
):
    """Values have archives too, and headers that only torch's reader looks at are read before the
    fill.
    """
    outcomes = {
        feed_file("torch", (1, [(part, "flip", b"\x04")]))
        for part in range(9_659, 1_000_000, 9_000)
    }
    assert "refused" in outcomes
