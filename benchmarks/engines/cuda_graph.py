"""A CUDA graph without an engine's help: what every trainer can write by hand."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain

import torch
from torch import Tensor

from benchmarks.engines.program import MicroBatch, Step

_WARMUP = 3  # eager steps before a capture, as many as `graphed_step` takes


class PlainGraph:
    """A function of tensors as one CUDA graph, by the recipe of torch's manual.

    Args:
        function: takes tensors, returns one; the tensors' shapes stay.

    Attributes:
        pool_nbytes: device memory that the capture reserved.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._stream = torch.cuda.Stream()
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._output: Tensor | None = None
        self.pool_nbytes = 0

    @property
    def is_captured(self) -> bool:
        """Whether calls are replays by now."""
        return self._graph is not None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Runs eagerly, captures, or replays."""
        self._calls += 1
        if self._calls <= _WARMUP:
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                output = self._function(*inputs)
            current.wait_stream(self._stream)
            return output
        if self._graph is None:
            self._capture(inputs)
        assert self._graph is not None
        assert self._output is not None
        torch._foreach_copy_(self._inputs, list(inputs))
        self._graph.replay()
        return self._output

    def _capture(self, inputs: Sequence[Tensor]) -> None:
        self._inputs = [tensor.clone() for tensor in inputs]
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # as torch.cuda.graph is about to do
        reserved = torch.cuda.memory_reserved()
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            # Other threads may speak to the device: NCCL's watchdog does.
            with torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local"):
                self._output = self._function(*self._inputs)
        except Exception as error:
            # torch may leave the allocator waiting for the end of a capture that broke, which would
            # hold back the memory of whatever is measured after it.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            # What broke it, such as memory that ran out, and not that it is broken.
            raise error.__context__ or error from None
        self.pool_nbytes = max(0, torch.cuda.memory_reserved() - reserved)
        self._graph = graph


def captured(function: Step) -> tuple[PlainGraph, Step]:
    """Returns a graph of a function of micro-batches, and what calls it with them."""
    graph = PlainGraph(lambda *tensors: function([*zip(tensors[::2], tensors[1::2], strict=True)]))

    def call(micro_batches: list[MicroBatch]) -> Tensor:
        return graph(*chain.from_iterable(micro_batches))

    return graph, call
