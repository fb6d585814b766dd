"""Where a rank computes, and what ranks must have in common."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.failure import UsageError
from shardgrad.programs.train.parallel import World, _choose_device, require_same_settings
from tests.support.ranks import Ranks


@pytest.fixture
def accelerators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many of them."""
    count = request.param
    found = torch.device("cuda") if count else None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize("accelerators", [2], indirect=True)
@pytest.mark.usefixtures("accelerators")
def test_each_rank_of_a_machine_has_an_accelerator_and_none_too_many_is_started() -> None:
    assert [_choose_device("auto", rank) for rank in (0, 1)] == [
        torch.device("cuda", 0),
        torch.device("cuda", 1),
    ]
    assert _choose_device("cpu", 1) == torch.device("cpu")
    with pytest.raises(UsageError, match="has 2 accelerators but more ranks: use --ranks 2"):
        _choose_device("auto", 2)


@pytest.mark.parametrize("accelerators", [0], indirect=True)
@pytest.mark.usefixtures("accelerators")
def test_a_machine_without_an_accelerator_computes_on_its_cpu_unless_told_otherwise() -> None:
    assert _choose_device("auto", 0) == torch.device("cpu")
    with pytest.raises(UsageError, match="PyTorch sees no accelerator here"):
        _choose_device("accelerator", 0)


def refused(rates: list[float], digests: list[str]) -> str:
    group = dist.group.WORLD
    assert group is not None
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), group)
    config = TrainConfig(lr=rates[world.rank])
    with pytest.raises(UsageError) as caught:
        require_same_settings(world, config, Path("run"), digests[world.rank], resume=False)
    return str(caught.value)


@pytest.mark.parametrize(
    ("rates", "digests", "words"),
    [
        ([1.0, 2.0], ["abc", "abc"], "rank 1: --lr is 2.0, and rank 0: --lr is 1.0"),
        (
            [1.0, 1.0],
            ["abc", "def"],
            "rank 1: the text of --data has SHA-256 def, and rank 0: the text of --data has",
        ),
    ],
    ids=["settings", "text"],
)
def test_ranks_that_have_other_settings_or_another_text_are_refused(
    rates: list[float], digests: list[str], words: str, two_ranks: Ranks
) -> None:
    for said in two_ranks.run(refused, rates, digests):
        assert f"The ranks have different settings: {words}" in said
