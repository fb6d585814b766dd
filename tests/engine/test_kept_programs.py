"""Programs that people wrote, or that once failed, are kept as data and agree with plain torch.

`tests/fuzz/programs` says what a program is, and draws others at random.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz import programs
from tests.fuzz.programs.program import Program
from tests.fuzz.programs.worlds import Worlds
from tests.simulated.accelerator import build

KEPT = Path(programs.__file__).parent / "seeds"


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with Worlds() as made:
        yield made


@pytest.mark.parametrize("name", sorted(path.stem for path in KEPT.glob("*.json")))
def test_a_kept_program_agrees_with_plain_torch(worlds: Worlds, name: str) -> None:
    program = Program.from_json((KEPT / f"{name}.json").read_text())
    if program.is_simulated and build.compiler() is None:
        pytest.skip("the simulated accelerator needs g++")
    differences = worlds.run(program).differences
    assert not differences, f"{differences[0]}\n{program}"
