"""A rank that cannot capture a step says so, for the ranks whose captured collectives it does not
join.

It says it in the store in which the ranks met, since a collective would be the next that others do
not join.
"""

from __future__ import annotations

from contextlib import suppress

import torch.distributed as dist

__all__ = ["announce", "announced"]

_KEY = "shardgrad/cannot_capture"


def announce(what: str) -> None:
    """Says that this rank could not capture, and why."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        with suppress(RuntimeError):  # the store's process is gone, and the run ends in any case
            dist.distributed_c10d._get_default_store().set(_KEY, f"rank {dist.get_rank()}: {what}")


def announced() -> str:
    """Returns what a rank said last, which may be this one; "" if none did."""
    if dist.is_initialized():
        with suppress(RuntimeError):
            store = dist.distributed_c10d._get_default_store()
            return store.get(_KEY).decode() if store.check([_KEY]) else ""
    return ""
