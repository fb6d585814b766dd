"""The ranks that share a checkpoint, and the collectives among them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from shardgrad.diagnosis.flight_recorder import GroupLog, recorder
from shardgrad.errors import (
    CheckpointError,
    CheckpointSaveError,
    CheckpointVersionError,
    ShardgradError,
)

__all__ = ["Peers"]

_Result = TypeVar("_Result")
_ERRORS: dict[str, type[ShardgradError]] = {
    error.__name__: error
    for error in (CheckpointError, CheckpointSaveError, CheckpointVersionError)
}


class Peers:
    """The ranks of a process group, or one process. Methods with an argument `what` are
    collectives.

    Each collective is recorded in the flight recorder as "`what` of the checkpoint".

    Args:
        group: a process group; None is the default group, or this process alone.
        aside: the collectives are launched by a background thread.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, aside: bool = False) -> None:
        self._group = group
        self._trains = threading.get_ident()
        is_joined = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if is_joined else 0
        self.count = dist.get_world_size(group) if is_joined else 1
        self._log: GroupLog | None = None
        if self.count > 1:
            self._log = recorder.group_log(group or dist.distributed_c10d._get_default_group())
            self._log.is_background = aside

    @property
    def leads(self) -> bool:
        """Whether this process is the first rank, which writes the index."""
        return self.rank == 0

    def gather(self, what: str, thing: Any) -> list[Any]:
        """Returns every rank's object, in order, on the first rank, and an empty list on the
        others.
        """
        if self.count == 1:
            return [thing]
        things: list[Any] | None = [None] * self.count if self.leads else None
        with self._noted(what):
            dist.gather_object(thing, things, group=self._group, group_dst=0)
        return things or []

    def scatter(self, what: str, things: list[Any]) -> Any:
        """Returns this rank's entry of the first rank's list."""
        if self.count == 1:
            return things[0]
        box: list[Any] = [None]
        with self._noted(what):
            dist.scatter_object_list(
                box, things if self.leads else None, group=self._group, group_src=0
            )
        return box[0]

    def all_gather(self, what: str, thing: Any) -> list[Any]:
        """Returns every rank's object, in order, on every rank."""
        if self.count == 1:
            return [thing]
        things: list[Any] = [None] * self.count
        with self._noted(what):
            dist.all_gather_object(things, thing, group=self._group)
        return things

    def together(self, what: str, work: Callable[[], _Result]) -> _Result:
        """Returns the result of `work` on this rank; if it fails on any rank, all ranks raise the
        same error.

        Args:
            what: name of the collective.
            work: a function without collectives.

        Raises:
            CheckpointError, CheckpointSaveError: the error of the lowest rank that failed, with its
                global rank. It has a cause only on the rank whose error it is.
        """
        cause: Exception | None = None
        try:
            result = work()
        except Exception as error:  # any error: the other ranks must not wait for this one
            cause = error
        told = None if cause is None else _words(cause)
        found = [
            (rank, words)
            for rank, words in enumerate(self.all_gather(what, told))
            if words is not None
        ]
        if not found:
            return result
        rank, (kind, said, expected, got, where, fix) = found[0]
        if self._log is not None:
            whose = f"rank {self._log.ranks[rank]}"
            where = whose if where is None else f"{where}; {whose}"
        raise _ERRORS[kind](said, expected=expected, got=got, where=where, fix=fix) from cause

    @contextmanager
    def thread_awaited(self) -> Iterator[None]:
        """Records in the flight recorder that this thread waits for a collective of the background
        thread.
        """
        if self._log is not None:
            recorder.waits_in = self._log, None
        try:
            yield
        except TimeoutError:  # of `wait`, not of a collective
            recorder.waits_in = None
            raise
        recorder.waits_in = None  # kept after other errors, for the report

    @contextmanager
    def _noted(self, what: str) -> Iterator[None]:
        """Records a collective; training waits for it unless the background thread launches it."""
        line, words = self._log, f"{what} of the checkpoint"
        if line is None:
            yield
        elif threading.get_ident() == self._trains:
            with line.waiting(words):
                yield
        else:
            line.record(words, None)
            yield


def _words(error: Exception) -> tuple[str | None, ...]:
    """Returns the attributes of an error, from which other ranks raise it."""
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
