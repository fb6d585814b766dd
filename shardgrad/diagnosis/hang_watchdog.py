"""The hang watchdog: asks every rank through the store where it is, when a collective fails or
hangs.

[Note: Hang diagnosis]
A collective cannot be used to ask why a collective hangs, so question and answers go through the
store that the process group was initialised with. On every rank a thread checks periodically
whether a rank has asked, and answers for the training thread, with its stack: that works while the
training thread waits, and while it is late. A rank that does not answer has ended, is stopped, or
is cut off. NCCL's and torch's flight recorders are not needed, and neither their switches nor their
records are changed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch.distributed.distributed_c10d import PrefixStore, Store

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.diagnosis.rank_status import Diagnosis, RankStatus, diagnose, rank_status

__all__ = ["HangWatchdog", "OnStall"]

OnStall = Callable[[Diagnosis, dict[int, RankStatus]], None]

_PREFIX = "shardgrad/hang_watchdog"
_ASKED = "asked"
_CHECKS_PER_S = 512.0  # of all ranks together, whatever their number
_SILENT_PERIODS = 6  # after which no further answer is expected
_LAST_CHECK_S = (
    10.0  # of a check under way on a busy machine; one of an unreachable store never ends
)


class HangWatchdog:
    """Answers for this rank when another asks, and asks the others when this rank fails or stalls.

    Args:
        store: that the process group was initialised with; the watchdog opens further connections
            to it.
        rank: of this process.
        world_size: number of ranks.
        stall_s: seconds without progress after which all ranks are asked and `on_stall` is called;
            None: never.
        on_stall: called on the watchdog's thread with what `query_ranks` returns, once for each
            stall.

    Attributes:
        period_s: seconds between two checks of the store.
        closed: True once the thread has ended.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        stall_s: float | None = None,
        on_stall: OnStall = lambda diagnosis, statuses: None,
    ) -> None:
        self._store = PrefixStore(_PREFIX, _another_connection(store))
        self._asking = PrefixStore(_PREFIX, _another_connection(store))
        self._rank = rank
        self._world_size = world_size
        self._stall_s = stall_s
        self._on_stall = on_stall
        self._training_thread = threading.get_ident()
        self._error: BaseException | None = None
        self._answered = 0  # the last round that this rank has answered
        self._started = 0  # the last round that this rank started
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self.period_s = max(0.5, world_size / _CHECKS_PER_S)
        self._silence_s = _SILENT_PERIODS * self.period_s
        self._thread = threading.Thread(
            target=self._run, name="shardgrad hang watchdog", daemon=True
        )

    def start(self) -> HangWatchdog:
        """Starts the thread. The calling thread is the training thread."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the thread after a check under way.

        A thread that returns from the store after the interpreter began to shut down would abort
        the process, so it is waited for, up to 10 seconds.
        """
        self._is_closing.set()
        self._thread.join(self.period_s + _LAST_CHECK_S)

    @property
    def closed(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    @property
    def location(self) -> str:
        """Where this rank is, for example "step 3, backward of layers.1"."""
        return self._own().location

    def report_error(self, error: BaseException) -> None:
        """Tells the other ranks, without waiting, that this rank failed with `error`."""
        self._error = error

        def tell() -> None:
            self._answer(self._asking, self._open_round(self._asking))

        _within(self._silence_s, tell)

    def query_ranks(self, *, timeout_s: float) -> tuple[Diagnosis, dict[int, RankStatus]]:
        """Asks every rank for its status.

        Args:
            timeout_s: seconds to wait at most; less if no rank has answered for six periods.

        Returns:
            The diagnosis, and the statuses it follows from, by rank.
        """
        return self._query(self._asking, timeout_s)

    def _query(
        self, store: Store, timeout_s: float, *, is_stall: bool = False
    ) -> tuple[Diagnosis, dict[int, RankStatus]]:
        answers = {self._rank: self._own()}

        def query() -> None:
            number = self._open_round(store, is_stall=is_stall)
            self._answer(store, number)
            self._collect(store, number, answers, timeout_s)

        has_answered = _within(timeout_s + self._silence_s, query)
        heard = dict(answers)  # the thread may still be adding to it
        return (
            diagnose(heard, self._world_size) if has_answered else self._without_store(heard)
        ), heard

    def _without_store(self, answers: dict[int, RankStatus]) -> Diagnosis:
        own = answers[self._rank]
        waits = own.waiting_for
        here = own.location if waits is None else f"the {waits.name}, {own.location}"
        gone = (
            "The store of the process group is gone: its host ended, or the network to it is cut."
        )
        heard = diagnose(answers, self._world_size).sentence if len(answers) > 1 else ""
        return Diagnosis((), gone, f"Rank {self._rank} was in {here}. {heard}".strip())

    def _open_round(self, store: Store, *, is_stall: bool = False) -> int:
        """Returns the number of the round of questions under way, starting one if there is none.

        A failure joins the round of another failure, and a stall that of another stall, unless that
        was steps ago or this rank's: its answers are out of date.
        """
        number, step, was_stall = self._round(store)
        is_old = (
            step + 1 < recorder.step
            or was_stall != is_stall
            or (is_stall and number == self._started)
        )
        if number == 0 or is_old:
            number = self._started = number + 1
            # A rank that does so at the same time sets the same number.
            store.set(_ASKED, f"{number} {recorder.step} {int(is_stall)}")
        return number

    def _round(self, store: Store) -> tuple[int, int, bool]:
        """Returns the last round's number, 0 if there was none, its step, and whether it was a
        stall's.
        """
        if not store.check([_ASKED]):
            return 0, 0, False
        number, step, was_stall = map(int, store.get(_ASKED).decode().split())
        return number, step, bool(was_stall)

    def _collect(
        self, store: Store, number: int, answers: dict[int, RankStatus], timeout_s: float
    ) -> None:
        """Adds answers as they arrive, until all ranks have answered or none has for a while."""
        heard_s = time.monotonic()
        end_s = heard_s + timeout_s
        while len(answers) < self._world_size and time.monotonic() < min(
            end_s, heard_s + self._silence_s
        ):
            for rank in range(self._world_size):
                if rank not in answers and store.check([f"{number}/{rank}"]):
                    answers[rank] = RankStatus.from_json(store.get(f"{number}/{rank}").decode())
                    heard_s = time.monotonic()
            time.sleep(self.period_s / 10)

    def _own(self) -> RankStatus:
        return rank_status(recorder, self._rank, thread=self._training_thread, error=self._error)

    def _answer(self, store: Store, number: int) -> None:
        with self._lock:
            store.set(f"{number}/{self._rank}", self._own().to_json())
            self._answered = number

    def _run(self) -> None:
        stalled_at_s = -1.0
        while not self._is_closing.wait(self.period_s):
            with suppress(
                Exception
            ):  # a store that is gone makes a rank that waits fail, and report it
                number, _, _ = self._round(self._store)
                if number > self._answered:
                    self._answer(self._store, number)
            progress_s = recorder.progress_s
            is_stalled = self._stall_s is not None and time.monotonic() - progress_s > self._stall_s
            if is_stalled and progress_s != stalled_at_s:
                stalled_at_s = progress_s
                timeout_s = 2 * self._silence_s
                self._on_stall(*self._query(self._store, timeout_s, is_stall=True))


def _within(seconds: float, work: Callable[[], None]) -> bool:
    """Runs `work`, which uses the store, on another thread; returns whether it succeeded in time.

    Calls to a store whose host cannot be reached neither return nor fail, and have no time limit.
    """
    done = threading.Event()

    def run() -> None:
        with suppress(Exception):  # whatever a store raises when its host is gone
            work()
            done.set()

    thread = threading.Thread(target=run, name="shardgrad hang diagnosis", daemon=True)
    thread.start()
    thread.join(seconds)
    return done.is_set()


def _another_connection(store: Store) -> Store:
    """Returns a store with the same contents: a thread that waits in the original holds its
    lock.
    """
    clone: Callable[[], Store] | None = getattr(store, "clone", None)
    return store if clone is None else clone()
