"""What ranks find out about each other: what each has started."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from shardgrad import checkpoint
from shardgrad.diagnosis.flight_recorder import Entry, recorder
from tests.support.parity import SHARDGRAD, token_loss, tower
from tests.support.ranks import Ranks


def last_collective_of_training() -> Entry | None:
    log = recorder.group_log(dist.group.WORLD)
    model = SHARDGRAD.shard_tower(tower())
    before = log.count
    for step in range(3):
        token_loss(model, SHARDGRAD.tokens(step)).backward()
    assert log.count > before + 18  # each unit is gathered twice, or once, and reduced
    return recorder.last


def test_ranks_that_train_together_have_started_the_same_collectives(two_ranks: Ranks) -> None:
    ours, theirs = two_ranks.run(last_collective_of_training)
    assert ours == theirs


def journal_of_a_save(folder: str) -> tuple[int, Entry | None]:
    group = dist.new_group(backend="gloo")
    # The ranks' lists differ in length, and so do the bytes that they send.
    state = {f"rank{dist.get_rank()}": [torch.ones(i) for i in range(dist.get_rank())]}
    checkpoint.save(state, folder, group=group)
    return recorder.group_log(group).count, recorder.last


def test_every_collective_of_a_save_is_in_the_journal_of_all_ranks(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    ours, theirs = two_ranks.run(journal_of_a_save, str(tmp_path))
    assert ours == theirs == (2, Entry(2, "writing of the checkpoint", (0, 1)))
