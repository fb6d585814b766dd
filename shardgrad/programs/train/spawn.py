"""Starts ranks on this machine, waits for them, and selects the report to print."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType

from shardgrad.programs.train.failure import Interrupted
from shardgrad.programs.train.rank import Cause, Job, Report, resume_hint, run_rank
from shardgrad.programs.train.stop import ECHO_S, leave_terminal, stop_signals

_GRACE_S = 10.0  # how long the other ranks may take to notice a failure and report it
_WHY: dict[int, str] = {
    signal.SIGKILL: ", as the system does when memory runs out",
    signal.SIGABRT: ", as gloo does to a rank that is sent more than it expects",
}
_GOOD_ENDS = (0, Interrupted.exit_status)


def spawn(job: Job, ranks: int) -> Report:
    """Trains in `ranks` processes on this machine and waits for all of them.

    The first Ctrl-C or SIGTERM is passed to the ranks, which finish their step and save; a second
    one kills them. When a rank fails, the others are killed after a grace period.

    Returns:
        The report closest to the cause of a failure, or rank 0's on success.
    """
    asked_s: float | None = None  # when the ranks were requested to stop

    def on_signal(number: int, frame: FrameType | None) -> None:
        """Forwards the first request to the ranks; kills them on a later one."""
        nonlocal asked_s
        leave_terminal(number)
        now_s = time.monotonic()
        if asked_s is None:
            asked_s = now_s
            print(
                "Stopping after this step; Ctrl-C again stops at once.", file=sys.stderr, flush=True
            )
            for child in children:
                child.process.terminate()
        elif now_s - asked_s > ECHO_S:
            for child in children:
                child.process.kill()

    with tempfile.TemporaryDirectory(prefix="shardgrad-") as meeting:
        former = {number: signal.getsignal(number) for number in stop_signals()}
        # Children inherit the ignored Ctrl-C until they install their handler: no tracebacks during
        # imports.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        children = [_start(job, rank, ranks, f"file://{meeting}/store") for rank in range(ranks)]
        for number in former:
            signal.signal(number, on_signal)
        try:
            reports = [
                child.report(job, is_stopping=asked_s is not None) for child in _ended(children)
            ]
        finally:
            for number, handler in former.items():
                # After a request to stop, the final report is still to be printed: ignore further
                # requests.
                signal.signal(number, handler if asked_s is None else signal.SIG_IGN)
            for child in children:
                child.process.kill()
                child.process.join()
    return _nearest_to_the_cause(reports)


def _nearest_to_the_cause(reports: list[Report]) -> Report:
    """Returns the report to print, with another rank's `waits` if it has none."""
    best = min(reports, key=lambda report: (report.exit_status == 0, report.cause, report.rank))
    waits = (
        report.waits for report in reports if report.cause is Cause.CONSEQUENCE and report.waits
    )
    known = best.waits or (next(waits, "") if best.cause is Cause.OWN else "")
    # All ranks share one terminal: one report is printed.
    return replace(best, waits=known, speaks=True)


@dataclass(frozen=True)
class _Child:
    rank: int
    process: BaseProcess
    pipe: Connection

    def report(self, job: Job, *, is_stopping: bool) -> Report:
        """Returns the report that the ended child sent, or one made from its exit status."""
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
            status, words = (
                1,
                f"Rank {self.rank} was ended by {signal.Signals(-status).name}{hint}.",
            )
        else:
            status, words = (
                status or 1,
                f"Rank {self.rank} ended with status {status} without a report.",
            )
        hint = resume_hint(job.folder)
        return Report(self.rank, status, words, hint=hint, cause=Cause.OWN, speaks=True)


def _start(job: Job, rank: int, ranks: int, init_method: str) -> _Child:
    # A new interpreter, not a fork: neither PyTorch's threads nor accelerators survive a fork.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_child_main,
        args=(job, rank, ranks, init_method, theirs),
        name=f"rank {rank}",
        daemon=True,
    )
    # The new interpreter is started with -c, which puts the working directory first on sys.path: a
    # threading.py there would be imported for the standard library's.
    os.environ["PYTHONSAFEPATH"] = "1"
    process.start()
    theirs.close()
    return _Child(rank, process, ours)


def _child_main(job: Job, rank: int, ranks: int, init_method: str, pipe: Connection) -> None:
    """Sets the environment as torchrun does, and runs the rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    report = run_rank(job, init_method=init_method)
    with contextlib.suppress(OSError):  # the launcher was killed, and maybe what read its output
        pipe.send(report)
        sys.stdout.flush()
        sys.stderr.flush()
    # Not sys.exit: after a failure the backends' threads may wait for ranks that have ended.
    os._exit(report.exit_status)


def _ended(children: list[_Child]) -> Iterator[_Child]:
    """Yields the ranks that end by themselves, in that order, until all have, or until the others
    have had time to notice a failure.
    """
    running = list(children)
    deadline_s: float | None = None
    while running and (deadline_s is None or time.monotonic() < deadline_s):
        wait([child.process.sentinel for child in running], timeout=0.5)
        for child in [child for child in running if not child.process.is_alive()]:
            running.remove(child)
            if deadline_s is None and child.process.exitcode not in _GOOD_ENDS:
                deadline_s = time.monotonic() + _GRACE_S
            yield child
