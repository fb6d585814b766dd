"""Programs that people wrote, or that once failed, are kept as data and agree with plain torch.

`tests/fuzz/programs` says what a program is, and draws others at random. Those on simulated devices
are run by `test_simulated_programs.py`, here and in tests/graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz import programs
from tests.fuzz.programs.program import Program
from tests.fuzz.programs.worlds import Worlds

PROGRAMS = {
    path.stem: program
    for path in sorted((Path(programs.__file__).parent / "seeds").glob("*.json"))
    if not (program := Program.from_json(path.read_text())).on_device
}


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with Worlds() as made:
        yield made


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_kept_program_agrees_with_plain_torch(worlds: Worlds, name: str) -> None:
    differences = worlds.run(PROGRAMS[name]).differences
    assert not differences, f"{differences[0]}\n{PROGRAMS[name]}"
