"""Graphs are destroyed before the process group that their collectives belong to.

A graph holds NCCL communicators, and destroying a communicator waits until no graph holds it, so
`destroy_process_group` would hang. torch calls nothing before it destroys a process group, so
`torch.distributed.destroy_process_group` is replaced while there are graphs, and restored when the
last one is gone. Process groups in whose world nothing was captured are destroyed by torch's
function as usual.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardgrad.graphs.torch_patches import Patch, Replacement

__all__ = ["has_graphs", "has_no_graphs"]


# Of each step that has graphs, its default process group, of which a process may have several, one
# for each thread; and what ends its need of torch's function being replaced.
_steps: weakref.WeakKeyDictionary[Any, tuple[Any, Callable[[], object]]]
_steps = weakref.WeakKeyDictionary()
_patch = Patch()


def has_graphs(step: Any) -> None:
    """Has `step` closed before its default process group is destroyed, or at the interpreter's
    exit.
    """
    if step not in _steps:
        block = ExitStack()
        block.enter_context(_patch.active(_replacements))
        end = weakref.finalize(step, block.close)
        end.atexit = False  # the program may destroy the process group at exit
        _steps[step] = dist.group.WORLD, end


def has_no_graphs(step: Any) -> None:
    """Says that `step` has no graphs any more."""
    if step in _steps:
        _, end = _steps.pop(step)
        end()


@atexit.register
def _close_all() -> None:
    for step in list(_steps):
        step.close()


def _replacements() -> Iterator[Replacement]:
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        if group is None or group is dist.group.WORLD:
            for step, (world, _) in list(_steps.items()):
                if world is dist.group.WORLD:
                    step.close()
        destroy(group)

    for module in (dist, distributed_c10d):
        yield module, "destroy_process_group", lambda _: destroy_process_group
