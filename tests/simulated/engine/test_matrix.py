"""Every mode of the engine, under adversarial streams: no hazard, and the losses of the CPU."""

from __future__ import annotations

import pytest

from tests.simulated.engine.matrix import CASES
from tests.simulated.engine.programs import require_right, run


@pytest.mark.parametrize("name", CASES)
def test_no_hazard_and_the_losses_of_the_cpu(name: str) -> None:
    require_right(CASES[name], run(CASES[name]))
