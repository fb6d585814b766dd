"""The ranks that share a checkpoint: each does its part, and an error of one is raised by all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

from shardgrad.diagnosis.flight_recorder import GroupLog, recorder
from shardgrad.errors import CheckpointError, CheckpointSaveError, ShardgradError
from shardgrad.extras import require
from shardgrad.programs.text import printable

require("numpy", feature="shardgrad.programs.checkpoint")  # torch's collectives of objects need it

_Mine = TypeVar("_Mine")
_Result = TypeVar("_Result")


class Peers:
    """The ranks of a process group, or one process, with torch's collectives for checkpoints.

    Each is recorded in the flight recorder as "`step` of the checkpoint", but for those of another
    thread than the one that made this object. If a part fails on any rank, all ranks raise the
    error of the lowest of these, with its global rank; it has a cause only on the rank whose error
    it is.

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
        self._torch = _DistWrapper(group, dist.is_initialized(), 0)
        self._error = error
        self._where = where
        self._trains = threading.get_ident()
        self.rank = self._torch.get_rank()
        self.count = self._torch.get_world_size()
        self._log: GroupLog | None = None
        if self.count > 1:
            self._log = recorder.group_log(group or dist.distributed_c10d._get_default_group())

    def together(
        self,
        step: str,
        work: Callable[[], _Mine],
        then: Callable[[list[_Mine]], None] = lambda results: None,
    ) -> None:
        """Does `work` on every rank, and then, with all results, `then` on the first rank."""
        self._agree(self._torch.all_reduce, step, work, then)

    def scatter(
        self,
        step: str,
        work: Callable[[], _Mine],
        then: Callable[[list[_Mine]], list[_Result]],
    ) -> _Result:
        """Like `together`; returns this rank's entry of what `then` returns."""
        mine: _Result = self._agree(self._torch.reduce_scatter, step, work, then)
        return mine

    def broadcast(self, step: str, work: Callable[[], _Result]) -> _Result:
        """Returns what `work` returns on the first rank, where alone it is done."""
        result: _Result = self._agree(self._torch.broadcast, step, work)
        return result

    def _agree(self, collective: Callable[..., Any], step: str, *parts: Callable[..., Any]) -> Any:
        mine: list[Exception] = []

        def with_our_errors(part: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                try:
                    return part(*args)
                except Exception as error:  # any error: the other ranks must not wait for this one
                    mine.append(error)
                    raise self._told(error) from error

            return run

        with self._noted(f"{step} of the checkpoint"):
            try:
                return collective(step, *map(with_our_errors, parts))
            except CheckpointException as exception:
                failures = exception.failures
        rank = min(failures)
        error = failures[rank][0]
        if not isinstance(error, ShardgradError):
            raise error  # an interruption
        told = {**vars(error)}
        if self._log is not None:
            whose = f"rank {self._log.ranks[rank]}"
            told["where"] = "; ".join(filter(None, (error.where, whose)))
        raise type(error)(**told) from (mine[0] if mine and rank == self.rank else None)

    @contextmanager
    def _noted(self, words: str) -> Iterator[None]:
        """Records a collective that training waits for; it does not for those of a background
        save.
        """
        if self._log is None or threading.get_ident() != self._trains:
            yield
        else:
            with self._log.waiting(words):
                yield

    def _told(self, error: Exception) -> ShardgradError:
        """Returns an error as one of ours, which can be sent to the other ranks."""
        if isinstance(error, CheckpointError | CheckpointSaveError):
            return error
        return self._error(
            "a rank could not do its part of the checkpoint",
            expected="no error",
            got=printable(f"{type(error).__name__}: {error}"),
            where=None if self._where is None else printable(self._where),
            fix="remove the cause, and try again; checkpoints written before are untouched",
        )
