"""The ranks that share a checkpoint: each does its part, and an error of one is raised by all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.utils import _DistWrapper

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.errors import CheckpointError
from shardgrad.extras import require
from shardgrad.programs.text import printable

require("numpy", feature="shardgrad.programs.checkpoint")  # torch's collectives of objects need it

_Mine = TypeVar("_Mine")
_Result = TypeVar("_Result")


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
        self, group: dist.ProcessGroup | None = None, *, where: Path | None = None
    ) -> None:
        self._torch = _DistWrapper(group, dist.is_initialized(), 0)
        self.rank = self._torch.get_rank()
        self.count = self._torch.get_world_size()
        self._where = None if where is None else printable(where)
        self._whose = f"rank {dist.get_rank()}" if self.count > 1 else ""
        self._cause: Exception | None = None  # of this rank's last failure
        self._log = None
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
                failed = [each for each in results if isinstance(each, CheckpointError)]
                parts = failed[0] if failed else self._tried(lambda: then(results))
                if isinstance(parts, CheckpointError):
                    parts = [parts] * self.count
            part: _Result | CheckpointError = self._torch.scatter_object(parts)
        return self._checked(part)

    def broadcast(self, step: str, work: Callable[[], _Result]) -> _Result:
        """Returns what `work` returns on the first rank, where alone it is done."""
        with self._noted(step):
            tried: Any = None if self.rank else self._tried(work)
            result: _Result | CheckpointError = self._torch.broadcast_object(tried)
        return self._checked(result)

    def _noted(self, step: str) -> AbstractContextManager[None]:
        """Records a collective that the host waits for in the block."""
        return self._log.waiting(f"{step} of the checkpoint") if self._log else nullcontext()

    def _tried(self, work: Callable[[], _Result]) -> _Result | CheckpointError:
        """Returns what the work returns, or the error that is sent in its place."""
        # torch would send a traceback too, which torch 2.11 cannot pickle with Python 3.13.
        try:
            return work()
        except Exception as error:  # any error: the other ranks must not wait for this one
            self._cause = error
            return self._told(error)

    def _told(self, error: Exception) -> CheckpointError:
        """Returns an error as one that can be sent to the other ranks, with this rank's number."""
        told: dict[str, Any] = {
            "what": "a rank failed in its part of the checkpoint",
            "expected": "no error",
            "got": printable(f"{type(error).__name__}: {error}"),
            "where": self._where,
            "fix": "remove the cause, and try again; earlier checkpoints are untouched",
        }
        if isinstance(error, CheckpointError):
            told = vars(error)
        where = "; ".join(filter(None, (told["where"], self._whose)))
        return CheckpointError(**{**told, "where": where})

    def _checked(self, result: _Result | CheckpointError) -> _Result:
        """Returns what ranks have agreed upon, or raises it."""
        if isinstance(result, CheckpointError):
            raise result from self._cause
        return result
