"""Destroys graphs before the process group that their collectives belong to.

A graph holds NCCL communicators, and NCCL does not destroy a communicator while a graph holds it,
so `destroy_process_group` would hang. torch has no hook that runs before a process group is
destroyed. So `torch.distributed.destroy_process_group` is replaced while graphs exist, and restored
when the last one is destroyed. The replacement closes only the steps that were captured under the
default process group that is being destroyed.
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


# For each step that has graphs: its default process group (a process may have one per thread), and
# a function that ends the step's use of the patch.
_steps: weakref.WeakKeyDictionary[Any, tuple[Any, Callable[[], object]]]
_steps = weakref.WeakKeyDictionary()
_patch = Patch()


def has_graphs(step: Any) -> None:
    """Registers `step` to be closed before its default process group is destroyed, or at exit."""
    if step not in _steps:
        block = ExitStack()
        block.enter_context(_patch.active(_replacements))
        end = weakref.finalize(step, block.close)
        end.atexit = False  # the program may destroy the process group at exit
        _steps[step] = dist.group.WORLD, end


def has_no_graphs(step: Any) -> None:
    """Removes the registration of `step`, whose graphs are destroyed."""
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
