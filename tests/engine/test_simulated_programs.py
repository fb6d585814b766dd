"""Every mode of the engine under adversarial streams: no hazard, and the numbers of plain torch."""

from __future__ import annotations

import pytest

from tests.simulated.programs.audit import GRAPHED, KEPT, ran


@pytest.mark.parametrize("name", sorted(KEPT.keys() - GRAPHED))
def test_no_hazard_and_the_numbers_of_plain_torch(name: str) -> None:
    differences = ran(name)[0].differences
    assert not differences, f"{differences[0]}\n{KEPT[name]}"
