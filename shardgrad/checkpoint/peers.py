"""The processes that share a checkpoint, and how they agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shardgrad.errors import CheckpointError, CheckpointSaveError, ShardgradError

__all__ = ["Peers"]

_Result = TypeVar("_Result")
_ERRORS: dict[str, type[ShardgradError]] = {
    error.__name__: error for error in (CheckpointError, CheckpointSaveError)
}


class Peers:
    """The ranks of a group; one process where there is none. Every method is a collective.

    Args:
        group: a process group; None is the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        is_joined = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if is_joined else 0
        self.count = dist.get_world_size(group) if is_joined else 1

    @property
    def leads(self) -> bool:
        """Whether this process writes what there is only one of."""
        return self.rank == 0

    def gather(self, thing: Any) -> list[Any]:
        """Returns every rank's thing, in order, on the first rank; nothing on the others."""
        if self.count == 1:
            return [thing]
        things: list[Any] | None = [None] * self.count if self.leads else None
        dist.gather_object(thing, things, group=self._group, group_dst=0)
        return things or []

    def scatter(self, things: list[Any]) -> Any:
        """Returns this rank's of the things that the first rank has."""
        if self.count == 1:
            return things[0]
        box: list[Any] = [None]
        dist.scatter_object_list(box, things if self.leads else None, group=self._group, group_src=0)
        return box[0]

    def all_gather(self, thing: Any) -> list[Any]:
        """Returns every rank's thing, in order, on every rank."""
        if self.count == 1:
            return [thing]
        things: list[Any] = [None] * self.count
        dist.all_gather_object(things, thing, group=self._group)
        return things

    def together(self, work: Callable[[], _Result]) -> _Result:
        """Returns what `work` does on this rank; if it fails on any rank, all fail alike.

        Args:
            work: no collective.

        Raises:
            CheckpointError, CheckpointSaveError: what the lowest rank that failed had to say.
        """
        cause: Exception | None = None
        try:
            result = work()
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            cause = error
        told = None if cause is None else _words(cause)
        found = [(rank, words) for rank, words in enumerate(self.all_gather(told)) if words is not None]
        if not found:
            return result
        rank, (kind, what, expected, got, where, fix) = found[0]
        if self.count > 1:
            where = f"rank {rank}" if where is None else f"{where}; rank {rank}"
        raise _ERRORS[kind](what, expected=expected, got=got, where=where, fix=fix) from cause


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
