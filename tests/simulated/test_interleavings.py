"""Interleavings that nobody wrote down, of models that hypothesis chooses.

The budget is fixed and so are the choices: every run tries the same. `explore.py` tries more.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from shardgrad.engine.buffers import Slot
from tests.simulated.programs.explore import STEPS, Digest, digests_of, scenario_of
from tests.simulated.programs.running import run
from tests.simulated.programs.scenarios import (
    Model,
    Places,
    Plan,
    Scenario,
    _some_plan,
    some_scenario,
)
from tests.support import processes

ROOT = Path(__file__).parents[2]
PARTS = (1, 2, 3, 4)  # of one rank; each is a test, since a test may not take long
SCENARIOS = 11  # in each part: some 650 interleavings
AT_LEAST = 2_000
LONG_SCENARIOS = 27
# On several ranks an interleaving is a whole scenario.
SCENARIOS_OF_RANKS = {2: 28, 4: 10}
# Two of them may differ in what orders nothing, such as the optimizer.
AT_LEAST_OF_RANKS = {2: 24, 4: 10}


@st.composite
def _some(draw: Any, ranks: int) -> Scenario:
    modelled = some_scenario(lambda options: draw(st.sampled_from(options)), ranks=ranks, steps=0)
    # Hypothesis likes to change an example a little, and most of its steps would then be those of
    # the one before. So the streams of all steps hang on all choices.
    choice = random.Random(f"{modelled} {draw(st.integers(0, 2**32 - 1))}").choice
    plans = tuple(_some_plan(choice, modelled.model) for _ in range(STEPS[ranks]))
    return replace(modelled, plans=plans)


def _explored(ranks: int, count: int, number: int) -> frozenset[Digest]:
    """Returns the digests of `count` scenarios; another `number` stands for others."""
    found: set[Digest] = set()

    @seed(number)
    @settings(
        max_examples=count,
        phases=(Phase.generate,),  # `digests_of` makes smaller what goes wrong, and knows how
        database=None,
        deadline=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(_some(ranks))
    def each(scenario: Scenario) -> None:
        found.update(digests_of(scenario))

    each()
    return frozenset(found)


@cache  # for the test of their sum
def _part(number: int) -> frozenset[Digest]:
    return _explored(1, SCENARIOS, number)


@pytest.mark.parametrize("part", PARTS)
def test_no_interleaving_of_one_rank_has_a_hazard_or_a_wrong_loss(part: int) -> None:
    print(f"part {part}: {len(_part(part))} different interleavings")
    assert len(_part(part)) >= AT_LEAST / len(PARTS)


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_interleaving_of_several_ranks_has_a_hazard_or_a_wrong_loss(ranks: int) -> None:
    found = len(_explored(ranks, SCENARIOS_OF_RANKS[ranks], ranks))
    print(f"{ranks} ranks: {found} different interleavings")
    assert found >= AT_LEAST_OF_RANKS[ranks]


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_no_interleaving_of_a_longer_search_has_a_hazard_or_a_wrong_loss(part: int) -> None:
    assert len(_explored(1, LONG_SCENARIOS, 100 + part)) >= 2 * AT_LEAST / len(PARTS)


def test_at_least_two_thousand_interleavings_differ() -> None:
    found = frozenset().union(*map(_part, PARTS))
    print(f"{len(found)} different interleavings")
    assert len(found) >= AT_LEAST


@contextmanager
def _nobody_waits_for_writers() -> Iterator[None]:
    original = Slot.start_reading
    Slot.start_reading = lambda self, stream: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Slot.start_reading = original  # type: ignore[method-assign]


def test_what_goes_wrong_is_told_as_a_small_scenario_to_paste() -> None:
    scenario = some_scenario(random.Random(1).choice, ranks=2, steps=4)
    with _nobody_waits_for_writers(), pytest.raises(AssertionError) as caught:
        digests_of(scenario, shrink_s=4.0)
    (told,) = (note for note in caught.value.__notes__ if note.startswith("The scenario was\n"))
    names = {"Scenario": Scenario, "Model": Model, "Plan": Plan, "Places": Places}
    pasted = eval(told.partition("\n")[2], names)
    assert len(pasted.plans) < 4
    assert not run(pasted).hazards
    with _nobody_waits_for_writers():
        assert run(pasted).hazards


def test_the_long_mode_leaves_a_record(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.simulated.programs.explore",
        "--smoke",
        "--out",
        str(tmp_path),
    ]
    done = processes.run(command, cwd=ROOT, timeout_s=100)
    assert done.returncode == 0, done.stderr
    (line,) = (tmp_path / "interleavings.jsonl").read_text(encoding="utf-8").splitlines()
    record = json.loads(line)
    assert {"git", "torch", "cpu", "ops_backend"} <= set(record["environment"])
    assert record["config"]["seed"] == 0
    assert record["summary"]["distinct"] >= record["config"]["interleavings"]
    assert record["summary"]["failure"] == ""


def test_the_long_mode_chooses_by_seed_and_number() -> None:
    first = [scenario_of(7, number) for number in range(200)]
    assert first == [scenario_of(7, number) for number in range(200)]
    assert len({*first, *(scenario_of(8, number) for number in range(200))}) == 400
    assert {scenario.model.ranks for scenario in first} == set(STEPS)
