"""The flight recorder: records what this rank is doing, and the collective that it started last.

[Note: Flight recorder]
When a collective hangs, every rank knows only its own side. So each rank records the last
collective that it has started, with its number in its process group, and the one that the host
waits for. Recording takes about a microsecond per collective. Nothing is sent until a rank stalls
(`watchdog.py`).

A replay of a graph runs no Python. So under `graphed_step`, the collectives of a graph are recorded
once, at the capture, and only the step number advances with replays.

The idea and the words are those of c10d's flight recorder; this one works with every backend.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from shardgrad.errors import CollectiveError

if TYPE_CHECKING:  # programs that only read records do not need torch
    import torch.distributed as dist


FIX = (
    "if ranks run different units on purpose, or have no batch, wrap the step in `with "
    "shardgrad.participate(model):`; otherwise look for the first error among the ranks"
)

_SLICE = timedelta(seconds=1)


class Entry(NamedTuple):
    """One collective.

    Attributes:
        seq_id: its number in the process group, from 1.
        name: for example "all-gather of layers.3".
        ranks: global ranks of the group, all of which have to join it.
    """

    seq_id: int
    name: str
    ranks: tuple[int, ...]

    def failed(self, error: Exception) -> CollectiveError:
        """Returns the backend's error as a CollectiveError that says what to do."""
        import torch.distributed as dist

        return CollectiveError(
            f"the {self.name} failed: another rank is late, has exited or is out of sync",
            expected=f"every rank of {list(self.ranks)} to join it",
            got=str(error).partition("\n")[0],
            where=f"rank {dist.get_rank()}" if dist.is_initialized() else None,
            fix=FIX,
        )


class GroupLog:
    """The collectives of one process group, in the order in which this rank started them.

    Attributes:
        count: number of collectives started.
        host_waits: the classes of works whose wait can be interrupted, those of gloo.
    """

    def __init__(self, recorder: FlightRecorder, ranks: tuple[int, ...]) -> None:
        self.count = 0
        self.host_waits: tuple[type, ...] = ()
        self._ranks = ranks
        self._recorder = recorder

    def record(self, name: str) -> Entry:
        """Records a collective that this rank is about to start.

        Streams: host work only. Capture: safe.
        """
        self.count += 1
        self._recorder.last = entry = Entry(self.count, name, self._ranks)
        self._recorder.progress_s = time.monotonic()
        self._recorder.reported = None
        return entry

    def wait_for(self, work: dist.Work, entry: Entry) -> None:
        """Waits for a collective; over gloo, only as long as it can still complete.

        Raises:
            CollectiveError: the backend raised, or the watchdog has found that a rank which has to
                join it never will.
        """
        recorder = self._recorder
        recorder.waits_in = entry
        may_stop = isinstance(work, self.host_waits)
        while True:
            try:
                _ = work.wait(_SLICE) if may_stop else work.wait()
                break
            except RuntimeError as error:
                if not may_stop or "Operation timed out!" not in str(error):
                    raise entry.failed(error) from error
            if recorder.verdict is not None and recorder.verdict[0] is entry:
                try:
                    raise recorder.verdict[1]
                finally:  # a raised error keeps frames alive, and their tensors
                    recorder.verdict = None
        recorder.waits_in = None  # not if it raised: a diagnosis needs to know what failed

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Records a collective; the block starts it and waits for it on the host.

        Raises:
            CollectiveError: the backend raised.
        """
        self._recorder.waits_in = entry = self.record(name)
        try:
            yield
        except RuntimeError as error:
            raise entry.failed(error) from error
        self._recorder.waits_in = None


class FlightRecorder:
    """What one rank is doing. See [Note: Flight recorder].

    Attributes:
        step: number of the current or the last step, from 1; 0 if the program does not set it.
        phase: the phase of the step, such as "forward" or "checkpoint"; empty if the program does
            not set it.
        unit: the unit whose forward or backward ran last; empty before the first.
        last: the collective that was started last.
        progress_s: `time.monotonic()` when the last collective or phase was started.
        waits_in: the collective that the host waits for, or waited for when it failed.
        reported: the error that this rank has raised since its last collective: its first line, and
            its fix.
        verdict: the collective that can no longer complete, and why; see `watchdog.py`.
    """

    def __init__(self) -> None:
        self.step = 0
        self.phase = ""
        self.unit = ""
        self.last: Entry | None = None
        self.progress_s = time.monotonic()
        self.waits_in: Entry | None = None
        self.reported: tuple[str, str] | None = None
        self.verdict: tuple[Entry, Exception] | None = None
        self._logs: WeakKeyDictionary[dist.ProcessGroup, GroupLog] = WeakKeyDictionary()

    @property
    def location(self) -> str:
        """The position, like "step 3, backward of layers.1", as far as it is known."""
        step = f"step {self.step}" if self.step else ""
        unit = self.unit if self.phase in ("", "forward", "backward") else ""
        where = " of ".join(filter(None, (self.phase, unit)))
        return ", ".join(filter(None, (step, where))) or "an unknown location"

    def enter(self, phase: str, *, step: int | None = None) -> None:
        """Sets the phase that begins, and the step if it is given."""
        self.phase = phase
        if step is not None:
            self.step = step
        self.progress_s = time.monotonic()

    def report(self, error: BaseException) -> None:
        """Records an error that this rank raises, until it starts another collective."""
        first = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
        self.reported = first, str(getattr(error, "fix", None) or "")

    def group_log(self, group: dist.ProcessGroup) -> GroupLog:
        """Returns the log of a process group, the same object as long as the group is alive."""
        log = self._logs.get(group)
        if log is None:
            import torch.distributed as dist

            log = self._logs[group] = GroupLog(self, tuple(dist.get_process_group_ranks(group)))
            if dist.get_backend(group) == "gloo":
                log.host_waits = (dist.Work,)
        return log


recorder = FlightRecorder()
