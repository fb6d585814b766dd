"""Where graphed steps run: one stream, and the memory that their graphs share.

Graphs of one pool take turns on its stream, so what one leaves behind in the pool another may use, and nobody
has to wait for anything but the stream.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch

from shardgrad.engine.streams import Stream, is_capturing
from shardgrad.errors import CaptureError

__all__ = ["DeviceGraph", "GraphPool"]


class DeviceGraph(Protocol):
    """What `torch.cuda.CUDAGraph` and `torch.accelerator.Graph` have in common."""

    def replay(self) -> None:
        """Launches the recorded work on the current stream."""

    def reset(self) -> None:
        """Gives up the recorded work and its memory."""


class GraphPool:
    """A stream and a pool of memory for graphs that never overlap.

    Pass one to several `graphed_step`s that use the same model, for example one for training and one for
    evaluation: they share memory then.

    Args:
        device: of the models and optimizers; None for the current accelerator, or the CPU without one.

    Attributes:
        device: as given, with an index.
        stream: on which steps run; None on the CPU.
        can_capture: False where the device has no graphs: steps run eagerly there.
        nbytes: reserved by the captures so far, beyond what eager steps had reserved.
        calls: of all steps that run here; each may overwrite what an earlier one returned.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = _with_index(torch.device(device) if device is not None else _default_device())
        self.can_capture = self.device.type == "cuda" or (
            self.device.type not in ("cpu", "meta") and hasattr(torch.accelerator, "Graph")
        )
        self.stream: Stream = torch.Stream(self.device) if self.can_capture else None
        self.nbytes = self.calls = 0
        self._handle: Any = None

    @contextmanager
    def turn(self) -> Iterator[Stream]:
        """Makes the pool's stream current. It waits for the caller's stream, and afterwards the other way.

        Yields:
            The caller's stream, None on the CPU.
        """
        if self.stream is None:
            yield None
            return
        caller = torch.accelerator.current_stream(self.device)
        if caller != self.stream:
            self.stream.wait_stream(caller)
        with self.stream:
            yield caller
        if caller != self.stream:
            caller.wait_stream(self.stream)

    @contextmanager
    def capture(self, generators: Sequence[torch.Generator] = ()) -> Iterator[DeviceGraph]:
        """Records what is launched on the pool's stream, and on streams that join it, instead of running it.

        Inside `turn`. The host waits for the device first. If the block raises, nothing is left of the
        capture.

        Raises:
            CaptureError: this thread's stream is being captured already.
        """
        if is_capturing(self.device):
            raise CaptureError(
                "a capture inside a capture",
                expected="graphed steps called one after the other",
                got="one called while another is being captured",
                fix="call the inner function itself; it becomes part of the outer graph",
            )
        gc.collect()  # a tensor of a dead cycle must not be freed into the capture
        torch.accelerator.synchronize(self.device)
        # What eager steps have reserved and not in use, the graph may have.
        torch.get_device_module(self.device).empty_cache()
        reserved = self._reserved()
        graph = self._begin(generators)
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield graph
        except BaseException:
            self._give_up(graph, generators)
            raise
        finally:
            if collecting:
                gc.enable()
        try:
            graph.capture_end()
        except BaseException:
            graph.reset()
            raise
        self._handle = graph.pool()
        self.nbytes += max(0, self._reserved() - reserved)

    def _begin(self, generators: Sequence[torch.Generator]) -> Any:
        graph: Any
        if self.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            for generator in generators:
                graph.register_generator_state(generator)
            self._handle = self._handle or torch.cuda.graph_pool_handle()
            # Not "global": another thread of the process group looks at its events all the time.
            graph.capture_begin(self._handle, capture_error_mode="thread_local")
        elif generators:
            raise CaptureError(
                f"graphs of {self.device.type} know the device's own random numbers only",
                expected="operations without generator=",
                got=f"{len(generators)} generators",
                fix="leave torch.Generator out of graphed_step(...), and generator= out of the step",
            )
        else:
            graph = torch.accelerator.Graph(pool=self._handle)
            graph.capture_begin()
        return graph

    def _give_up(self, graph: Any, generators: Sequence[torch.Generator]) -> None:
        try:
            graph.capture_end()
        except Exception:
            # What the device says of a capture that was broken off adds nothing.
            if self.device.type == "cuda":
                self._tell_torch(generators)
        graph.reset()

    def _tell_torch(self, generators: Sequence[torch.Generator]) -> None:
        """Ends for torch a capture that CUDA has ended already."""
        with suppress(RuntimeError):
            # The allocator would go on to hold back memory that other streams have used.
            torch._C._cuda_endAllocateToPool(self.device.index, self._handle)
        with suppress(RuntimeError):
            # Generators of torch 2.11 draw nothing until a capture that they took part in has ended well.
            graph = torch.cuda.CUDAGraph()
            for generator in generators:
                graph.register_generator_state(generator)
            graph.capture_begin(torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            torch.zeros(1, device=self.device)
            graph.capture_end()
            graph.reset()

    def _reserved(self) -> int:
        module = torch.get_device_module(self.device)
        return int(module.memory_reserved(self.device)) if hasattr(module, "memory_reserved") else 0


def _default_device() -> torch.device:
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def _with_index(device: torch.device) -> torch.device:
    index: int | None = device.index
    if index is None and device.type not in ("cpu", "meta"):
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device
