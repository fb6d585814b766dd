"""The stream that steps are captured on, and the memory pool that their graphs share.

Calls of steps with the same pool run one after the other, so a graph may reuse memory that another
graph of the pool uses for intermediate results. A replay is launched on the caller's stream. It
needs no wait unless the call before it was made on another stream.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch

from shardgrad.engine.streams import Stream, wait_for_device
from shardgrad.errors import AsleepError, OptionError
from shardgrad.ops.virtual_memory import VirtualPool
from shardgrad.policies import SleepPolicy

DeviceGraph = Any  # a torch.cuda.CUDAGraph or a torch.accelerator.Graph

# Makes autograd nodes of earlier calls run on the capturing stream. The streams that they were
# created on are not part of the capture. The setting is process-wide; it exists since torch 2.13.
_override_stale_streams: Callable[[bool], None] = getattr(
    torch.autograd.graph, "set_override_stale_capture_stream", lambda _: None
)

# By device: held by a thread that captures, since a device synchronization of another thread would
# invalidate its capture.
_locks = defaultdict[torch.device, Any](threading.RLock)

_STREAM_NON_BLOCKING = 1  # cudaStreamNonBlocking: not synchronized with the legacy stream


class GraphPool:
    """A stream and a memory pool for graphs that never run at the same time.

    Steps that use the same model, for example a training step and an evaluation step, share the
    graphs' memory if they share a pool.

    For example:

        pool = shardgrad.GraphPool()
        train = shardgrad.graphed_step(model, optimizer, pool=pool)(train_step)
        evaluate = shardgrad.graphed_step(model, pool=pool)(evaluation)

    Args:
        device: the device of the models and optimizers. None for the current accelerator, or for
            the CPU if there is none.
        offload_policy: `SleepPolicy()` for memory that `shardgrad.sleep` can release (CUDA only).

    Attributes:
        device: as given, with an index.
        stream: the stream on which steps run eagerly and are captured; None on the CPU.
        can_capture: False if the device has no graphs, so that all steps run eagerly.
        caller: the stream that was current in the latest call, of any step; None on the CPU.
        lock: held while a thread captures on the device, with any pool.
        nbytes: bytes that captures have reserved so far, in addition to those of eager steps.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        offload_policy: SleepPolicy | None = None,
    ) -> None:
        device = device or torch.accelerator.current_accelerator(check_available=True) or "cpu"
        self.device = torch.empty(0, device=device).device  # with an index, as a tensor has it
        self.can_capture = self.device.type == "cuda" or (
            self.device.type not in ("cpu", "meta") and hasattr(torch.accelerator, "Graph")
        )
        self.stream: Stream = (
            _capture_stream(self.device, threading.get_ident()) if self.can_capture else None
        )
        self.lock = _locks[self.device]
        self.nbytes = 0
        self.caller: Any = None
        self._policy = offload_policy
        self._memory: VirtualPool | None = None
        self._handle: Any = None  # torch's id of the memory pool; None while there are no graphs
        self._graphs: WeakSet[DeviceGraph] = WeakSet()  # those that exist
        self._is_away = False  # True between `offload` and `reload`

    def offload(self) -> None:
        """Releases the graphs' memory until `reload`. The outputs of earlier replays are lost, and
        until then a call of a step raises.

        Streams: the host waits for the device. Capture: not safe.

        Raises:
            OptionError: the pool was not made with `offload_policy=SleepPolicy()`.
        """
        if self._policy is None:
            raise OptionError(
                "the pool's memory cannot be released",
                expected="a pool with offload_policy=SleepPolicy()",
                got="a pool without it",
                fix="shardgrad.GraphPool(offload_policy=shardgrad.SleepPolicy())",
            )
        if self._memory is not None and not self._is_away:
            self._memory.give_back()
        self._is_away = True

    def reload(self) -> None:
        """Maps the memory again at the same addresses, so that graphs can be replayed.

        Streams: filled on the current one. Capture: not safe.
        """
        if self._memory is not None:
            self._memory.bring_back()
        self._is_away = False

    def follow(self) -> None:
        """Makes the caller's current stream wait for all earlier calls of this pool.

        Raises:
            AsleepError: after `offload`.
        """
        if self._is_away:
            raise AsleepError.of("the pool of graphs")
        if self.stream is None:
            return
        before, self.caller = self.caller, torch.accelerator.current_stream(self.device.index)
        if before is not None and before != self.caller:
            self.caller.wait_stream(before)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Makes the pool's stream current inside the block, after `follow`.

        Streams: the pool's stream waits for the caller's before the block, and the caller's for the
            pool's after it, even if the block raises.
        """
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(self.caller)
        try:
            with self.stream:
                yield
        finally:
            self.caller.wait_stream(self.stream)

    @contextmanager
    def capture(self, generators: Sequence[torch.Generator]) -> Iterator[DeviceGraph]:
        """Captures what the block launches on the pool's stream, and on streams that join it.

        Call it inside `turn`. The host waits for the device first, and for another thread that
        captures on it. If the block raises, the capture is ended. `destroy` the graph in any case.
        """
        with self.lock:
            gc.collect()  # tensors of earlier, unreachable cycles must not be freed in the capture
            wait_for_device(self.device)
            # So that the graph's pool may reserve memory that eager steps left unused in the cache.
            module = torch.get_device_module(self.device)
            module.empty_cache()
            reserved = module.memory_reserved(self.device)
            self._drop_unused()
            graph = self._begin(generators)
            self._graphs.add(graph)
            collecting = gc.isenabled()
            gc.disable()
            _override_stale_streams(True)
            is_over = False
            try:
                yield graph
                is_over = True
                graph.capture_end()
            except BaseException:
                self._abandon(graph, generators, is_over=is_over)
                raise
            finally:
                _override_stale_streams(False)
                if collecting:
                    gc.enable()
            self._handle = graph.pool()
            self.nbytes += max(0, module.memory_reserved(self.device) - reserved)

    def segments(self) -> Iterator[tuple[int, int]]:
        """Yields the begin and end address of each segment of the graphs' memory, once there is a
        graph; nothing on devices other than CUDA.
        """
        if self.device.type == "cuda":
            for segment in torch.cuda.memory_snapshot(self._handle):
                yield segment["address"], segment["address"] + segment["total_size"]

    def destroy(self, graph: DeviceGraph) -> None:
        """Destroys a graph that `capture` has yielded. It must not be running."""
        graph.reset()
        self._graphs.discard(graph)
        self._drop_unused()

    def _drop_unused(self) -> None:
        """Drops the memory pool once there are no graphs. They may also have ended with their step:
        torch refuses captures into a pool all of whose graphs are destroyed.
        """
        if not self._graphs:
            self._handle = self._memory = None

    def _begin(self, generators: Sequence[torch.Generator]) -> DeviceGraph:
        if self.device.type == "cuda":
            if self._policy is not None and self._memory is None:
                self._memory = VirtualPool()
                self._handle = self._memory.id
            self._handle = self._handle or torch.cuda.graph_pool_handle()
            return _begun(self._handle, generators)
        graph: DeviceGraph = torch.accelerator.Graph(pool=self._handle)
        graph.capture_begin()
        return graph

    def _abandon(
        self, graph: DeviceGraph, generators: Sequence[torch.Generator], *, is_over: bool
    ) -> None:
        """Ends a capture that has failed. If CUDA has already invalidated it, or its end has
        raised, torch's part of it has to be ended apart. The first exception is the cause, so none
        is raised here.
        """
        with suppress(Exception):
            if not is_over:  # torch 2.15 counts ends
                graph.capture_end()
                return
        if self.device.type != "cuda":
            return
        with suppress(RuntimeError):
            # Otherwise the allocator keeps deferring frees of memory used on other streams.
            torch._C._cuda_endAllocateToPool(self.device.index, self._handle)
        with suppress(RuntimeError):
            # In torch 2.11, a generator stays in capture mode until a capture that it is registered
            # with succeeds, so capture an empty graph.
            graph = _begun(torch.cuda.graph_pool_handle(), generators)
            torch.zeros(1, device=self.device)
            graph.capture_end()
            graph.reset()


def _begun(handle: Any, generators: Sequence[torch.Generator]) -> DeviceGraph:
    """Begins to capture a CUDA graph into a memory pool."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    # Not "global", in which the event queries of ProcessGroupNCCL's watchdog thread would
    # invalidate the capture.
    graph.capture_begin(handle, capture_error_mode="thread_local")
    return graph


@functools.cache
def _capture_stream(device: torch.device, thread: int) -> torch.Stream:
    """Returns the stream on which all pools of a thread capture.

    All pools share one stream because torch keeps a cuBLAS workspace for each stream that ran a
    matmul (64 MiB on an H100) until the process ends. Each thread has its own stream, since work
    that another thread launches on it during a capture would become part of the graph. For the same
    reason the stream is not from torch's pool: torch hands out its 32 streams round-robin, so the
    program's 33rd stream would be this one.
    """
    if device.type != "cuda" or torch.version.cuda is None:  # other devices, and ROCm
        return torch.Stream(device)
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    stream = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.check_error(
            runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), _STREAM_NON_BLOCKING)
        )
    found = torch.cuda.ExternalStream(stream.value, device=device)
    # A torch.cuda.Stream equals the torch.Stream with its id but has another hash, and streams are
    # dictionary keys here. So torch.Stream is used everywhere.
    return torch.Stream(
        stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type
    )
