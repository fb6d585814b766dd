"""What ranks find out about each other: what each has started, whose replica differs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardgrad
from shardgrad import checkpoint
from shardgrad.checks.replica_report import checksum
from shardgrad.diagnosis.flight_recorder import Entry, recorder
from shardgrad.diagnosis.watchdog import Watchdog
from tests.support.parity import SHARDGRAD, make_optimizer, token_loss, tower
from tests.support.ranks import Ranks, on_ranks

UNIT = "layers.1"


def collectives_of_training(steps: int) -> list[Entry]:
    model = SHARDGRAD.shard_tower(tower())
    before = recorder.group_log(dist.group.WORLD).count
    for step in range(steps):
        token_loss(model, SHARDGRAD.tokens(step)).backward()
    line = recorder.group_log(dist.group.WORLD)
    assert line.count > before + 6 * steps  # each unit is gathered twice, or once, and reduced
    return list(line.recent)


def test_ranks_that_train_together_record_the_same_collectives(two_ranks: Ranks) -> None:
    ours, theirs = two_ranks.run(collectives_of_training, 3)
    assert ours == theirs


SAVE = ["plan", "writing"]


def journal_of_a_save(folder: str) -> list[Entry]:
    group = dist.new_group(backend="gloo")
    # The ranks' lists differ in length, and so do the bytes that they send.
    state = {f"rank{dist.get_rank()}": {f"x{i}": torch.ones(i) for i in range(5 * dist.get_rank())}}
    checkpoint.save(state, folder, group=group)
    return list(recorder.group_log(group).recent)


def test_every_collective_of_a_save_is_in_the_journal_of_all_ranks(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    ours, theirs = two_ranks.run(journal_of_a_save, str(tmp_path / "c"))
    assert ours == theirs
    assert [entry.name for entry in ours] == [f"{part} of the checkpoint" for part in SAVE]


def differences_after(damage: str) -> tuple[str, dict[str, tuple[tuple[int, ...], ...]]]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = tower()
    for layer in model.layers:
        shardgrad.fully_shard(layer, mesh=mesh)
    shardgrad.fully_shard(model, mesh=mesh)
    optim = make_optimizer("adamw", model)
    for step in range(2):
        token_loss(model, SHARDGRAD.tokens(step)).backward()
        optim.step()
        if step == 0:
            optim.zero_grad()
    name, param = next(
        (n, p) for n, p in model.named_parameters() if n.startswith(UNIT) and p.ndim == 2
    )
    if dist.get_rank() == 1 and damage:
        found = {"parameter": param, "gradient": param.grad}.get(damage)
        tensor = optim.state[param][damage] if found is None else found
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        local.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1)
    return name, shardgrad.replica_report(model, optim).differing


@pytest.mark.parametrize("damage", ["", "parameter", "gradient", "exp_avg"])
def test_a_replica_that_differs_in_one_bit_is_named(two_ranks: Ranks, damage: str) -> None:
    for name, differing in two_ranks.run(differences_after, damage):
        what = {"parameter": "parameter ", "gradient": "gradient of "}.get(
            damage, f"optimizer state {damage} of "
        )
        assert differing == ({what + name: ((0,), (1,))} if damage else {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_a_checksum_changes_with_every_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 9).to(dtype)
    before = int(checksum(tensor))
    for bit in range(8 * dtype.itemsize):
        flipped = tensor.clone()
        flipped.view(torch.uint8)[(bit // 8)] ^= 1 << (bit % 8)
        assert int(checksum(flipped)) != before, bit
    assert int(checksum(tensor[:0])) == 0


@on_ranks(2)
def test_a_lookout_leaves_no_thread() -> None:
    store = dist.distributed_c10d._get_default_store()
    before = threading.active_count()
    watchdog = Watchdog(store, dist.get_rank(), 2).start()
    watchdog.close()
    assert threading.active_count() == before
