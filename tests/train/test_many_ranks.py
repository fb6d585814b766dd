"""How ranks of a large world meet."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from shardgrad.programs.train import parallel
from shardgrad.programs.train.config import TrainConfig


@pytest.mark.parametrize(("ranks", "setting"), [(8, None), (4096, "1")])
def test_ranks_of_a_large_world_connect_when_they_have_something_to_send(
    ranks: int, setting: str | None
) -> None:
    found = []

    def begin(*args: Any, **options: Any) -> None:
        found.append(os.environ.get("TORCH_GLOO_LAZY_INIT"))

    launched = {"RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "8"}
    with (
        mock.patch.dict(os.environ, launched),
        mock.patch.object(dist, "init_process_group", begin),
        mock.patch.object(dist, "new_group"),
    ):
        os.environ.pop("TORCH_GLOO_LAZY_INIT", None)
        parallel.join(TrainConfig(device="cpu"))
    assert found == [setting]
