"""Publishes that a rank cannot capture a step, for the ranks whose captured collectives it does not
join.

It uses the default store, since the other ranks would not join a collective.
"""

from __future__ import annotations

from contextlib import suppress

import torch.distributed as dist

__all__ = ["announce", "announced"]

_KEY = "shardgrad/cannot_capture"
# There is no process group; or the store's host process has exited, so the run is ending.
_WITHOUT_STORE = ValueError, RuntimeError


def announce(what: str) -> None:
    """Publishes that this rank could not capture, and why."""
    with suppress(*_WITHOUT_STORE):
        store = dist.distributed_c10d._get_default_store()
        store.set(_KEY, f"rank {dist.get_rank()}: {what}")


def announced() -> str:
    """Returns the latest announcement of any rank, this one included; "" if there is none."""
    with suppress(*_WITHOUT_STORE):
        store = dist.distributed_c10d._get_default_store()
        return store.get(_KEY).decode() if store.check([_KEY]) else ""
    return ""
