"""The processes that share a checkpoint, and how they agree."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from shardgrad.diagnosis.flight_recorder import Line, journal
from shardgrad.errors import CheckpointError, CheckpointSaveError, ShardgradError

__all__ = ["Peers"]

_Result = TypeVar("_Result")
_ERRORS: dict[str, type[ShardgradError]] = {
    error.__name__: error for error in (CheckpointError, CheckpointSaveError)
}


class Peers:
    """The ranks of a group; one process where there is none. What takes a `what` is a collective.

    Each is noted in the journal as "the `what` of the checkpoint", which is how it is called when it hangs.

    Args:
        group: a process group; None is the default group.
        aside: a thread of their own does the rest, while training goes on.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, aside: bool = False) -> None:
        self._group = group
        self._trains = threading.get_ident()
        is_joined = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if is_joined else 0
        self.count = dist.get_world_size(group) if is_joined else 1
        self._line: Line | None = None
        if self.count > 1:
            self._line = journal.line(group or dist.distributed_c10d._get_default_group())
            self._line.is_aside = aside

    @property
    def leads(self) -> bool:
        """Whether this process writes what there is only one of."""
        return self.rank == 0

    def gather(self, what: str, thing: Any) -> list[Any]:
        """Returns every rank's thing, in order, on the first rank; nothing on the others."""
        if self.count == 1:
            return [thing]
        things: list[Any] | None = [None] * self.count if self.leads else None
        with self._noted(what):
            dist.gather_object(thing, things, group=self._group, group_dst=0)
        return things or []

    def scatter(self, what: str, things: list[Any]) -> Any:
        """Returns this rank's of the things that the first rank has."""
        if self.count == 1:
            return things[0]
        box: list[Any] = [None]
        with self._noted(what):
            dist.scatter_object_list(box, things if self.leads else None, group=self._group, group_src=0)
        return box[0]

    def all_gather(self, what: str, thing: Any) -> list[Any]:
        """Returns every rank's thing, in order, on every rank."""
        if self.count == 1:
            return [thing]
        things: list[Any] = [None] * self.count
        with self._noted(what):
            dist.all_gather_object(things, thing, group=self._group)
        return things

    def together(self, what: str, work: Callable[[], _Result]) -> _Result:
        """Returns what `work` does on this rank; if it fails on any rank, all fail alike.

        Args:
            what: of the checkpoint it is.
            work: no collective.

        Raises:
            CheckpointError, CheckpointSaveError: what the lowest rank that failed had to say, and its number
                in the whole world; with a cause only where that is this rank's own.
        """
        cause: Exception | None = None
        try:
            result = work()
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            cause = error
        told = None if cause is None else _words(cause)
        found = [(rank, words) for rank, words in enumerate(self.all_gather(what, told)) if words is not None]
        if not found:
            return result
        rank, (kind, said, expected, got, where, fix) = found[0]
        if self._line is not None:
            whose = f"rank {self._line.ranks[rank]}"
            where = whose if where is None else f"{where}; {whose}"
        raise _ERRORS[kind](said, expected=expected, got=got, where=where, fix=fix) from cause

    @contextmanager
    def thread_awaited(self) -> Iterator[None]:
        """Says in the journal that training waits in the block for what another thread has begun here."""
        if self._line is not None:
            journal.waits_in = self._line, None
        try:
            yield
        except TimeoutError:  # the caller's patience, not the collective's
            journal.waits_in = None
            raise
        journal.waits_in = None  # not if it raised: then it is what is asked for

    @contextmanager
    def _noted(self, what: str) -> Iterator[None]:
        """Notes a collective: one for which training waits, unless it is begun by another thread."""
        line, words = self._line, f"{what} of the checkpoint"
        if line is None:
            yield
        elif threading.get_ident() == self._trains:
            with line.awaited(words):
                yield
        else:
            line.begin(words, None)
            yield


def _words(error: Exception) -> tuple[str | None, ...]:
    """Returns an error in parts that another rank can raise again."""
    if isinstance(error, CheckpointError | CheckpointSaveError):
        told: ShardgradError = error
    else:
        told = CheckpointSaveError(
            "a rank could not do its part of the checkpoint",
            expected="no error",
            got=f"{type(error).__name__}: {error}",
            fix="remove the cause, and try again; checkpoints written before are untouched",
        )
    return type(told).__name__, told.what, told.expected, told.got, told.where, told.fix
