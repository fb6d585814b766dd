"""Graphs go before the process group does.

A graph holds communicators of the process group, and destroying those first hangs. Neither torch nor Python
says when a process group is about to go, so `destroy_process_group` is wrapped, at the first capture.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from functools import cache
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["keep_until_the_process_group_goes"]


class _Closable(Protocol):
    def close(self) -> None:
        """Destroys graphs."""


# What is open, and the default process group at that time; a process may have several, one for each thread.
_open: weakref.WeakKeyDictionary[_Closable, Any] = weakref.WeakKeyDictionary()


def keep_until_the_process_group_goes(step: _Closable) -> None:
    """Has `step` closed before the default process group is destroyed, or at the interpreter's exit."""
    _open[step] = dist.group.WORLD
    _watch()


def _close(world: Any = None) -> None:
    for step, its_world in list(_open.items()):
        if world is None or its_world is world:
            step.close()


@cache
def _watch() -> None:
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        if group is None or group is dist.group.WORLD:
            _close(dist.group.WORLD)
        destroy(group)

    dist.destroy_process_group = distributed_c10d.destroy_process_group = destroy_process_group
    atexit.register(_close)
