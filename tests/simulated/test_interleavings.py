"""Interleavings that nobody wrote down, of models that hypothesis chooses.

The budget is fixed and so are the choices: every run tries the same.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.simulated.programs.running import require_right, run
from tests.simulated.programs.scenarios import Scenario, _some_plan, some_scenario

# Steps of a scenario, by ranks. On one rank each step is an interleaving, so many share the cost of
# building the model. On several only the whole is one.
STEPS = {1: 64, 2: 4, 4: 3}


@st.composite
def _some(draw: Any, ranks: int) -> Scenario:
    modelled = some_scenario(lambda options: draw(st.sampled_from(options)), ranks=ranks, steps=0)
    # Hypothesis likes to change an example a little, and most of its steps would then be those of
    # the one before. So the streams of all steps hang on all choices.
    choice = random.Random(f"{modelled} {draw(st.integers(0, 2**32 - 1))}").choice
    plans = tuple(_some_plan(choice, modelled.model) for _ in range(STEPS[ranks]))
    return replace(modelled, plans=plans)


@pytest.mark.parametrize(
    ("ranks", "scenarios", "at_least"),
    [
        (1, 20, 1_000),
        # Two of them may differ in what orders nothing, such as the optimizer.
        (2, 16, 14),
        (4, 6, 6),
        pytest.param(1, 110, 4_000, marks=pytest.mark.long),
    ],
)
def test_no_interleaving_has_a_hazard_or_a_wrong_loss(
    ranks: int, scenarios: int, at_least: int
) -> None:
    found: set[tuple[int, ...]] = set()

    @seed(ranks)
    @settings(
        max_examples=scenarios,
        phases=(Phase.generate,),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(_some(ranks))
    def each(scenario: Scenario) -> None:
        outcome = run(scenario)
        require_right(scenario, outcome)
        found.update(tuple(outcome.digests))

    each()
    assert len(found) >= at_least
