"""Errors of collectives, in words that say what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from shardgrad.errors import CollectiveError

__all__ = ["FIX", "checked"]

_T = TypeVar("_T")

FIX = (
    "if ranks legitimately run different units or have no batch, wrap the step in `with "
    "shardgrad.participate(model):`; else look for the first error among the ranks"
)


def checked(what: str, group: dist.ProcessGroup, call: Callable[[], _T]) -> _T:
    """Calls the backend, turning its errors into ours.

    Raises:
        CollectiveError: the backend raised.
    """
    try:
        return call()
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise CollectiveError(
            f"the {what} failed: another rank is late, gone, or running something else",
            expected=f"every rank of {dist.get_process_group_ranks(group)} to join it",
            got=str(error).splitlines()[0],
            where=f"rank {dist.get_rank()}",
            fix=FIX,
        ) from error
