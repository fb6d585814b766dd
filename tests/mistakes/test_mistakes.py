"""Every mistake that we know of ends in an error or a warning that names the cure, on every rank,
in 10 s.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.mistakes.apart import named_apart
from tests.mistakes.page import APART, PAGE, TOGETHER, with_table
from tests.mistakes.table import MISTAKES, WITHIN_S, committed
from tests.support.ranks import Ranks

Said = tuple[dict[int, list[str]], float]


@pytest.fixture(scope="module")
def apart() -> Iterator[dict[str, Future[Said]]]:
    """What ranks have said; several mistakes at a time, as they spend it waiting."""
    with ThreadPoolExecutor(6) as threads:
        yield {name: threads.submit(commit_apart, name) for name in APART}


def commit_apart(name: str) -> Said:
    mistake = MISTAKES[name]
    are_named = {rank: functools.partial(mistake.is_named, rank) for rank in mistake.on}
    return named_apart(mistake.program, are_named, limit_s=WITHIN_S)


@pytest.mark.parametrize("name", TOGETHER)
def test_a_mistake_is_named_with_its_cure_on_every_rank(two_ranks: Ranks, name: str) -> None:
    for rank, (texts, seconds) in enumerate(
        two_ranks.run(committed, MISTAKES[name].program.__module__, name)
    ):
        assert any(MISTAKES[name].is_named(rank, text) for text in texts), texts
        assert seconds < WITHIN_S


@pytest.mark.parametrize("name", APART)
def test_what_one_rank_alone_does_is_named_with_its_cure(
    apart: dict[str, Future[Said]], name: str
) -> None:
    said, seconds = apart[name].result()
    for rank in MISTAKES[name].on:
        assert any(MISTAKES[name].is_named(rank, text) for text in said[rank]), said
    assert seconds < WITHIN_S


def test_the_page_lists_the_mistakes_that_are_tested() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_table(text), "python -m tests.mistakes"


def test_no_mistake_is_listed_twice() -> None:
    assert len({each.typed for each in MISTAKES.values()}) == len(MISTAKES) >= 57
