"""Watching one eager step for what would keep it from being a graph.

A capture fails far from its cause: "operation not permitted when stream is capturing", from whichever call
came next. A watched step is a step like any other, with the same numbers, and every obstacle in it is found
where it is: with the module that was running and the user's line.

What the engine itself does on the host is no obstacle: under a capture it does otherwise.

What is not seen:

* what one kernel does inside: a library that waits for the device, `ctc_loss` with lengths on the device;
* `torch.Event.synchronize` and `torch.Stream.synchronize`, which are not Python's to look at (those of
  `torch.cuda` are seen);
* regions under `torch.compile`, but for the kernels they call by name; they stay compiled;
* on the CPU: copies between host and device, since there are none.
"""

from __future__ import annotations

import contextlib
import functools
import threading
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

from shardgrad.engine.pending_scale import ScaledGradient
from shardgrad.graphs.findings import Call, Finding, findings, functions
from shardgrad.graphs.obstacles import Obstacle
from shardgrad.graphs.places import Place, here
from shardgrad.graphs.recomputation import draws_again
from shardgrad.graphs.recording import Issued, Operand, Recording, differences

__all__ = ["Issued", "Operand", "Recording", "differences", "watch"]

_T = TypeVar("_T")

_DRAWN_AGAIN = (
    "random numbers drawn again",
    "a recomputed region draws random numbers, and a graph cannot save the state to draw the same ones again",
    "move the dropout out of the region that torch.utils.checkpoint recomputes",
)


def watch(
    call: Callable[[], _T],
    modules: Mapping[str, nn.Module],
    device: torch.device,
    *,
    persistent: Iterable[torch.Tensor] = (),
    generators: Sequence[torch.Generator] = (),
) -> tuple[_T, Recording]:
    """Runs a step and returns its result, and everything it issued with every obstacle in it.

    The step computes what it would compute unwatched, bit for bit; it takes several times as long. The step
    after the first is the one to watch: in the first, things are made that later are there.

    Args:
        call: the step; whatever it raises passes through.
        modules: whose names obstacles have; names of inner modules are appended to the keys. A root whose
            key is "" goes by the name of its class.
        device: where the step computes. On the CPU every tensor is taken for one that would be on a device.
        persistent: memory besides the modules' that stays from step to step, such as an optimizer's state and
            the step's inputs; their addresses are noted.
        generators: of random numbers, that a graph of this step will know besides the device's own.

    Streams: as the step's own; nothing is added and nothing waits. Operations of autograd's threads are seen.
    Capture: for eager steps only; it costs host time and changes nothing that a graph would hold.
    """
    mode = _Watch(modules, device, persistent, generators)
    with _patched(device), mode:
        result = call()
    return result, Recording(tuple(mode.obstacles.values()), tuple(mode.issued))


class _Watch(TorchDispatchMode):
    """Sees every operation of the calling thread, and of autograd's threads while they work for it.

    Attributes:
        obstacles: by kind, module and place, so that one line is reported once.
        issued: in order.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        device: torch.device,
        persistent: Iterable[torch.Tensor],
        generators: Sequence[torch.Generator],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.obstacles: dict[tuple[str, str, str], Obstacle] = {}
        self.issued: list[Issued] = []
        self._device = device
        own = getattr(torch.get_device_module(device), "default_generators", ())
        self._generators = {g._cdata for g in (torch.default_generator, *own, *generators)}
        self._modules = dict(_names_of_modules(modules))
        self._tensors = dict(_names_of_tensors(modules))
        # Not found by a scan of all objects: one that another thread is still making would be broken by it.
        self._kept: dict[int, tuple[StorageWeakRef, int]] = dict(_storages(modules, persistent))
        self._made: set[int | None] = set()
        # Which module was running when a node of autograd was made, or when a parameter was used.
        self._made_in: dict[int, str] = {}
        self._used_in: dict[int, str] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled regions run compiled; under other modes torch skips them, and goes on to."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if hasattr(func, "_schema") and func.namespace != "profiler":
            self._note(func, args, kwargs, result)
        return result

    def called(self, finding: Finding, args: tuple[Any, ...]) -> None:
        """Notes a call of one of the functions that `_patched` wraps."""
        of = args[0] if args else None
        if isinstance(of, torch.Tensor) and (
            of.device.type != self._device.type or isinstance(of, FakeTensor)
        ):
            return
        place = self._place()
        if not place.is_engine:
            self._add(finding, place)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        leaves = tree_leaves((args, kwargs))
        took, gave = list(_plain(leaves)), list(_plain(tree_leaves(result)))
        if any(isinstance(t, FakeTensor) for t in (*took, *gave)):
            return  # a compiler at work
        place = self._place()
        if torch._C._current_autograd_node() is None:
            # The first operation after a node was made is the node's own.
            self._made_in.setdefault(torch.autograd._get_sequence_nr() - 1, place.module)  # type: ignore[attr-defined]
            self._used_in.update((id(p), place.module) for p in leaves if isinstance(p, nn.Parameter))
        numbers = (*_numbers(func, args, kwargs), *self._frozen(func, took))
        given = {_storage_of(t) for t in took}
        self._made.update({_storage_of(t) for t in gave} - given)
        # The engine decides by facts of its own, which choose the graph.
        if not place.is_engine:
            seen = set(map(id, took))
            operands = tuple(self._operand(t) for t in (*took, *(t for t in gave if id(t) not in seen)))
            self.issued.append(Issued(str(func), numbers, operands, place.module, place.line))
            call = Call(func, args, kwargs, leaves, took, gave)
            for finding in findings(call, self._device, self._generators):
                self._add(finding, place)
            if draws_again(func, args, kwargs):
                self._add(_DRAWN_AGAIN, place)

    def _add(self, finding: Finding, place: Place) -> None:
        kind, what, fix = finding
        key = kind, place.module, place.line
        self.obstacles.setdefault(key, Obstacle(kind, what, place.module, place.line, fix))

    # -- where ------------------------------------------------------------------------------------------

    def _place(self) -> Place:
        place = here(self._modules)
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return place
        line = place.line or f"backward of {node.name()}"
        return Place(line, place.module or self._module_of(node), place.is_engine)

    def _module_of(self, node: Any) -> str:
        """Returns the module whose gradient a node of autograd computes."""
        parameter = getattr(node, "variable", None)
        if parameter is not None:
            return self._used_in.get(id(parameter), "")
        return self._made_in.get(node._sequence_nr(), "")

    # -- what -------------------------------------------------------------------------------------------

    def _operand(self, tensor: torch.Tensor) -> Operand:
        address = _address(tensor)
        if address is not None:
            storage = tensor.untyped_storage()
            _, began_at = self._kept.get(storage._cdata, (None, 0))
            # Memory that comes and goes during a step has other addresses in a graph anyway.
            if storage.data_ptr() == began_at:
                return Operand(tuple(tensor.shape), tensor.dtype, address, self._tensors.get(address, ""))
        return Operand(tuple(tensor.shape), tensor.dtype)

    def _frozen(self, func: Any, took: Sequence[torch.Tensor]) -> Iterator[tuple[str, Any]]:
        """Yields numbers in the host's memory that a kernel gets by value, as if they were Python's."""
        made_here = func is torch.ops.aten.lift_fresh.default
        if not (made_here or any(t.device.type != "cpu" for t in took)):
            return
        for t in took:
            is_number = t.device.type == "cpu" and t.ndim == 0
            # What operations hand to each other, such as seeds, is theirs.
            if is_number and (made_here or _storage_of(t) not in self._made):
                yield "a number in a CPU tensor", t.item()


# -- names and memory ---------------------------------------------------------------------------------------


def _names_of_modules(modules: Mapping[str, nn.Module]) -> Iterator[tuple[int, str]]:
    for key, root in modules.items():
        for name, module in root.named_modules():
            yield id(module), ".".join(filter(None, (key, name))) or type(module).__name__


def _names_of_tensors(modules: Mapping[str, nn.Module]) -> Iterator[tuple[int, str]]:
    """Yields what lies at which address now."""
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
    """Yields the memory of tensors that stay, with its address.

    The references keep its numbers from being given to somebody else; the memory itself may go.
    """
    own = [tensor for root in modules.values() for tensor in (*root.parameters(), *root.buffers())]
    gradients = [tensor.grad for tensor in own if tensor.is_leaf and tensor.grad is not None]
    for tensor in _plain([*own, *gradients, *persistent]):
        if _address(tensor) is not None:
            storage = tensor.untyped_storage()
            yield storage._cdata, (StorageWeakRef(storage), storage.data_ptr())


def _storage_of(tensor: torch.Tensor) -> int | None:
    """Returns what identifies a tensor's memory; None if it has none of its own."""
    return None if _address(tensor) is None else tensor.untyped_storage()._cdata


def _address(tensor: Any) -> int | None:
    """Returns where a tensor's elements are; None if it has no memory of its own."""
    if isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor):
        return None
    with torch._C.DisableTorchFunctionSubclass(), contextlib.suppress(RuntimeError, NotImplementedError):
        return tensor.data_ptr() or None if tensor.layout is torch.strided else None
    return None


def _plain(leaves: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors among leaves; of those that wrap others, the inner ones."""
    for leaf in leaves:
        if isinstance(leaf, ScaledGradient):
            yield leaf.unpaid()  # to look is not to ask for the values
        elif isinstance(leaf, torch.Tensor):
            wraps = is_traceable_wrapper_subclass(leaf)
            yield from _plain(_inner(leaf)) if wraps else (leaf,)


def _inner(wrapper: Any) -> Sequence[Any]:
    return [getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]]


def _numbers(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the Python numbers among an operation's arguments, with the arguments' names."""
    names = (argument.name for argument in func._schema.arguments)
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        numbers = [leaf for leaf in tree_leaves(value) if isinstance(leaf, bool | int | float | complex)]
        if numbers:
            yield name, numbers if isinstance(value, list | tuple) else value


# -- functions that no operation tells of -------------------------------------------------------------------


def _wrapped(function: Callable[..., Any], finding: Finding) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, _Watch):
                mode.called(finding, args)
        return function(*args, **kwargs)

    return wrapper


_lock = threading.Lock()
_undo: list[Callable[[], None]] = []
_watching = 0


@contextlib.contextmanager
def _patched(device: torch.device) -> Iterator[None]:
    """Wraps functions while somebody watches. They tell whoever watches the thread that calls them."""
    global _watching
    with _lock:
        if not _watching:
            for owner, name, finding in functions(device):
                _undo.append(_replace(owner, name, _wrapped(getattr(owner, name), finding)))
        _watching += 1
    try:
        yield
    finally:
        with _lock:
            _watching -= 1
            while not _watching and _undo:
                _undo.pop()()


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Assigns, and returns what takes it back."""
    is_inherited = name not in vars(owner)
    original = getattr(owner, name)
    try:
        setattr(owner, name, function)
    except TypeError:  # a class written in C
        return lambda: None
    return lambda: delattr(owner, name) if is_inherited else setattr(owner, name, original)
