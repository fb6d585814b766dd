"""A short round of the fuzzer; `python -m tests.fuzz.long` is the long one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS

INPUTS = 60  # for each target


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_comes_in_is_taken_or_refused_by_a_typed_error(name: str) -> None:
    target = TARGETS[name]

    @settings(max_examples=INPUTS, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def feed(data: Any) -> None:
        target.feed(data.draw(target.inputs))

    feed()
