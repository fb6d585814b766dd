"""Fixtures shared by every test that needs ranks; the time limits of tests, and short names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from zlib import crc32

import hypothesis
import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import Ranks
from tests.support.time_limits import pytest_timeout_set_timer

__all__ = ["pytest_timeout_set_timer"]

pytest_plugins = ["tests.simulated.plugin"]

# A test that fails must fail again, and because of the change that is tested.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")

# Tensors here are small, and ranks and another pytest want the other cores.
torch.set_num_threads(1)


def slug_of(item: pytest.Item) -> str:
    """Returns a short name of one test, which `-k` knows: names that are sentences are long."""
    return f"t{crc32(item.nodeid.encode()):x}"


def pytest_itemcollected(item: pytest.Item) -> None:
    item.extra_keyword_matches.add(slug_of(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    report.sections.append(("again", f'make test ARGS="-k {slug_of(item)}"'))
    return report


@pytest.fixture(scope="session")
def worlds() -> Iterator[dict[int, Ranks]]:
    """Worlds of 1, 2 and 4 ranks; each starts when first used."""
    made = {world_size: Ranks(world_size) for world_size in (1, 2, 4)}
    yield made
    for ranks in made.values():
        ranks.stop()


@pytest.fixture
def two_ranks(worlds: dict[int, Ranks]) -> Ranks:
    """A world of two ranks."""
    return worlds[2].renewed()


@pytest.fixture
def four_ranks(worlds: dict[int, Ranks]) -> Ranks:
    """A world of four ranks."""
    return worlds[4].renewed()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone; what is on a GPU goes over NCCL."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
