"""Watching one eager step for issues, and tracing its operations.

A capture fails far from its cause: "operation not permitted when stream is capturing", from
whichever call came next. A watched step computes what it always computes, and each issue in it is
found where it is: with the module that was running and the user's line.

What the engine itself does on the host is no issue: it does otherwise under a capture.

Not found are:

* synchronisation inside a kernel's library, such as `ctc_loss` with lengths on the device;
* `torch.Event.synchronize` and `torch.Stream.synchronize`, which cannot be replaced (those of
`torch.cuda`
  can);
* regions under `torch.compile`, except for kernels they call by name; they stay compiled;
* on the CPU: copies between host and device, since there are none.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves

from shardgrad.graphs.preflight.closed_over import Place, tensors_closed_over
from shardgrad.graphs.preflight.issues import Issue
from shardgrad.graphs.preflight.op_issues import OpCall, OpIssue, op_issues, synchronizing_functions
from shardgrad.graphs.preflight.op_trace import Operand, StepTrace, TracedOp
from shardgrad.graphs.preflight.source_location import SourceLocation, current_location
from shardgrad.graphs.recomputation import draws_again
from shardgrad.graphs.torch_patches import Patch, Replacement

__all__ = ["watch"]

_T = TypeVar("_T")

_DRAWN_AGAIN = OpIssue(
    "random numbers drawn again",
    "a recomputed region draws random numbers, and a graph cannot save the state to draw the same "
    "ones again",
    "move the dropout out of the region that torch.utils.checkpoint recomputes",
)


def watch(
    call: Callable[[], _T],
    modules: Mapping[str, nn.Module],
    device: torch.device,
    *,
    persistent: Iterable[torch.Tensor] = (),
    generators: Sequence[torch.Generator] = (),
    function: Callable[..., Any] | None = None,
) -> tuple[_T, StepTrace]:
    """Runs a step; returns its result and its trace.

    The result is that of the unwatched step, bit for bit; it takes several times as long. Watch the
    second step of a program or a later one: the first initializes what later steps find.

    Args:
        call: the step; its exceptions pass through.
        modules: whose names issues have; names of inner modules are appended to the keys. A root
            whose key is "" has the name of its class.
        device: of the step. On the CPU every tensor is treated as if it were on an accelerator.
        persistent: memory apart from the modules' that stays from step to step, such as an
            optimizer's state and the step's inputs; their addresses are compared.
        generators: of random numbers, that a graph of this step registers in addition to the
            device's default ones.
        function: from which tensors are looked for that the step closes over; None for `call`.

    Streams: those of the step; nothing is added and nothing waits. Operations of autograd's threads
    are seen. Capture: for eager steps only; it costs host time and changes nothing that a graph
    would hold.
    """
    mode = _Watch(modules, device, persistent, generators, function or call)
    with _patched(device), mode:
        result = call()
    return result, StepTrace(tuple(mode.issues.values()), tuple(mode.ops))


class _Watch(TorchDispatchMode):
    """Sees every operation of the calling thread, and of autograd's threads while they work for it.

    Attributes:
        issues: by kind, module and location, so that one line is reported once.
        ops: every operation, in order.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        device: torch.device,
        persistent: Iterable[torch.Tensor],
        generators: Sequence[torch.Generator],
        function: Callable[..., Any],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.issues: dict[tuple[str, str, str], Issue] = {}
        self.ops: list[TracedOp] = []
        self._device = device
        defaults = getattr(torch.get_device_module(device), "default_generators", ())
        self._generators = {g._cdata for g in (torch.default_generator, *defaults, *generators)}
        self._modules = dict(_names_of_modules(modules))
        self._tensors = dict(_names_of_tensors(modules))
        # Not found by a scan of all objects, which would touch some that another thread is still
        # making.
        self._persistent: dict[int, tuple[StorageWeakRef, int]] = dict(
            _storages(modules, persistent)
        )
        self._closed_over: dict[int, tuple[Place, StorageWeakRef]] = {}
        for place, tensor in tensors_closed_over(function, modules):
            for plain in _plain([tensor]):
                if _address(plain) is not None:
                    storage = plain.untyped_storage()
                    self._closed_over.setdefault(storage._cdata, (place, StorageWeakRef(storage)))
        self._made_by_ops: set[int | None] = set()
        # Which module was running when a node of autograd was made, or when a parameter was used.
        self._made_in: dict[int, str] = {}
        self._used_in: dict[int, str] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled regions run compiled; under other modes torch skips them, and goes on
        to.
        """
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if hasattr(func, "_schema") and func.namespace != "profiler":
            self._trace(func, args, kwargs, result)
        return result

    def called(self, issue: OpIssue, args: tuple[Any, ...]) -> None:
        """Records a call of one of the functions that `_patched` wraps."""
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and (
            first.device.type != self._device.type or isinstance(first, FakeTensor)
        ):
            return
        location = self._location()
        if not location.is_engine:
            self._add(issue, location)

    def _trace(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        leaves = tree_leaves((args, kwargs))
        inputs, outputs = list(_plain(leaves)), list(_plain(tree_leaves(result)))
        if any(isinstance(t, FakeTensor) for t in (*inputs, *outputs)):
            return  # a compiler is tracing
        location = self._location()
        if torch._C._current_autograd_node() is None:
            # The first operation after a node was made is the node's forward.
            node = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
            self._made_in.setdefault(node, location.module)
            self._used_in.update(
                (id(p), location.module) for p in leaves if isinstance(p, nn.Parameter)
            )
        numbers = (*_numbers(func, args, kwargs), *self._host_scalars(func, inputs))
        given = {_storage_of(t) for t in inputs}
        self._made_by_ops.update({_storage_of(t) for t in outputs} - given)
        # What the engine decides on the host is in its guards, which choose the graph.
        if not location.is_engine:
            seen = set(map(id, inputs))
            operands = tuple(
                self._operand(t) for t in (*inputs, *(t for t in outputs if id(t) not in seen))
            )
            self.ops.append(TracedOp(str(func), numbers, operands, location.module, location.line))
            call = OpCall(func, args, kwargs, leaves, inputs, outputs)
            for issue in op_issues(call, self._device, self._generators):
                self._add(issue, location)
            if draws_again(func, args, kwargs):
                self._add(_DRAWN_AGAIN, location)

    def _add(self, issue: OpIssue, location: SourceLocation) -> None:
        key = issue.kind, location.module, location.line
        full = Issue(issue.kind, issue.what, location.module, location.line, issue.fix)
        self.issues.setdefault(key, full)

    # -- where

    def _location(self) -> SourceLocation:
        location = current_location(self._modules)
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return location
        line = location.line or f"backward of {node.name()}"
        return SourceLocation(line, location.module or self._module_of(node), location.is_engine)

    def _module_of(self, node: Any) -> str:
        """Returns the module whose gradient a node of autograd computes."""
        parameter = getattr(node, "variable", None)
        if parameter is not None:
            return self._used_in.get(id(parameter), "")
        return self._made_in.get(node._sequence_nr(), "")

    # -- what

    def _operand(self, tensor: torch.Tensor) -> Operand:
        address = _address(tensor)
        if address is not None:
            storage = tensor.untyped_storage()
            persistent = self._persistent.get(storage._cdata)
            if persistent is None:
                closed_over = self._closed_over.get(storage._cdata)
                return Operand(tuple(tensor.shape), tensor.dtype, closed_over=closed_over)
            # Memory that is allocated and freed during a step has other addresses in a graph
            # anyway.
            if storage.data_ptr() == persistent[1]:
                return Operand(
                    tuple(tensor.shape), tensor.dtype, address, self._tensors.get(address, "")
                )
        return Operand(tuple(tensor.shape), tensor.dtype)

    def _host_scalars(self, func: Any, inputs: Sequence[torch.Tensor]) -> Iterator[tuple[str, Any]]:
        """Yields scalars in host memory, which a kernel gets by value like Python numbers."""
        is_literal = func is torch.ops.aten.lift_fresh.default
        if not (is_literal or any(t.device.type != "cpu" for t in inputs)):
            return
        for t in inputs:
            is_scalar = t.device.type == "cpu" and t.ndim == 0
            # Scalars that one operation passes to another, such as seeds, do not come from the
            # program.
            if is_scalar and (is_literal or _storage_of(t) not in self._made_by_ops):
                yield "a number in a CPU tensor", t.item()


# -- names and memory


def _names_of_modules(modules: Mapping[str, nn.Module]) -> Iterator[tuple[int, str]]:
    for key, root in modules.items():
        for name, module in root.named_modules():
            yield id(module), ".".join(filter(None, (key, name))) or type(module).__name__


def _names_of_tensors(modules: Mapping[str, nn.Module]) -> Iterator[tuple[int, str]]:
    """Yields (address, name) of parameters, gradients and buffers."""
    for key, root in modules.items():
        prefix = f"{key}." if key else ""
        for name, parameter in root.named_parameters():
            yield from _named(parameter, f"parameter {prefix}{name}")
            if parameter.grad is not None:
                yield from _named(parameter.grad, f"gradient of {prefix}{name}")
        for name, buffer in root.named_buffers():
            yield from _named(buffer, f"buffer {prefix}{name}")


def _named(tensor: torch.Tensor, name: str) -> Iterator[tuple[int, str]]:
    for plain in _plain([tensor]):
        address = _address(plain)
        if address is not None:
            yield address, name


def _storages(
    modules: Mapping[str, nn.Module], persistent: Iterable[torch.Tensor]
) -> Iterator[tuple[int, tuple[StorageWeakRef, int]]]:
    """Yields the storages of tensors that stay from step to step: (identity, (reference, address)).

    The references keep identities from being reused; the memory itself may be freed.
    """
    in_modules = [
        tensor for root in modules.values() for tensor in (*root.parameters(), *root.buffers())
    ]
    gradients = [tensor.grad for tensor in in_modules if tensor.is_leaf and tensor.grad is not None]
    for tensor in _plain([*in_modules, *gradients, *persistent]):
        if _address(tensor) is not None:
            storage = tensor.untyped_storage()
            yield storage._cdata, (StorageWeakRef(storage), storage.data_ptr())


def _storage_of(tensor: torch.Tensor) -> int | None:
    """Returns the identity of a tensor's storage; None if it has no memory."""
    return None if _address(tensor) is None else tensor.untyped_storage()._cdata


def _address(tensor: Any) -> int | None:
    """Returns the address of a tensor's first element; None if it has no memory."""
    if isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor):
        return None
    with (
        torch._C.DisableTorchFunctionSubclass(),
        contextlib.suppress(RuntimeError, NotImplementedError),
    ):
        return tensor.data_ptr() or None if tensor.layout is torch.strided else None
    return None


def _plain(leaves: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors among leaves; of wrapper subclasses, the inner ones."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            wraps = is_traceable_wrapper_subclass(leaf)
            yield from _plain(_inner(leaf)) if wraps else (leaf,)


def _inner(wrapper: Any) -> Sequence[Any]:
    return [getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]]


def _numbers(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yields the Python numbers among an operation's arguments, with the arguments' names."""
    names = (argument.name for argument in func._schema.arguments)
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        numbers = [
            leaf for leaf in tree_leaves(value) if isinstance(leaf, bool | int | float | complex)
        ]
        if numbers:
            yield name, numbers if isinstance(value, list | tuple) else value


# -- functions that no operation reports

_patch = Patch()


def _patched(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Replaces functions while a step is watched; they report to the watches of the calling
    thread.
    """

    def replacements() -> Iterator[Replacement]:
        for owner, name, issue in synchronizing_functions(device):
            yield owner, name, functools.partial(_reporting, issue)

    return _patch.active(replacements)


def _reporting(issue: OpIssue, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, _Watch):
                mode.called(issue, args)
        return function(*args, **kwargs)

    return reporting
