"""The stream that steps are captured on, and the memory pool that their graphs share.

Calls of one pool run one after the other, so a graph may reuse memory of the pool that an earlier
one left. A replay is a launch on the caller's stream, and so needs no wait unless the call before
came from another one.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from shardgrad.engine.streams import Stream, wait_for_device, wait_for_stream
from shardgrad.errors import AsleepError, CaptureError, OptionError
from shardgrad.ops.virtual_memory import VirtualPool
from shardgrad.policies import SleepPolicy

__all__ = ["DeviceGraph", "GraphPool"]

DeviceGraph = Any  # a torch.cuda.CUDAGraph, or a torch.accelerator.Graph
_STREAM_NON_BLOCKING = 1  # cudaStreamNonBlocking: the legacy stream does not wait for it


class GraphPool:
    """A stream and a memory pool for graphs that never run at the same time.

    Steps that use the same model, for example one for training and one for evaluation, share memory
    if they share a pool.

    For example:

        pool = shardgrad.GraphPool()
        train = shardgrad.graphed_step(model, optimizer, pool=pool)(train_step)
        evaluate = shardgrad.graphed_step(model, pool=pool)(evaluation)

    Args:
        device: of the models and optimizers; None for the current accelerator, or the CPU without
            one.
        offload_policy: `SleepPolicy()` for memory that `shardgrad.sleep` can give back, on CUDA.

    Attributes:
        device: as given, with an index.
        stream: on which steps run eagerly and are captured; None on the CPU.
        can_capture: False where the device has no graphs: steps run eagerly there.
        nbytes: bytes that captures have reserved so far, beyond what eager steps had reserved.
        calls: number of calls of all steps of this pool; each may overwrite what an earlier one
            returned.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        offload_policy: SleepPolicy | None = None,
    ) -> None:
        self.device = _resolved(device)
        self.can_capture = self.device.type == "cuda" or (
            self.device.type not in ("cpu", "meta") and hasattr(torch.accelerator, "Graph")
        )
        self.stream: Stream = (
            _capture_stream(self.device, threading.get_ident()) if self.can_capture else None
        )
        self.nbytes = self.calls = 0
        self._latest: Stream = None  # from which the latest call came
        self._policy = offload_policy
        self._memory: VirtualPool | None = None
        self._handle: Any = None  # of the memory, while it has graphs
        self._graphs = 0
        self._is_away = False

    def offload(self) -> None:
        """Gives the graphs' memory back until `reload`. What replays have returned is lost, and a
        call of a step raises meanwhile.

        Streams: the host waits for the device. Capture: not safe.

        Raises:
            OptionError: the pool was not made with `offload_policy=SleepPolicy()`.
        """
        if self._policy is None:
            raise OptionError(
                "the pool's memory cannot be given back",
                expected="a pool with offload_policy=SleepPolicy()",
                got="one without",
                fix="shardgrad.GraphPool(offload_policy=shardgrad.SleepPolicy())",
            )
        if self._memory is not None and not self._is_away:
            self._memory.give_back()
        self._is_away = True

    def reload(self) -> None:
        """Takes the memory again, at its addresses: graphs are replayed as before.

        Streams: filled on the current one. Capture: not safe.
        """
        if self._memory is not None and self._is_away:
            self._memory.bring_back()
        self._is_away = False

    def follow(self) -> Stream:
        """Returns the caller's current stream, which waits for the pool's calls so far; None on the
        CPU.

        Raises:
            AsleepError: after `offload`.
        """
        if self._is_away:
            raise AsleepError.of("the pool of graphs")
        if self.stream is None:
            return None
        before, self._latest = self._latest, torch.accelerator.current_stream(self.device.index)
        if before is not None:
            wait_for_stream(self._latest, before)
        return self._latest

    @contextmanager
    def turn(self, caller: Stream) -> Iterator[None]:
        """Makes the pool's stream current inside the block.

        Args:
            caller: as `follow` returned it.

        Streams: the pool's stream waits for the caller's; after the block, also if that raises, the
        caller's waits for the pool's.
        """
        if self.stream is None or caller is None:
            yield
            return
        wait_for_stream(self.stream, caller)
        try:
            with self.stream:
                yield
        finally:
            wait_for_stream(caller, self.stream)

    @contextmanager
    def capture(self, generators: Sequence[torch.Generator] = ()) -> Iterator[DeviceGraph]:
        """Captures what the block launches on the pool's stream, and on streams that join it.

        Called inside `turn`. The host waits for the device first. If the block raises, the capture
        is ended and its graph destroyed.

        Raises:
            CaptureError: another thread captures on the device.
        """
        with _alone(self.device):
            gc.collect()  # a tensor of a dead cycle must not be freed into the capture
            wait_for_device(self.device)
            # So that the graph may reserve what eager steps hold in the cache and do not use.
            torch.get_device_module(self.device).empty_cache()
            reserved = self._reserved()
            graph = self._begin(generators)
            self._graphs += 1
            collecting = gc.isenabled()
            gc.disable()
            try:
                try:
                    yield graph
                except BaseException:
                    with suppress(Exception):  # the cause is what ended the block
                        self._end(graph, generators)
                    raise
                finally:
                    if collecting:
                        gc.enable()
                self._end(graph, generators)
            except BaseException:
                self.destroy(graph)
                raise
            self._handle = graph.pool()
            self.nbytes += max(0, self._reserved() - reserved)

    def segments(self) -> Iterator[tuple[int, int]]:
        """Yields the first address of each segment of the graphs' memory, and the first behind it;
        none where the allocator does not say.
        """
        if self._handle is not None and self.device.type == "cuda":
            for segment in torch.cuda.memory_snapshot(self._handle):
                yield segment["address"], segment["address"] + segment["total_size"]

    def destroy(self, graph: DeviceGraph) -> None:
        """Destroys a graph that `capture` has yielded.

        With the last one goes the memory: torch refuses captures into a pool whose graphs are gone.
        """
        if self._memory is not None:  # whose end waits for nothing
            wait_for_device(self.device)
        graph.reset()
        self._graphs -= 1
        if not self._graphs:
            self._handle = self._memory = None

    def _begin(self, generators: Sequence[torch.Generator]) -> DeviceGraph:
        graph: DeviceGraph
        if self.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            for generator in generators:
                graph.register_generator_state(generator)
            self._handle = self._handle or self._new_memory()
            # Not "global": the watchdog thread of a process group queries events all the time.
            graph.capture_begin(self._handle, capture_error_mode="thread_local")
        elif generators:
            raise CaptureError(
                f"graphs of {self.device.type} support the device's default generator only",
                expected="operations without generator=",
                got=f"{len(generators)} generators",
                fix="leave torch.Generator out of graphed_step(...), and generator= out of the "
                "step",
            )
        else:
            graph = torch.accelerator.Graph(pool=self._handle)
            graph.capture_begin()
        return graph

    def _new_memory(self) -> Any:
        if self._policy is None:
            return torch.cuda.graph_pool_handle()
        self._memory = VirtualPool()
        return self._memory.id

    def _end(self, graph: Any, generators: Sequence[torch.Generator]) -> None:
        try:
            graph.capture_end()
        except BaseException:
            if self.device.type == "cuda":
                self._end_in_torch(generators)
            raise

    def _end_in_torch(self, generators: Sequence[torch.Generator]) -> None:
        """Ends torch's side of a capture that CUDA has ended already."""
        with suppress(RuntimeError):
            # Otherwise the allocator keeps deferring frees of memory that other streams have used.
            torch._C._cuda_endAllocateToPool(self.device.index, self._handle)
        with suppress(RuntimeError):
            # Generators of torch 2.11 cannot be used until a capture that they are registered with
            # succeeds.
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


@functools.cache
def _capture_stream(device: torch.device, thread: int) -> torch.Stream:
    """Returns the stream on which all pools of a thread capture.

    torch keeps cuBLAS workspaces for each stream that matrices were multiplied on, 64 MiB on an
    H100, until the process ends; so there is one stream, and not one for each pool. Another thread
    has its own, since what it launched on this one would become part of a graph. For the same
    reason CUDA makes it: torch lends its 32 in turn, and a program's 33rd would be this one.
    """
    if device.type != "cuda" or torch.version.cuda is None:  # another device, or ROCm
        return torch.Stream(device)
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    stream = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.check_error(
            runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), _STREAM_NON_BLOCKING)
        )
    found = torch.cuda.ExternalStream(stream.value, device=device)
    # Streams of torch.cuda and of torch are equal and have other hashes: one kind is used here.
    return torch.Stream(
        stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type
    )


_threads_capturing: dict[torch.device, threading.Thread] = {}


@contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """Refuses a capture while another thread captures: it begins with a wait for the device, which
    would break the other one.
    """
    thread = threading.current_thread()
    other = _threads_capturing.setdefault(device, thread)
    if other is not thread:
        raise CaptureError(
            f"{thread.name} was to capture on {device} while {other.name} captures there",
            expected="one capture at a time on a device",
            got="two threads that capture at once",
            fix="a threading.Lock around the calls of both steps, until each has its graphs; or a "
            "process for each",
        )
    try:
        yield
    finally:
        del _threads_capturing[device]


def _resolved(device: torch.device | str | None) -> torch.device:
    """Returns a device as tensors name it, with an index."""
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    return torch.empty(0, device=device).device
