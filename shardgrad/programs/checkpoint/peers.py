"""The ranks that share a checkpoint, and the collectives among them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardgrad.diagnosis.flight_recorder import GroupLog, recorder
from shardgrad.errors import (
    CheckpointError,
    CheckpointSaveError,
    ShardgradError,
)
from shardgrad.extras import require
from shardgrad.programs.text import printable

require("numpy", feature="shardgrad.programs.checkpoint")  # torch's collectives of objects need it

_Result = TypeVar("_Result")


class Peers:
    """The ranks of a process group, or one process. Methods with an argument `what` are
    collectives.

    Each collective is recorded in the flight recorder as "`what` of the checkpoint". What a rank
    sends and receives does not grow with the number of ranks, but on the first rank in `gather`.

    Args:
        group: a process group; None is the default group, or this process alone.
        error: the type that errors without a type of ours become.
        where: the checkpoint, which such errors name.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        error: type[ShardgradError] = CheckpointSaveError,
        where: Path | None = None,
    ) -> None:
        self._group = group
        self._error = error
        self._where = where
        self._trains = threading.get_ident()
        is_joined = dist.is_initialized()
        self.rank = dist.get_rank(group) if is_joined else 0
        self.count = dist.get_world_size(group) if is_joined else 1
        self._log: GroupLog | None = None
        if self.count > 1:
            self._log = recorder.group_log(group or dist.distributed_c10d._get_default_group())

    @property
    def leads(self) -> bool:
        """Whether this process is the first rank."""
        return self.rank == 0

    def gather(self, what: str, thing: Any) -> list[Any]:
        """Returns every rank's object on the first rank, and an empty list on the others."""
        if self.count == 1:
            return [thing]
        things: list[Any] | None = [None] * self.count if self.leads else None
        with self._noted(what):
            dist.gather_object(thing, things, group=self._group, group_dst=0)
        return things or []

    def scatter(self, what: str, things: list[Any] | None) -> Any:
        """Returns this rank's entry of the first rank's list."""
        if self.count == 1:
            return (things or [None])[0]
        box: list[Any] = [None]
        with self._noted(what):
            dist.scatter_object_list(box, things, group=self._group, group_src=0)
        return box[0]

    def broadcast(self, what: str, thing: Any, source: int = 0) -> Any:
        """Returns the object of one rank."""
        if self.count == 1:
            return thing
        box = [thing if self.rank == source else None]
        with self._noted(what):
            dist.broadcast_object_list(box, group=self._group, group_src=source)
        return box[0]

    def reduce(self, what: str, numbers: list[int], op: Any) -> list[int]:
        """Returns the reduction of every rank's small numbers, one by one."""
        if self.count == 1 or not numbers:
            return numbers
        device = dist.distributed_c10d._get_object_coll_device(self._group)
        tensor = torch.tensor(numbers, dtype=torch.int32, device=device)
        with self._noted(what):
            dist.all_reduce(tensor, op, group=self._group)
        reduced: list[int] = tensor.tolist()
        return reduced

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
        mine = self.count if cause is None else self.rank
        (failed,) = self.reduce(what, [mine], dist.ReduceOp.MIN)
        if failed == self.count:
            return result
        told = None if cause is None else self._told(cause)
        kind, said = self.broadcast(what, told and (type(told), {**vars(told)}), failed)
        if self._log is not None:
            whose = f"rank {self._log.ranks[failed]}"
            said["where"] = "; ".join(filter(None, (said["where"], whose)))
        raise kind(**said) from (cause if failed == self.rank else None)

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
        log, words = self._log, f"{what} of the checkpoint"
        if log is None:
            yield
        elif threading.get_ident() == self._trains:
            with log.waiting(words):
                yield
        else:
            log.record(words, None)
            yield

    def _told(self, error: Exception) -> ShardgradError:
        """Returns an error as one of ours, whose attributes other ranks raise it from."""
        if isinstance(error, CheckpointError | CheckpointSaveError):
            return error
        return self._error(
            "a rank could not do its part of the checkpoint",
            expected="no error",
            got=printable(f"{type(error).__name__}: {error}"),
            where=None if self._where is None else printable(self._where),
            fix="remove the cause, and try again; checkpoints written before are untouched",
        )
