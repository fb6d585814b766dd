"""Every mistake that we know of ends in an error or a warning that names the cure, on every rank,
in 10 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.mistakes import ranks_apart
from tests.mistakes.__main__ import PAGE, mistakes_of, with_table
from tests.mistakes.apart import named_apart
from tests.mistakes.table import MISTAKES, WITHIN_S, committed
from tests.support.ranks import Ranks

APART = mistakes_of(ranks_apart)
TOGETHER = MISTAKES.keys() - APART.keys()  # leave the group as it was


@pytest.fixture(scope="module")
def apart() -> Iterator[dict[str, Future[Any]]]:
    """What ranks have said; several mistakes at a time, as they spend it waiting."""
    with ThreadPoolExecutor(6) as threads:
        yield {
            name: threads.submit(
                named_apart, each.program, each.is_named, each.on, limit_s=WITHIN_S
            )
            for name, each in APART.items()
        }


@pytest.mark.parametrize("name", sorted(TOGETHER))
def test_a_mistake_is_named_with_its_cure_on_every_rank(two_ranks: Ranks, name: str) -> None:
    mistake = MISTAKES[name]
    for rank, (texts, seconds) in enumerate(two_ranks.run(committed, mistake.program)):
        assert any(mistake.is_named(rank, text) for text in texts), texts
        assert seconds < WITHIN_S


@pytest.mark.parametrize("name", APART)
def test_what_one_rank_alone_does_is_named_with_its_cure(
    apart: dict[str, Future[Any]], name: str
) -> None:
    missing, said = apart[name].result()
    assert not missing, said


def test_the_page_lists_each_mistake_that_is_tested_once() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_table(text), "python -m tests.mistakes"
    assert len({each.typed for each in MISTAKES.values()}) == len(MISTAKES) >= 57
