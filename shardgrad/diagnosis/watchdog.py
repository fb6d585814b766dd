"""The watchdog: finds out through the store which rank the others wait for, and why.

[Note: Watchdog]
A collective cannot be used to find out why a collective hangs, so ranks exchange their status
through the store of the process group. A thread on every rank compares the time with that of the
last collective, and does nothing else until 10 s have passed. From then on it publishes the rank's
status repeatedly, and after 10 s, 20 s, 40 s, ... it reads the statuses of the others. Only
statuses that are renewed count: a rank without a new status is running, suspended, or disconnected.

The watchdog usually only warns, since a collective that looks stuck may still complete, and a
thread that waits inside torch cannot be interrupted. If the engine waits over gloo for a rank that
has failed or ended, the wait is aborted with a `CollectiveError`. A rank that is late or silent may
still join, and is not reported.

Over NCCL, hosts wait for the device and not in a collective. There a rank counts as waiting if its
host stays on one line and its stream has pending work. So a rank that is busy with its own host
work does not count.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.diagnosis.rank_status import Diagnosis, RankStatus, diagnose, rank_status
from shardgrad.diagnosis.thread_stacks import Call, calls_of, calls_of_thread, passes_collective
from shardgrad.errors import CollectiveError

__all__ = ["WaitingRanksWarning", "Watchdog", "watch_ranks"]

STALL_S = 10.0
PERIOD_S = 0.5
_TOLD_PER_S = 512.0  # statuses per second of all ranks together; one host serves the store
_SILENT_PERIODS = 6  # periods without a new status, after which a rank counts as running
_LOOKS = 12  # consecutive reads of the others' statuses, before a longer pause
_LAST_CHECK_S = 10.0  # how long `close` waits for a check; that of an unreachable store never ends
_LOOKING = 8  # the lowest ranks read all statuses; not all ranks, to bound the store's traffic
_MOST_RANKS = 1024
_BACKENDS = ("gloo", "nccl", "xccl", "hccl")
# Keys of the store; the status of a rank is under its number.
_ENDED, _STARTED = "ended", "started"


class WaitingRanksWarning(UserWarning):
    """Ranks wait for each other in different collectives, or for a rank that has ended."""


class Watchdog:
    """Publishes the status of this rank when it stalls, and reads the statuses of the others.

    Args:
        store: the store that the process group was initialised with; the watchdog opens another
            connection to it.
        rank: the rank of this process.
        world_size: number of ranks.
        device: the device of the collectives. If it is not the CPU, hosts wait for the device.

    Attributes:
        period_s: seconds between two checks of the clock.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        device: torch.device | None = None,
    ) -> None:
        world = dist.group.WORLD
        prefix = f"shardgrad/watchdog/{getattr(world, 'group_name', '')}"
        # A thread that waits for the store holds the connection's lock, so the watchdog has its
        # own.
        shared: Any = store  # `clone` is not in its annotations
        self._store = PrefixStore(prefix, shared.clone())
        self._rank = rank
        self._world_size = world_size
        self._stall_s = STALL_S
        self._device = device
        self._world: Callable[[], Any] = (lambda: None) if world is None else weakref.ref(world)
        self._training_thread = threading.get_ident()
        # For each rank, its latest status with the time by that rank's clock and by this rank's.
        self._heard: dict[int, tuple[float, float, RankStatus]] = {}
        self._is_closing = threading.Event()
        self._farewell: Callable[[], None] | None = None
        self.period_s = max(PERIOD_S, world_size / _TOLD_PER_S)
        self._silence_s = _SILENT_PERIODS * self.period_s
        self._thread = threading.Thread(target=self._run, name="shardgrad watchdog", daemon=True)

    def start(self) -> Watchdog:
        """Starts the thread. The calling thread is the training thread."""
        global _current
        _current = self
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the thread once a running check is done.

        Waits for the thread for up to 10 seconds, since a thread that returns from the store after
        the interpreter began to shut down would abort the process.
        """
        self._is_closing.set()
        self._thread.join(self.period_s + _LAST_CHECK_S)

    @property
    def is_current(self) -> bool:
        """True if the default process group is still the one that the watchdog was created for."""
        return dist.group.WORLD is self._world()

    def end(self, error: BaseException | None) -> None:
        """Ends the thread, which first publishes that this rank has ended, for ranks that may wait
        for it.

        The existing thread does it, since an interpreter that is shutting down starts no other one.
        """
        self._farewell = partial(self._say_farewell, error)
        self._is_closing.set()
        self._thread.join(self._silence_s)

    def _say_farewell(self, error: BaseException | None) -> None:
        """Publishes that this rank has ended, or explains the collective's error that ended it."""
        own = rank_status(
            recorder, self._rank, thread=self._training_thread, error=error, has_ended=True
        )
        if not isinstance(error, RuntimeError) or not passes_collective(calls_of(error)):
            self._tell(_ENDED, own)
        elif self._store.check([_ENDED]):
            ended: RankStatus = self._told(_ENDED)
            own = replace(own, error=None, has_ended=False, waits="collective")
            statuses = {own.rank: own, ended.rank: ended}
            recorder.waits_in = None  # no wait is left to abort
            found = diagnose(statuses, self._world_size)
            if found is not None:
                _warn_or_give_up(found, statuses)

    # -- the thread

    def _run(self) -> None:
        look_s, looks, former, said = self._stall_s, 0, "", ""
        with suppress(Exception):  # here and below: of a store that is gone
            self._store.set(f"{_STARTED}/{self._rank}", "")
        while not self._is_closing.wait(self.period_s) and self.is_current:
            since_s = recorder.progress_s
            idle_s = time.monotonic() - since_s
            if idle_s < self._stall_s:
                look_s, looks, former, said = self._stall_s, 0, "", ""
                self._heard.clear()
                continue
            with suppress(Exception):  # a filter may turn warnings into errors
                own = self._look()
                self._tell(str(self._rank), (time.time(), own))
                if idle_s < look_s:
                    continue
                statuses, unwatched = self._statuses(own)
                found = diagnose(statuses, self._world_size, unwatched)
                sentence = "" if found is None else found.sentence
                # A diagnosis that is the same in two checks in a row is not a transient state.
                is_new = sentence == former != said and recorder.progress_s == since_s
                former, looks = sentence, looks + 1
                if looks == _LOOKS:
                    look_s, looks = 2 * idle_s, 0
                    self._heard.clear()
                if found is not None and is_new:
                    said = sentence
                    _warn_or_give_up(found, statuses)
        self._is_closing.wait()
        if self._farewell is not None:
            with suppress(Exception):
                self._farewell()

    def _look(self) -> RankStatus:
        """Returns the status of this rank, after a period in which it sees whether the host
        moves.
        """
        if recorder.waits_in is not None:
            return self._own()
        before = self._calls()
        self._is_closing.wait(self.period_s)
        calls, waits = self._calls(), ""
        if calls == before and passes_collective(calls):
            waits = "collective"
        elif calls == before and self._is_device_busy(calls):
            waits = "device"
        return self._own(waits)

    def _calls(self) -> tuple[Call, ...]:
        return calls_of_thread(self._training_thread)

    def _is_device_busy(self, calls: tuple[Call, ...]) -> bool:
        # During a capture, a query of a stream would fail and could invalidate the capture.
        if self._device is None or any("/shardgrad/graphs/" in call.filename for call in calls):
            return False
        return not torch.accelerator.current_stream(self._device).query()

    def _own(self, waits: str = "") -> RankStatus:
        return rank_status(recorder, self._rank, thread=self._training_thread, waits=waits)

    # -- statuses of ranks

    def _statuses(self, own: RankStatus) -> tuple[dict[int, RankStatus], list[int]]:
        """Returns the statuses of ranks that have ended or stalled, and the ranks that have never
        started a watchdog.
        """
        ranks = range(self._world_size if self._rank < _LOOKING else 0)
        now_s = time.monotonic()
        for rank in ranks:
            if self._store.check([str(rank)]):
                told_s, status = self._told(str(rank))
                # A status that is there at the first read may be old.
                before = self._heard.setdefault(rank, (told_s, -math.inf, status))
                if before[0] != told_s:
                    self._heard[rank] = told_s, now_s, status
        statuses = {
            rank: status
            for rank, (_, heard_s, status) in self._heard.items()
            if now_s - heard_s < self._silence_s
        }
        statuses[self._rank] = own
        if self._store.check([_ENDED]):
            ended: RankStatus = self._told(_ENDED)
            statuses[ended.rank] = ended
        unheard = (rank for rank in ranks if rank not in self._heard and rank not in statuses)
        return statuses, [r for r in unheard if not self._store.check([f"{_STARTED}/{r}"])]

    def _tell(self, key: str, what: object) -> None:
        store: Any = self._store
        store.set(key, pickle.dumps(what))  # it takes bytes, which its annotation does not say

    def _told(self, key: str) -> Any:
        return pickle.loads(self._store.get(key))


_current: Watchdog | None = None  # the watchdog of this process


def watch_ranks(device: torch.device) -> Watchdog | None:
    """Returns the watchdog of the default process group, and starts it if there is none; None if it
    is disabled.

    The environment variable `SHARDGRAD_WATCHDOG=0` disables it, and `1` enables it for more than
    1,024 ranks.

    Args:
        device: the device on which parameters compute.
    """
    world, switch = dist.group.WORLD, os.environ.get("SHARDGRAD_WATCHDOG", "")
    if world is None or switch == "0":
        return None
    if _current is not None and _current.is_current:
        return _current
    size = dist.get_world_size()
    is_known = any(name in dist.get_backend_config(world) for name in _BACKENDS)
    if size == 1 or not is_known or (size > _MOST_RANKS and switch != "1"):
        return None
    if _current is not None:
        _current.close()
    Finalize(None, _end, exitpriority=100)  # runs in multiprocessing's processes, unlike atexit
    return Watchdog(
        dist.distributed_c10d._get_default_store(),
        dist.get_rank(),
        size,
        device=None if device.type == "cpu" else device,
    ).start()


def _warn_or_give_up(diagnosis: Diagnosis, statuses: dict[int, RankStatus]) -> None:
    """Aborts the wait of the training thread if its collective cannot complete; else warns."""
    lost = {rank for rank, t in statuses.items() if t.error is not None or t.has_ended}
    if dist.get_rank() in lost:
        return
    awaited = recorder.waits_in
    if awaited is not None and lost.intersection(awaited[0].ranks):
        entry = awaited[1]
        recorder.verdict = (
            entry,
            CollectiveError(
                f"the {entry.name} cannot complete: {diagnosis.sentence.rstrip('.')}",
                expected="every rank to join it",
                where=f"rank {dist.get_rank()}",
                fix=diagnosis.fix,
            ),
        )
    else:
        text = f"shardgrad: {diagnosis.sentence} Try: {diagnosis.fix}"
        warnings.warn(text, WaitingRanksWarning, stacklevel=2)


def _end() -> None:
    global _current
    if _current is not None:
        _current.end(sys.exc_info()[1] or getattr(sys, "last_value", None))
    _current = None
