"""Asking every rank where it is, through the store, when a collective fails or nothing moves any more.

[Note: Inquest]
Collectives cannot be used to ask why a collective hangs, so the question and the answers go through the store
in which the ranks met. On every rank a thread looks now and then whether somebody has asked, and answers for
the thread that trains, with its stack: that works while it waits for others, and while it is late. Who does
not answer has ended, is stopped, or is cut off. Needs neither NCCL's nor torch's flight recorder, sets none
of their switches, and leaves what they record alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch.distributed.distributed_c10d import PrefixStore, Store

from shardgrad.diagnosis.flight_recorder import journal
from shardgrad.diagnosis.rank_status import Account, Finding, conclude, give_account

__all__ = ["Lookout", "OnStall"]

OnStall = Callable[[Finding, dict[int, Account]], None]

_PREFIX = "shardgrad/inquest"
_ASKED = "asked"
_LOOKS_PER_S = 512.0  # of all ranks together, whatever their number
_SILENT_PERIODS = 6  # after which nobody else is expected to answer
_LAST_LOOK_S = 10.0  # that a look under way may take on a busy machine; of a store cut off, it never ends


class Lookout:
    """Answers for this rank when another asks, and asks when something is wrong here.

    Args:
        store: in which the ranks met; a connection of its own is made from it.
        rank: this one.
        world_size: number of ranks.
        stall_s: if nothing has moved here for so long, everybody is asked and `on_stall` told; None: never.
        on_stall: is called on the lookout's thread with what `ask` returns, once for each stall.

    Attributes:
        period_s: between two looks.
        closed: True after `close`.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        stall_s: float | None = None,
        on_stall: OnStall = lambda finding, answers: None,
    ) -> None:
        self._store = PrefixStore(_PREFIX, _another_connection(store))
        self._asking = PrefixStore(_PREFIX, _another_connection(store))
        self._rank = rank
        self._world_size = world_size
        self._stall_s = stall_s
        self._on_stall = on_stall
        self._trains = threading.get_ident()
        self._error: BaseException | None = None
        self._answered = 0  # the last round in which this rank has answered
        self._began = 0  # the last round that this rank began
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self.period_s = max(0.5, world_size / _LOOKS_PER_S)
        self._silence_s = _SILENT_PERIODS * self.period_s
        self._thread = threading.Thread(target=self._look_out, name="shardgrad lookout", daemon=True)

    def start(self) -> Lookout:
        """Begins to look out. The calling thread is the one that trains."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the thread, once a look under way is done.

        A thread that came back from the store after the interpreter has begun to end would abort the process:
        it is waited for, up to 10 seconds.
        """
        self._is_over.set()
        self._thread.join(self.period_s + _LAST_LOOK_S)

    @property
    def closed(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    @property
    def place(self) -> str:
        """Where this rank is, in words."""
        return self._own().place

    def report(self, error: BaseException) -> None:
        """Tells the others, without waiting, that `error` is this rank's own."""
        self._error = error

        def tell() -> None:
            self._answer(self._asking, self._open_round(self._asking))

        _within(self._silence_s, tell)

    def ask(self, *, patience_s: float) -> tuple[Finding, dict[int, Account]]:
        """Asks every rank where it is and concludes.

        Args:
            patience_s: how long to wait at most; less once nobody has answered for six periods.

        Returns:
            The finding, and the accounts it rests on, by rank.
        """
        return self._ask(self._asking, patience_s)

    def _ask(
        self, store: Store, patience_s: float, *, is_stall: bool = False
    ) -> tuple[Finding, dict[int, Account]]:
        answers = {self._rank: self._own()}

        def inquire() -> None:
            number = self._open_round(store, is_stall=is_stall)
            self._answer(store, number)
            self._collect(store, number, answers, patience_s)

        has_answered = _within(patience_s + self._silence_s, inquire)
        heard = dict(answers)  # the thread may still be at it
        return (conclude(heard, self._world_size) if has_answered else self._without_store(heard)), heard

    def _without_store(self, answers: dict[int, Account]) -> Finding:
        own = answers[self._rank]
        here = own.place if own.awaited is None else f"the {own.awaited.what}, {own.place}"
        gone = "The store in which the ranks met is gone: its host ended, or the way to it is cut."
        heard = conclude(answers, self._world_size).sentence if len(answers) > 1 else ""
        return Finding((), gone, f"Rank {self._rank} was in {here}. {heard}".strip())

    def _open_round(self, store: Store, *, is_stall: bool = False) -> int:
        """Returns the number of the round of questions under way, having begun it if there is none.

        A failure joins the round of another failure, and a stall that of another stall, unless it is steps
        ago, or was this rank's own: what ranks said then is out of date.
        """
        number, step, was_stall = self._round(store)
        is_old = step + 1 < journal.step or was_stall != is_stall or (is_stall and number == self._began)
        if number == 0 or is_old:
            number = self._began = number + 1
            # Who does so at the same time sets the same number.
            store.set(_ASKED, f"{number} {journal.step} {int(is_stall)}")
        return number

    def _round(self, store: Store) -> tuple[int, int, bool]:
        """Returns the last round's number, 0 if there was none, its step, and whether it was a stall's."""
        if not store.check([_ASKED]):
            return 0, 0, False
        number, step, was_stall = map(int, store.get(_ASKED).decode().split())
        return number, step, bool(was_stall)

    def _collect(self, store: Store, number: int, answers: dict[int, Account], patience_s: float) -> None:
        """Adds what arrives, until all have answered, or it has been silent for a while."""
        heard_s = time.monotonic()
        end_s = heard_s + patience_s
        while len(answers) < self._world_size and time.monotonic() < min(end_s, heard_s + self._silence_s):
            for rank in range(self._world_size):
                if rank not in answers and store.check([f"{number}/{rank}"]):
                    answers[rank] = Account.from_json(store.get(f"{number}/{rank}").decode())
                    heard_s = time.monotonic()
            time.sleep(self.period_s / 10)

    def _own(self) -> Account:
        return give_account(journal, self._rank, thread=self._trains, error=self._error)

    def _answer(self, store: Store, number: int) -> None:
        with self._lock:
            store.set(f"{number}/{self._rank}", self._own().to_json())
            self._answered = number

    def _look_out(self) -> None:
        stalled_at_s = -1.0
        while not self._is_over.wait(self.period_s):
            with suppress(Exception):  # a store that is gone: whoever waits will fail and say so
                number, _, _ = self._round(self._store)
                if number > self._answered:
                    self._answer(self._store, number)
            moved_s = journal.moved_s
            is_stalled = self._stall_s is not None and time.monotonic() - moved_s > self._stall_s
            if is_stalled and moved_s != stalled_at_s:
                stalled_at_s = moved_s
                patience_s = 2 * self._silence_s
                self._on_stall(*self._ask(self._store, patience_s, is_stall=True))


def _within(seconds: float, work: Callable[[], None]) -> bool:
    """Does something with the store; returns whether that ended well in time.

    On a thread of its own: a store whose host is cut off answers neither yes nor no, and has no time limit.
    """
    done = threading.Event()

    def run() -> None:
        with suppress(Exception):  # whatever a store raises when its host is gone
            work()
            done.set()

    thread = threading.Thread(target=run, name="shardgrad inquest", daemon=True)
    thread.start()
    thread.join(seconds)
    return done.is_set()


def _another_connection(store: Store) -> Store:
    """Returns a store of the same contents: a thread that waits inside the original holds it."""
    clone: Callable[[], Store] | None = getattr(store, "clone", None)
    return store if clone is None else clone()
