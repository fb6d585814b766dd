"""A world of its own: frameworks keep global state, and importing them takes longer than most
tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def client_ranks() -> Iterator[Ranks]:
    """Two ranks in which frameworks may be imported."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()
