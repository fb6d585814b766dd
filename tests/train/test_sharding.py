"""Which modules of the built-in model are units."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardgrad.engine.unit import units_under
from shardgrad.programs.plan.world import fake_world
from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.presets import PRESETS
from shardgrad.programs.train.sharding import build_model


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_and_a_head_are_units_of_their_own_and_a_tied_weight_is_the_roots(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(PRESETS["tiny"], width=16, heads=2, kv_heads=2, tied=tied)
    monkeypatch.setitem(PRESETS, "tiny", small)
    config = TrainConfig()
    with fake_world((2,)) as mesh:
        model = build_model(config, mesh, torch.device("cpu"))
        model(torch.zeros(1, 2, dtype=torch.int64))
        names = {unit.name for unit in units_under(model)[1:]}
    ends = {"embedding", "head"} & {name for name, _ in model.named_modules()}
    blocks = {f"layers.{number}" for number in range(len(model.layers))}
    assert names == {*blocks, *(() if tied else ends)}
    assert len(ends) == 2 - tied
