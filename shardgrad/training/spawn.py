"""Starting ranks on this machine and watching over them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType

from shardgrad.training.failure import Interrupted
from shardgrad.training.rank import Blame, Order, Report, resume_hint, run_rank
from shardgrad.training.stop import ECHO_S, leave_terminal, stop_signals

_GRACE_S = 10.0  # for the other ranks to notice that one has failed, and to speak
_WHY: dict[int, str] = {
    signal.SIGKILL: ", as the system does when memory runs out",
    signal.SIGABRT: ", as gloo does to a rank that is sent more than it expects",
}
_GOOD_ENDS = (0, Interrupted.exit_status)


def spawn(order: Order, ranks: int) -> Report:
    """Train in `ranks` processes of this machine and wait for all of them.

    The first Ctrl-C (or SIGTERM) is passed on, and every rank finishes its step and saves; a second one ends
    all at once. When a rank fails, the others are ended.

    Returns:
        The report that is nearest to the cause of a failure, or rank 0's where all went well.
    """
    with tempfile.TemporaryDirectory(prefix="shardgrad-") as meeting:
        former = {number: signal.getsignal(number) for number in stop_signals()}
        # Children inherit that Ctrl-C is ignored, until they can answer it: no tracebacks while they import.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        children = [_start(order, rank, ranks, f"file://{meeting}/store") for rank in range(ranks)]
        watch = _Watch(order, children)
        for number in former:
            signal.signal(number, watch.on_signal)
        try:
            reports = watch.until_all_ended()
        finally:
            for number, handler in former.items():
                # Asked to stop, it has one more thing to say, which another request must not cut off.
                signal.signal(number, signal.SIG_IGN if watch.is_stopping else handler)
            for child in children:
                child.process.kill()
                child.process.join()
    return _nearest_to_the_cause(reports)


def _nearest_to_the_cause(reports: list[Report]) -> Report:
    """The report to tell, with what other ranks say of where that left them, if it does not know that."""
    best = min(reports, key=lambda report: (report.exit_status == 0, report.blame, report.rank))
    waits = (report.waits for report in reports if report.blame is Blame.CONSEQUENCE and report.waits)
    known = best.waits or (next(waits, "") if best.blame is Blame.OWN else "")
    return replace(best, waits=known, speaks=True)  # there is one terminal, and this is what it is told


@dataclass(frozen=True)
class _Child:
    rank: int
    process: BaseProcess
    pipe: Connection

    def report(self, order: Order, *, is_stopping: bool) -> Report:
        """What the ended child said, or what its exit says for it."""
        try:
            told = self.pipe.recv() if self.pipe.poll() else None
        except (EOFError, OSError):
            told = None
        if isinstance(told, Report):
            return told
        status = self.process.exitcode or 0
        if is_stopping:
            status, words = Interrupted.exit_status, "Stopped at once, without saving."
        elif status < 0:
            hint = _WHY.get(-status, "")
            status, words = 1, f"Rank {self.rank} was ended by {signal.Signals(-status).name}{hint}."
        else:
            status, words = status or 1, f"Rank {self.rank} ended with status {status} without a word."
        hint = resume_hint(order.folder)
        return Report(self.rank, status, words, hint=hint, blame=Blame.OWN, speaks=True)


def _start(order: Order, rank: int, ranks: int, init_method: str) -> _Child:
    # A fresh interpreter, not a fork: neither PyTorch's threads nor accelerators survive one.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_child_main, args=(order, rank, ranks, init_method, theirs), name=f"rank {rank}", daemon=True
    )
    process.start()
    theirs.close()
    return _Child(rank, process, ours)


def _child_main(order: Order, rank: int, ranks: int, init_method: str, pipe: Connection) -> None:
    """What torchrun would have done for a rank, and then the rank itself."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    report = run_rank(order, init_method=init_method)
    pipe.send(report)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: after a failure, the backends' threads may wait for ranks that are gone.
    os._exit(report.exit_status)


class _Watch:
    """Waits for the ranks, passes on requests to stop, and ends all when one fails."""

    def __init__(self, order: Order, children: list[_Child]) -> None:
        self._order = order
        self._children = children
        self._asked_s: float | None = None

    @property
    def is_stopping(self) -> bool:
        """Whether somebody has asked the ranks to stop."""
        return self._asked_s is not None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass on the first request; on a later one, end the ranks."""
        leave_terminal(number)
        now_s = time.monotonic()
        if self._asked_s is None:
            self._asked_s = now_s
            print("Stopping after this step; once more to stop at once.", file=sys.stderr, flush=True)
            for child in self._children:
                child.process.terminate()
        elif now_s - self._asked_s > ECHO_S:
            for child in self._children:
                child.process.kill()

    def until_all_ended(self) -> list[Report]:
        """The reports of the ranks that ended by themselves, in the order of their ends; never empty."""
        reports: list[Report] = []
        running = list(self._children)
        deadline_s: float | None = None
        while running and (deadline_s is None or time.monotonic() < deadline_s):
            wait([child.process.sentinel for child in running], timeout=0.5)
            for child in [child for child in running if not child.process.is_alive()]:
                running.remove(child)
                reports.append(child.report(self._order, is_stopping=self.is_stopping))
            if deadline_s is None and any(report.exit_status not in _GOOD_ENDS for report in reports):
                deadline_s = time.monotonic() + _GRACE_S
        return reports
