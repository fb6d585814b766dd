"""The watchdog does nothing while ranks go on, and tells a program why its ranks do not."""

from __future__ import annotations

import os
import subprocess
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardgrad
from shardgrad.diagnosis import watchdog as module
from shardgrad.diagnosis.flight_recorder import Entry, FlightRecorder, recorder
from shardgrad.diagnosis.rank_status import Diagnosis, rank_status
from shardgrad.diagnosis.watchdog import Watchdog
from tests.support.parity import SHARDGRAD, token_loss, tower
from tests.support.ranks import Ranks, on_ranks

LONG_S = 60.0


def test_closing_waits_for_what_is_being_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that comes back from the store while the interpreter ends would abort the
    process.
    """
    is_telling = threading.Event()

    class SlowStore(dist.HashStore):
        def set(self, key: str, value: str) -> None:
            is_telling.set()
            time.sleep(1.0)

    monkeypatch.setattr(module, "PrefixStore", lambda _, store: SlowStore())
    watchdog = Watchdog(dist.HashStore(), 0, 1)
    watchdog.start()
    assert is_telling.wait(10)
    watchdog.close()
    assert not watchdog.is_alive()


@pytest.mark.parametrize(("ranks", "period_s"), [(256, 0.5), (4096, 8.0)])
def test_all_ranks_together_tell_the_store_no_more_often_than_one_host_can_take(
    ranks: int, period_s: float
) -> None:
    assert Watchdog(dist.HashStore(), 0, ranks).period_s == period_s


def test_until_a_collective_is_old_nothing_is_sent_and_no_stack_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, stacks = mock.MagicMock(), mock.MagicMock()
    monkeypatch.setattr(module, "PrefixStore", lambda *_: store)
    monkeypatch.setattr(module, "calls_of_thread", stacks)
    monkeypatch.setattr(module, "PERIOD_S", 0.05)
    recorder.progress_s = 0.0  # as of a program that took long to build its model
    watchdog = Watchdog(dist.HashStore(), 0, 2)
    watchdog.start()
    recorder.progress_s += 1.0  # as of collectives that come one after the other
    time.sleep(1.0)
    watchdog.close()
    assert [call[0] for call in store.method_calls] == ["set"]  # that it has started
    assert not stacks.called
    assert module.STALL_S == 10.0


def test_a_store_that_is_gone_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would log a page each time, twice a second, on a rank that outlives the store's."""
    store = mock.MagicMock()
    store.set.side_effect = [None, dist.DistNetworkError("Broken pipe")]
    monkeypatch.setattr(module, "PrefixStore", lambda *_: store)
    monkeypatch.setattr(module, "STALL_S", 0.0)
    watchdog = Watchdog(dist.HashStore(), 0, 2)
    watchdog.start()
    watchdog.join(10)
    assert not watchdog.is_alive()


@pytest.mark.usefixtures("one_rank")
def test_a_wait_for_ranks_that_are_there_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "waits_in", Entry(1, "all-gather of a unit", (0, 1)))
    monkeypatch.setattr(recorder, "verdict", None)
    ended = rank_status(FlightRecorder(), 2, has_ended=True)
    found = Diagnosis("Rank 2 has finished.", "end together")
    with pytest.warns(module.WaitingRanksWarning, match="Rank 2 has finished"):
        module._warn_or_give_up(found, {2: ended})
    module._warn_or_give_up(found, {0: ended})  # a rank says nothing of itself
    assert recorder.verdict is None


@pytest.mark.parametrize(
    ("ranks", "switch", "starts"),
    [
        (1, "", False),
        (2, "0", False),
        (1024, "", True),
        (1025, "", False),
        (4096, "1", True),
    ],
)
def test_it_is_off_beyond_1024_ranks_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, ranks: int, switch: str, starts: bool
) -> None:
    monkeypatch.setenv("SHARDGRAD_WATCHDOG", switch)
    monkeypatch.setattr(module, "_current", None)
    current_at_start = []
    with (
        mock.patch.multiple(
            module.dist,
            get_world_size=mock.Mock(return_value=ranks),
            get_rank=mock.Mock(return_value=0),
            get_backend_config=mock.Mock(return_value="cpu:gloo"),
        ),
        mock.patch.object(module, "Watchdog") as made,
        mock.patch.object(module.dist.distributed_c10d, "_get_default_store"),
        mock.patch.object(module.dist, "group", mock.Mock()),
        mock.patch.object(module, "Finalize"),
    ):
        made().start = lambda: current_at_start.append(module._current)
        module.watch_ranks(torch.device("cpu"))
    assert current_at_start == [None] * starts  # one that cannot start is not there to be ended


def test_what_a_rank_has_not_told_again_does_not_count() -> None:
    watchdog = Watchdog(dist.HashStore(), 0, 2)
    own = rank_status(recorder, 0)
    for _ in range(2):
        watchdog._tell("1", rank_status(recorder, 1))
        assert list(watchdog._statuses(own)[0]) == [1, 0]
        assert list(watchdog._statuses(own)[0]) == [0]


def test_what_was_read_once_is_not_said_and_what_was_read_twice_is_said_once() -> None:
    reads, said = mock.Mock(side_effect=["b", "a", "a", "a"]), mock.Mock()
    with mock.patch.multiple(module, diagnose=reads, _warn_or_give_up=said):
        watchdog = Watchdog(dist.HashStore(), 0, 2)
        watchdog.period_s = 0.0
        with pytest.raises(StopIteration):  # there is no fifth
            watchdog._watch_stall(recorder.progress_s)
    said.assert_called_once_with("a", mock.ANY)


def with_a_watch(program: Callable[[], object], stall_s: float) -> tuple[object, list[str]]:
    """Returns what a program returns, and what the watchdog has warned of meanwhile."""
    said: list[str] = []
    module.STALL_S = stall_s
    if module._current is not None:
        module._current.close()
        module._current = None
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: said.append(str(message))
        try:
            return program(), said
        finally:
            if module._current is not None:
                module._current.close()
                module._current = None


def steps_with_a_late_rank() -> None:
    # Of a collective that was done before the verdict on it came.
    recorder.verdict = Entry(1, "an earlier one", (0, 1)), RuntimeError("it cannot complete")
    model = SHARDGRAD.shard_tower(tower())
    for step in range(2):
        token_loss(model, SHARDGRAD.tokens(step)).backward()
        time.sleep(2.5 * (dist.get_rank() == step))
    token_loss(model, SHARDGRAD.tokens(2)).backward()
    recorder.verdict = None


def test_of_a_rank_that_is_late_nothing_is_said(two_ranks: Ranks) -> None:
    assert two_ranks.run(with_a_watch, steps_with_a_late_rank, 1.0) == [(None, [])] * 2


def stopped_and_continued() -> int:
    """Rank 1 is stopped by a signal for three times as long as a stall."""
    model = SHARDGRAD.shard_tower(tower())
    token_loss(model, SHARDGRAD.tokens(0)).backward()
    own = os.getpid()
    stops = f"kill -STOP {own}; sleep 3; kill -CONT {own}" if dist.get_rank() == 1 else "true"
    with subprocess.Popen(["sh", "-c", stops]):
        for step in range(3):
            token_loss(model, SHARDGRAD.tokens(step)).backward()
    return 3


def test_a_rank_that_is_stopped_and_continued_ends_nothing(two_ranks: Ranks) -> None:
    assert two_ranks.run(with_a_watch, stopped_and_continued, 1.0) == [(3, [])] * 2


def ends(error: BaseException | None) -> tuple[str, bool]:
    """As programs end with Python 3.12 and later, where no thread can be started any more."""
    SHARDGRAD.shard_tower(tower())
    watchdog = module._current
    assert watchdog is not None
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("at shutdown")):
        watchdog.end(error)
    statuses, _ = watchdog._statuses(rank_status(recorder, 2))  # as one that looks later
    [status] = [each for each in statuses.values() if each.has_ended]
    dist.barrier()
    watchdog._store.delete_key(module._ENDED)
    return status.failure.partition("(")[2], watchdog.is_alive()


@pytest.mark.parametrize(
    ("error", "told"),
    [(None, ""), (RuntimeError("no room on the disk"), "RuntimeError: no room on the disk)")],
)
def test_a_rank_that_ends_says_so_without_a_new_thread(
    two_ranks: Ranks, error: Exception | None, told: str
) -> None:
    found = two_ranks.run(with_a_watch, partial(ends, error), LONG_S)
    assert found == [((told, False), [])] * 2


@on_ranks(2)
def test_what_a_rank_refused_no_longer_counts_once_it_goes_on() -> None:
    model = SHARDGRAD.shard_tower(tower())
    token_loss(model, SHARDGRAD.tokens(0)).backward()
    model.scale = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(shardgrad.ShardgradError):
        token_loss(model, SHARDGRAD.tokens(0))
    assert recorder.reported is not None
    del model.scale
    token_loss(model, SHARDGRAD.tokens(0)).backward()
    assert recorder.reported is None
