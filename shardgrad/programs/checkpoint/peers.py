"""The ranks that share a checkpoint: each does its part, and an error of one is raised by all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.utils import _DistWrapper

from shardgrad.diagnosis.flight_recorder import GroupLog, recorder
from shardgrad.errors import CheckpointError, ShardgradError
from shardgrad.extras import require
from shardgrad.programs.text import printable

require("numpy", feature="shardgrad.programs.checkpoint")  # torch's collectives of objects need it

_Mine = TypeVar("_Mine")
_Result = TypeVar("_Result")


class _Failed(NamedTuple):
    """What a rank sends in place of a result. torch sends a traceback with it, which torch 2.11
    cannot pickle with Python 3.13, so that the other ranks wait.
    """

    rank: int
    error: ShardgradError


class Peers:
    """The ranks of a process group, or one process, with torch's collectives for checkpoints.

    Each is recorded in the flight recorder as "`step` of the checkpoint". If a part fails on any
    rank, all ranks raise the error of the lowest of these, with its global rank; its cause is what
    failed on the rank that raises it, if anything did.

    Args:
        group: a process group; None is the default group, or this process alone.
        where: the checkpoint, which such errors name.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        where: Path | None = None,
    ) -> None:
        self._torch = _DistWrapper(group, dist.is_initialized(), 0)
        self._where = where
        self.rank = self._torch.get_rank()
        self.count = self._torch.get_world_size()
        self._cause: Exception | None = None  # of this rank's last failure
        self._log: GroupLog | None = None
        if self.count > 1:
            self._log = recorder.group_log(group or dist.distributed_c10d._get_default_group())

    def together(
        self,
        step: str,
        work: Callable[[], _Mine],
        then: Callable[[list[_Mine]], object] = lambda results: None,
    ) -> None:
        """Does `work` on every rank, and then, with all results, `then` on the first rank."""
        self.scatter(step, work, lambda results: [then(results)] * self.count)

    def scatter(
        self,
        step: str,
        work: Callable[[], _Mine],
        then: Callable[[list[_Mine]], list[_Result]],
    ) -> _Result:
        """Like `together`; returns this rank's entry of what `then` returns."""
        with self._noted(step):
            results: list[Any] | None = self._torch.gather_object(self._tried(work))
            parts: Any = None
            if results is not None:  # on the first rank
                failed = [each for each in results if isinstance(each, _Failed)]
                parts = failed[0] if failed else self._tried(lambda: then(results))
                if isinstance(parts, _Failed):
                    parts = [parts] * self.count
            part: _Result | _Failed = self._torch.scatter_object(parts)
        return self._checked(part)

    def broadcast(self, step: str, work: Callable[[], _Result]) -> _Result:
        """Returns what `work` returns on the first rank, where alone it is done."""
        with self._noted(step):
            tried: Any = None if self.rank else self._tried(work)
            result: _Result | _Failed = self._torch.broadcast_object(tried)
        return self._checked(result)

    def _tried(self, work: Callable[[], _Result]) -> _Result | _Failed:
        try:
            return work()
        except Exception as error:  # any error: the other ranks must not wait for this one
            self._cause = error
            return _Failed(self.rank, self._told(error))

    def _checked(self, result: _Result | _Failed) -> _Result:
        """Returns what ranks have agreed upon, or raises it."""
        if not isinstance(result, _Failed):
            return result
        told = {**vars(result.error)}
        if self._log is not None:
            whose = f"rank {self._log.ranks[result.rank]}"
            told["where"] = "; ".join(filter(None, (result.error.where, whose)))
        raise type(result.error)(**told) from self._cause

    def _noted(self, step: str) -> AbstractContextManager[None]:
        """Records a collective that the host waits for in the block."""
        return (
            nullcontext() if self._log is None else self._log.waiting(f"{step} of the checkpoint")
        )

    def _told(self, error: Exception) -> ShardgradError:
        """Returns an error as one of ours, which can be sent to the other ranks."""
        if isinstance(error, CheckpointError):
            return error
        return CheckpointError(
            "a rank failed in its part of the checkpoint",
            expected="no error",
            got=printable(f"{type(error).__name__}: {error}"),
            where=None if self._where is None else printable(self._where),
            fix="remove the cause, and try again; earlier checkpoints are untouched",
        )
