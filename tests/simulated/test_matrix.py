"""Every mode of the engine, under adversarial streams: no hazard, and the losses of the CPU."""

from __future__ import annotations

import pytest

from tests.simulated.programs.audit import ran
from tests.simulated.programs.matrix import CASES
from tests.simulated.programs.running import require_right


@pytest.mark.parametrize("name", CASES)
def test_no_hazard_and_the_losses_of_the_cpu(name: str) -> None:
    outcome, _ = ran(name)
    require_right(CASES[name], outcome)
