"""What the training program asks of the store in a large world."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardgrad.programs.train import parallel
from shardgrad.programs.train.config import TrainConfig


class CountedStore(dist.Store):
    """A store of threads, which counts what is read from it."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._is_set = threading.Condition()
        self.reads = 0

    def set(self, key: str, value: Any) -> None:
        with self._is_set:
            self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
            self._is_set.notify_all()

    def get(self, key: str) -> bytes:
        with self._is_set:
            self.reads += 1
            self._is_set.wait_for(lambda: key in self._values, 60)
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        with self._is_set:
            self._is_set.wait_for(lambda: all(key in self._values for key in keys), 60)


def reads_of_each(ranks: int, *, is_lazy: bool) -> float:
    """Returns what a rank reads until a group of gloo has reduced, sent and gathered something."""
    store = CountedStore()

    def rank(number: int) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=is_lazy)]
        group = dist.ProcessGroupGloo(store, number, ranks, options)
        value = torch.ones(1)
        group.allreduce([value]).wait()
        group.broadcast(value, 0).wait()
        group.allgather([[torch.empty(1) for _ in range(ranks)]], [value]).wait()
        assert value.item() == ranks

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return store.reads / ranks


def test_a_rank_reads_as_few_addresses_of_many_ranks_as_of_few() -> None:
    assert [reads_of_each(ranks, is_lazy=False) for ranks in (4, 16)] == [4, 16]
    assert max(reads_of_each(ranks, is_lazy=True) for ranks in (4, 16)) <= 4


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
