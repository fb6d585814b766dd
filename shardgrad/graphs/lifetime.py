"""Destroys graphs before the process group that their collectives belong to.

A graph holds NCCL communicators, and NCCL does not destroy a communicator while a graph holds it,
so `destroy_process_group` would hang. torch has no hook that runs before a process group is
destroyed. So `torch.distributed.destroy_process_group` is replaced when the first graph is
captured, until the process ends. The replacement closes only the steps that were captured under the
default process group that is being destroyed.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

# For each step that has captured, its default process group. A process may have one per thread.
_steps: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def has_graphs(step: Any) -> None:
    """Registers `step` to be closed before its default process group is destroyed, or at exit."""
    _replace_destroy()
    _steps[step] = dist.group.WORLD


@atexit.register
def _close_all() -> None:
    for step in list(_steps):
        step.close()


@functools.cache
def _replace_destroy() -> None:
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        if group in (None, dist.group.WORLD):
            for step, world in list(_steps.items()):
                if world is dist.group.WORLD and step.captures:
                    step.close()
        destroy(group)

    dist.destroy_process_group = destroy_process_group
    distributed_c10d.destroy_process_group = destroy_process_group
