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
from shardgrad.programs.extras import require
from shardgrad.programs.text import printable

require("numpy", feature="shardgrad.programs.checkpoint")  # torch's collectives of objects need it

_Result = TypeVar("_Result")


class Peers:
    """The ranks of a process group, or one process, with torch's collectives for checkpoints.

    Each is recorded in the flight recorder as "`step` of the checkpoint". If a part fails on any
    rank, all ranks raise the error of the lowest of these, with its global rank; its cause is what
    failed on the rank that raises it, if anything did.

    Args:
        group: a process group; None is the default group, or this process alone.
        where: the checkpoint, which errors name that name nothing in it.

    Raises:
        CheckpointError: this rank is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, where: Path | str = "") -> None:
        self._torch = _DistWrapper(group, dist.is_initialized(), 0)
        self.rank = self._torch.get_rank()
        if self.rank < 0:
            raise CheckpointError(
                "this rank is not in the checkpoint's process group",
                expected="calls on the ranks of the group only",
                got=f"a call on rank {dist.get_rank()}",
                where=printable(where),
                fix="if dist.get_rank(group) >= 0: save(..., group=group)",
            )
        self.count = self._torch.get_world_size()
        self._where, self._whose = printable(where), ""
        self._cause: Exception | None = None  # of this rank's last failure
        self._waiting: Callable[[str], AbstractContextManager[object]] = nullcontext
        if self.count > 1:
            self._whose = f"rank {dist.get_rank()}"
            known = group or dist.distributed_c10d._get_default_group()
            self._waiting = recorder.group_log(known).waiting

    def together(
        self,
        step: str,
        work: Callable[[], _Result],
        then: Callable[[list[_Result]], list[Any] | None] = lambda results: None,
    ) -> Any:
        """Does `work` on every rank, and `then` on the first rank with all results. Returns this
        rank's entry of the list that `then` returns, if any.
        """
        with self._waiting(f"{step} of the checkpoint"):
            results: list[Any] | None = self._torch.gather_object(self._tried(work))
            parts: Any = None
            if results is not None:  # on the first rank
                failed = [each for each in results if isinstance(each, CheckpointError)]
                parts = failed[0] if failed else self._tried(lambda: then(results))
                if not isinstance(parts, list):
                    parts = [parts] * self.count
            part = self._torch.scatter_object(parts)
        if isinstance(part, CheckpointError):
            raise part from self._cause
        return part

    def broadcast(self, step: str, work: Callable[[], _Result]) -> _Result:
        """Returns what `work` returns on the first rank, where alone it is done."""
        with self._waiting(f"{step} of the checkpoint"):
            tried: Any = None if self.rank else self._tried(work)
            result: _Result | CheckpointError = self._torch.broadcast_object(tried)
        if isinstance(result, CheckpointError):
            raise result from self._cause
        return result

    def _tried(self, work: Callable[[], _Result]) -> _Result | CheckpointError:
        """Returns what the work returns, or an error that can be sent: it names this rank."""
        # torch would send a traceback too, which torch 2.11 cannot pickle with Python 3.13.
        try:
            return work()
        except Exception as error:  # any error: the other ranks must not wait for this one
            self._cause = told = error
        if not isinstance(told, CheckpointError):
            told = CheckpointError(
                "a rank failed in its part of the checkpoint",
                expected="no error",
                got=printable(f"{type(told).__name__}: {told}"),
                fix="remove the cause, and try again; earlier checkpoints are untouched",
            )
        where = "; ".join(filter(None, (told.where or self._where, self._whose)))
        return CheckpointError(
            told.what, expected=told.expected, got=told.got, where=where, fix=told.fix
        )
