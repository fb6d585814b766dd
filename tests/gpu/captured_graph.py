"""What CUDA itself says of a graph under capture: its nodes, what each comes after, and the memory
it uses.

CUDA does not tell what a kernel reads and writes. So operators are watched while they are captured:
nodes that are new after one are its own, and use its tensors as its schema says. Collectives are
operators of c10d.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.cuda_runtime.inspection import Work

__all__ = ["readable", "recorded"]

_ACTIVE = 1  # cudaStreamCaptureStatusActive


def readable() -> bool:
    """Returns whether CUDA's functions have the signatures that are used here, those of CUDA 13."""
    return (torch.version.cuda or "").startswith("13.")


@contextmanager
def recorded() -> Iterator[list[Work]]:
    """Watches captures that begin in the block; yields a list of their graphs, like
    `inspection.graph()`.
    """
    graphs: list[Work] = []
    begin, end = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end
    watching: list[_Watch] = []

    def begin_watched(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        watching.append(_Watch())
        watching[-1].__enter__()

    def end_watched(self: Any) -> None:
        watch = watching.pop()
        watch.__exit__(None, None, None)
        try:
            graphs.append(watch.graph())
        finally:
            end(self)

    with (
        patch.object(torch.cuda.CUDAGraph, "capture_begin", begin_watched),
        patch.object(torch.cuda.CUDAGraph, "capture_end", end_watched),
    ):
        yield graphs


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._cuda = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")
        self._nodes: dict[int, Work] = {}  # by CUDA's handle, in the order of capture

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self._add("work of no operator", [])
        result = func(*args, **(kwargs or {}))
        self._add(func.name(), _ranges(func._schema, args, kwargs or {}, result))
        return result

    def graph(self) -> Work:
        """Returns the graph as it is now."""
        self._add("work of no operator", [])
        numbers = {handle: number for number, handle in enumerate(self._nodes)}
        for handle, node in self._nodes.items():
            node["before"] = sorted(numbers[other] for other in self._dependencies(handle))
        return {"nodes": list(self._nodes.values())}

    def _add(self, operator: str, ranges: list[tuple[int, int, bool]]) -> None:
        """Takes over the nodes that are new, as those of an operator."""
        kind = "nccl" if operator.startswith("c10d::") else "kernel"
        stream = torch.cuda.current_stream().cuda_stream
        for handle in self._handles(stream):
            if handle not in self._nodes:
                self._nodes[handle] = {
                    "kind": kind,
                    "name": operator,
                    "operator": operator,
                    "stream": hex(stream),
                    "ranges": ranges,
                }

    def _handles(self, stream: int) -> Sequence[int]:
        """Returns the nodes of the graph into which a stream is captured; none if it is not
        captured.
        """
        status, graph, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t()
        asked = ctypes.byref(status), None, ctypes.byref(graph), None, None, None
        self._check(self._cuda.cudaStreamGetCaptureInfo(ctypes.c_void_p(stream), *asked))
        if status.value != _ACTIVE:
            return []
        self._check(self._cuda.cudaGraphGetNodes(graph, None, ctypes.byref(count)))
        if not count.value:  # CUDA refuses to list none
            return []
        handles = (ctypes.c_uint64 * count.value)()
        self._check(self._cuda.cudaGraphGetNodes(graph, handles, ctypes.byref(count)))
        return list(handles)

    def _dependencies(self, handle: int) -> Sequence[int]:
        node, count = ctypes.c_void_p(handle), ctypes.c_size_t()
        self._check(self._cuda.cudaGraphNodeGetDependencies(node, None, None, ctypes.byref(count)))
        if not count.value:
            return []
        handles = (ctypes.c_uint64 * count.value)()
        kinds = (ctypes.c_uint64 * count.value)()  # `cudaGraphEdgeData`: eight bytes
        self._check(
            self._cuda.cudaGraphNodeGetDependencies(node, handles, kinds, ctypes.byref(count))
        )
        return list(handles)

    @staticmethod
    def _check(error: int) -> None:
        if error:
            raise RuntimeError(f"CUDA error {error} when a graph was looked at")


def _ranges(
    schema: torch.FunctionSchema, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> list[tuple[int, int, bool]]:
    """Returns the device's memory that an operator uses, as (address, bytes, whether it is
    written).
    """
    found = [(tensor, True) for tensor in tree_leaves(result)]
    for number, argument in enumerate(schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        reads = True
        if schema.name.startswith("c10d::"):  # whose schemas do not say
            reads = not argument.name.startswith("output")
            writes = not argument.name.startswith("input")
        for tensor in tree_leaves(value):
            found += [(tensor, False)] * reads + [(tensor, True)] * writes
    return [(*span, writes) for tensor, writes in found if (span := _span(tensor)) is not None]


def _span(value: Any) -> tuple[int, int] | None:
    """Returns where a tensor lies, and how many bytes from its first element to its last."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if not isinstance(value, Tensor) or not value.is_cuda or not value.numel():
        return None
    last = sum(
        (size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)
    )
    return value.data_ptr(), (last + 1) * value.element_size()
