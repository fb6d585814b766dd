"""Random training programs agree with plain torch; `python -m tests.fuzz.programs` runs more."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest

from shardgrad.version import commit
from tests.fuzz.programs.generate import program_of
from tests.fuzz.programs.program import Program
from tests.fuzz.programs.worlds import Worlds

FIXED = 60
ON_STREAMS = 40
CHANGING = 50


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with Worlds() as made:
        yield made


def all_agree(worlds: Worlds, programs: list[Program]) -> None:
    wrong = [
        f"{found}\n{program}\npython -m tests.fuzz.programs --seed {program.seed} --count 1"
        for program in programs
        for found in worlds.run(program).differences
    ]
    assert not wrong, "\n\n".join(wrong[:3])


def test_programs_nobody_thought_of_agree_with_plain_torch(worlds: Worlds) -> None:
    all_agree(worlds, [program_of(seed) for seed in range(FIXED)])


def test_programs_on_streams_agree_with_plain_torch(worlds: Worlds) -> None:
    all_agree(worlds, [program_of(10_000 + n, f"sim{1 + n % 2}") for n in range(ON_STREAMS)])


def test_programs_of_this_commit_agree_with_plain_torch(worlds: Worlds) -> None:
    """Others for each commit, the same each time it is tested."""
    digest = hashlib.sha256((commit() or "").removesuffix("-dirty").encode()).hexdigest()
    first = int(digest[:6], 16) * 1_000
    all_agree(worlds, [program_of(first + n) for n in range(CHANGING)])
