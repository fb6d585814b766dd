"""Fake tensors, which have shapes and no memory, in a fake process group, which has ranks and no
processes.

[Note: What is real in a fake world]
Tensors that the engine makes from constants, such as `torch.tensor([...])`, and results computed
from such tensors alone, are real. Its tables are of this kind, and it reads them for its checks.
Other tensors are fake: shapes without values. Reading a fake value while the model is built, or in
forward, raises an error, since the model would branch on it. In the engine's backward and in the
optimizer it returns 0, which means: no other rank touched a parameter that this rank did not touch,
and every parameter has changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from shardgrad.graphs.reads import groups_among
from shardgrad.programs.plan.recording import Kernel, Recorder, Transfer
from shardgrad.programs.train.failure import TrainingError

_aten, _prim = torch.ops.aten, torch.ops.prim
# These allocate memory without launching a kernel.
_NO_KERNEL = {
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "set_",
    "wait_tensor",
}
# These read as many bytes of their first operand as they return.
_LOOK_UPS = {"embedding", "index_select", "gather", "index", "nll_loss_forward"}
# The first operand of these is not read.
_UNREAD = {*_LOOK_UPS, "copy_", "zero_", "fill_"}
# These return nothing, and read and write the arguments at these positions. The engine's other
# operators return nothing either, but do not read what they write.
_UPDATES = {"adam_": (0, 2, 3, 4)}
# Collectives of c10d, and the functional ones, which tensor parallelism uses.
_KINDS = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "exchange",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_to_all_single": "exchange",
}
_HALVES = {torch.bfloat16, torch.float16}


@contextmanager
def fake_world(shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """Makes this process rank 0 of a fake process group inside the context.

    Args:
        shape: shape of the mesh, (shards,) or (replicas, shards).

    Raises:
        TrainingError: a default process group exists already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise TrainingError(
            "A plan needs its own process: this one has already joined a process group."
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(shape))
    try:
        names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_tensors(recorder: Recorder) -> Iterator[None]:
    """Makes every new tensor fake, and records the operations on it."""
    with ExitStack() as stack:
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Observer(recorder, mode))
        stack.enter_context(_watched_resizes(recorder))
        yield


@contextmanager
def _watched_resizes(recorder: Recorder) -> Iterator[None]:
    """Records resizes of storages, which are not operators and so not visible to a dispatch
    mode.
    """
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        original(storage, size)
        recorder.memory.resized(storage, stream=recorder.stream, phase=recorder.phase)
        return storage

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


class _Observer(TorchDispatchMode):
    """Records every operator. See [Note: What is real in a fake world]."""

    def __init__(self, recorder: Recorder, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder, self._mode = recorder, mode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the check would take most of the time

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, recorder = kwargs or {}, self._recorder
        if func is _prim.device.default:  # half of all calls
            return args[0].device if isinstance(args[0], FakeTensor) else func(*args)
        if DTensor in types:
            return NotImplemented  # DTensor dispatches again, with the local tensor
        if _is_view(func) and isinstance(args[0], FakeTensor):
            return _view(func, args, kwargs, args[0])
        inputs = list(_tensors((*args, *kwargs.values()) if kwargs else args))
        is_real = not any(isinstance(tensor, FakeTensor) for tensor in inputs)
        if inputs and is_real and recorder.phase != "model":
            if func is _aten.lift_fresh.default:
                return args[0]
            with no_dispatch():
                return func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default:
            return self._answer()
        if func.namespace == "c10d":
            self._transfer(func, args)
            with in_kernel_invocation_manager(self._mode):
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
            if isinstance(tensor, FakeTensor):
                recorder.memory.saw(
                    tensor.untyped_storage(), stream=recorder.stream, phase=recorder.phase
                )
        if func.namespace == "_c10d_functional":
            self._transfer(func, (*args, result))
        elif func._overloadpacket.__name__ not in _NO_KERNEL:
            recorder.events.append(self._kernel(func, args, kwargs, inputs, result))
        return result

    def _answer(self) -> int:
        if self._recorder.phase in ("model", "forward"):
            raise TrainingError(
                "The model reads a tensor's value (.item(), nonzero, a mask as an "
                "index), but a plan has no values: plan a variant that does not depend on "
                "values, for example with a fixed capacity per expert."
            )
        return 0

    def _kernel(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
        result: Any,
    ) -> Kernel:
        recorder, name = self._recorder, func._overloadpacket.__name__
        updated = (args[i] for i in _UPDATES[name]) if name in _UPDATES else (result,)
        written = sum(map(_nbytes, _tensors(updated)))
        nbytes = sum(map(_nbytes, inputs[1:] if name in _UNREAD else inputs)) + written
        if name in _LOOK_UPS:
            nbytes += written
        flops, palm_flops = _flops(func, args, kwargs, result)
        is_engine = func.namespace == "shardgrad" or recorder.stream != "compute"
        return Kernel(
            recorder.stream,
            recorder.phase,
            not is_engine and recorder.phase != "optimizer",
            flops,
            palm_flops,
            "bf16" if inputs and inputs[0].dtype in _HALVES else "fp32",
            nbytes,
        )

    def _transfer(self, func: OpOverload, args: tuple[Any, ...]) -> None:
        recorder = self._recorder
        kind = _KINDS.get(func._overloadpacket.__name__)
        if kind is None:
            return
        group = next(groups_among(args))
        # The size of the larger one of input and output, which is the unsharded message.
        nbytes = max(sum(map(_nbytes, _tensors((arg,)))) for arg in args)
        axis = recorder.axes.get(group.group_name, "both")  # of HFSDP's, or one that the model made
        recorder.events.append(Transfer(recorder.stream, kind, axis, group.size(), nbytes))


def _tensors(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from _tensors(arg)


def _nbytes(tensor: torch.Tensor) -> int:
    """Returns the number of bytes of a tensor; elements repeated by `expand` count once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride or size == 0:
            numel *= size
    return numel * tensor.itemsize


def _view(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], base: FakeTensor) -> Any:
    """Returns a view of a fake tensor, faster than FakeTensorMode does."""
    with in_kernel_invocation_manager(base.fake_mode):
        views = func(*args, **kwargs)
    if isinstance(views, torch.Tensor):
        return FakeTensor(base.fake_mode, views, base.fake_device)
    return [FakeTensor(base.fake_mode, view, base.fake_device) for view in views]


@cache
def _is_view(func: OpOverload) -> bool:
    """Returns whether an operator only returns views of its input."""
    if func is _aten._unsafe_view.default:  # a view, although its schema does not say so
        return True
    returns = func._schema.returns
    views = [each.alias_info is not None and not each.alias_info.is_write for each in returns]
    return bool(views) and all(views)


def _flops(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[float, float]:
    """Returns the number of multiplications and additions, and the number if attention were not
    causal.
    """
    name = func._overloadpacket.__name__
    if name.startswith("_scaled_dot_product"):
        is_backward = name.endswith("_backward")
        query, key, value = args[1:4] if is_backward else args[:3]
        full = float(
            sdpa_flop_count(query.shape, _with_heads_of(key, query), _with_heads_of(value, query))
        )
        # Backward has five products where forward has two (it recomputes the scores), as in
        # FlashAttention-2.
        full *= 2.5 if is_backward else 1.0
        names = (argument.name for argument in func._schema.arguments)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return full * (0.5 if given.get("is_causal") else 1.0), full
    count: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
    flops = 0.0 if count is None else float(count(*args, **kwargs, out_val=result))
    return flops, flops


def _with_heads_of(key: torch.Tensor, query: torch.Tensor) -> torch.Size:
    """Returns the shape of keys or values repeated for every query head."""
    return torch.Size((*query.shape[:2], *key.shape[2:]))
