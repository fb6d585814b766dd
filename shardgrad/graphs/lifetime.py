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
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardgrad.graphs.torch_patches import Patch, Replacement

__all__ = ["steps_with_graphs"]


class _Closable(Protocol):
    def close(self) -> None:
        """Destroys graphs."""


class _StepsWithGraphs:
    """The steps that have graphs, and torch's function while there are any."""

    def __init__(self) -> None:
        # The default process group of each; a process may have several, one for each thread.
        self._worlds: weakref.WeakKeyDictionary[_Closable, Any] = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()  # a step may be garbage collected inside a call
        self._patch = Patch()
        self._active = ExitStack()
        self._is_active = False

    def add(self, step: _Closable) -> None:
        """Has `step` closed before its default process group is destroyed, or at the interpreter's
        exit.
        """
        with self._lock:
            if step not in self._worlds:
                self._worlds[step] = dist.group.WORLD
                weakref.finalize(step, self._restore_if_empty).atexit = False
            if not self._is_active:
                self._is_active = True
                self._active.enter_context(self._patch.active(self._replacements))
                atexit.register(self.close)

    def discard(self, step: _Closable) -> None:
        """Says that `step` has no graphs any more."""
        with self._lock:
            self._worlds.pop(step, None)
            self._restore_if_empty()

    def close(self, world: Any = None) -> None:
        """Closes the steps whose default process group is `world`; None: all steps."""
        for step, its_world in list(self._worlds.items()):
            if world is None or its_world is world:
                step.close()

    def _restore_if_empty(self) -> None:
        with self._lock:
            if self._is_active and next(iter(self._worlds), None) is None:
                self._is_active = False
                self._active.close()
                atexit.unregister(self.close)

    def _replacements(self) -> Iterator[Replacement]:
        destroy = dist.destroy_process_group

        @functools.wraps(destroy)
        def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
            if group is None or group is dist.group.WORLD:
                self.close(dist.group.WORLD)
            destroy(group)

        for module in (dist, distributed_c10d):
            yield module, "destroy_process_group", lambda _: destroy_process_group


steps_with_graphs = _StepsWithGraphs()
