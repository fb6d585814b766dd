"""What a step's function closes over: tensors and numbers that it reaches without arguments.

A graph reads such a tensor where it was at the capture. If the program puts another one in its
place, such as the next batch in a global variable, an eager step reads the new one and a replay the
old one, and nothing raises. So a capture notes which of these tensors its operations read, and the
graph is replayed only while they lie where they lay.

Followed from a function of the program are its closure, its default values and the globals that it
names, and from these the attributes of objects and modules, and of their classes, the elements of
lists, tuples and dictionaries, hooks of modules, and other functions of the program, such as
methods. So are objects among the step's arguments. Not followed are optimizers, what an iterator
has yet to give, objects of torch but for modules, and parameters and buffers of modules that the
step was given.

A tensor of the host reaches the device as a number, so its value is as much a part of the graph as
where it lies, wherever the program keeps it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter, itemgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from shardgrad.engine.param import fsdp_param_of
from shardgrad.engine.streams import Stream, is_capturing
from shardgrad.errors import CaptureError
from shardgrad.graphs.outputs import host_value, local_tensor
from shardgrad.graphs.program_line import is_of_the_program

__all__ = ["Place", "Reads", "closed_over"]

_MOST_PARTS = 1_000  # of one object
_MOST_OBJECTS = 20_000
_NUMBERS = (bool, int, float, complex, str)
_LEAVES = (bytes, torch.dtype, torch.device, type(None), Optimizer)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_CDATA = attrgetter("_cdata")  # what several objects of Python may stand for
_EXPIRED: Any = torch.UntypedStorage._expired
_CODE = (FunctionType, staticmethod, classmethod, property, functools.cached_property)

_Way = tuple[Callable[[Any], Any], ...]  # each step gives a part of what the one before gave

# What a way raises that leads nowhere any more.
_GONE = (AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, eq=False)
class Place:
    """A variable, an attribute or an element, in which a function finds a tensor, or a list or
    dictionary of given parameters, as for clipping. Several may have one name, as globals of two
    modules.

    Attributes:
        name: as the program writes it, such as "batch['targets']" or "self.mask".
        root: where the way begins: the function, or a module, which stays.
        way: from there.
    """

    name: str
    root: Any
    way: _Way = ()

    def found(self) -> Any:
        """Returns what is there now; None if no way leads there any more."""
        try:
            return _end_of(self.way, self.root)
        except _GONE:
            return None

    def key(self) -> Hashable:
        """Returns what has to be as it was for a replay to read what is there now."""
        found = self.found()
        return _address(found), _value(found)


def _address(found: Any) -> Hashable:
    """Returns where a tensor lies, and how; which ones a list has; None of anything else."""
    if isinstance(found, list | tuple | dict):
        return tuple(map(id, _elements(found)))
    if not isinstance(found, torch.Tensor):
        return None
    local = local_tensor(found)
    return local.data_ptr(), local.shape, local.stride(), local.dtype


def _value(found: Any) -> bytes:
    """Returns what a graph has frozen of a tensor; see `host_value`."""
    return host_value(found) if isinstance(found, torch.Tensor) else b""


class Reads(TorchDispatchMode):
    """Notes what operations inside the block read and write without being given it.

    Args:
        function: of the step.
        modules: that the step was given.
        objects: among the arguments of the step.
        stream: on which the block runs.
        state: memory of the step's participants, who know themselves when it is another.
        generators: that the step was given.

    Attributes:
        places: of tensors that the function closes over and operations read, with `Place.key` at
            the beginning of the block.
        numbers: what the function closes over besides tensors, by the names of their places.
        groups: process groups in which operations of the block move tensors of a device.

    Raises:
        CaptureError: in the block, at an operation that uses a sharded module that is not among
            `modules`, or another generator, or that writes on a stream that is not captured.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Sequence[nn.Module],
        objects: Iterable[Any] = (),
        stream: Stream = None,
        state: Iterable[torch.Tensor] = (),
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream
        self.places: dict[Place, Hashable] = {}
        self.numbers: dict[str, Any] = {}
        self.groups: set[dist.ProcessGroup] = set()
        # Sharded modules that were not given, by the addresses of their parameters.
        self._others: dict[int, str] = {}
        self._made: set[int] = set()  # storages of the block's own
        self._state = set(map(_identity, map(local_tensor, state)))
        self._generators = generators
        # By storages, memory that was there before the block, while the program keeps it; what that
        # is on a device, and its address; and of what was written in the block, the names of
        # places.
        self._memory: dict[int, StorageWeakRef] = {}
        self._on_device: dict[int, tuple[str, int]] = {}
        self._written: dict[int, str] = {}
        # By storages; with addresses of the beginning, since the block may replace what is there.
        self._candidates: dict[int, list[tuple[Place, Hashable]]] = {}
        registered = (chain(each.parameters(), each.buffers()) for each in modules)
        given = frozenset(map(id, chain.from_iterable(registered)))
        for place, value in closed_over(function, [*modules, *objects], given):
            if isinstance(value, nn.Module):
                for param in value.parameters():
                    if id(param) not in given and fsdp_param_of(param) is not None:
                        self._others.setdefault(local_tensor(param).data_ptr(), place.name)
            elif isinstance(value, torch.Tensor | list | tuple | dict):
                found = place, _address(value)
                for tensor in _plain(_elements(value)):
                    self._candidates.setdefault(_identity(tensor), []).append(found)
            else:
                self.numbers.setdefault(place.name, value)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keeps compiled regions compiled; torch runs them eagerly under other modes."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = list(_plain(leaves))
        written = set(map(id, _written(func, args, kwargs)))
        is_captured = self._stream is not None and is_capturing(self._stream.device)
        runs_on_host = is_captured and all(map(_is_of_host, tensors))
        if "c10d" in func.namespace:
            self.groups.update(_groups(leaves))
        if is_captured:
            self._require_given(leaves)
        for tensor in tensors:
            identity = _identity(tensor)
            if self._others and identity and (name := self._others.get(tensor.data_ptr())):
                _refuse_not_given(name)
            if identity in self._made:
                continue
            found = self._candidates.get(identity, [])
            if _is_of_host(tensor) and self._stream is not None:
                if not is_captured:  # the host does it at each replay again
                    continue
                if runs_on_host and id(tensor) in written:
                    _refuse_write_on_host(found[0][0].name if found else "a tensor")
                if not found and (runs_on_host or tensor.ndim == 0):
                    place = Place("a tensor of the host", tensor)
                    found = self._candidates[identity] = [(place, _address(tensor))]
            for place, address in found:
                if place not in self.places:
                    self.places[place] = address, _value(place.found())
            is_on_device = tensor.device.type not in ("cpu", "meta")
            name = found[0][0].name if found else ""
            # Storage that cannot be resized is a part of other memory, as a gradient's of its
            # shard. It does not tell whether that is still there, and what keeps it would be taken
            # for the program.
            if identity not in self._memory and identity and tensor.untyped_storage().resizable():
                memory = self._memory[identity] = StorageWeakRef(tensor.untyped_storage())
                if is_on_device and identity not in self._state:
                    what = f"a tensor of shape {tuple(tensor.shape)} that {func} reads"
                    address = tensor.untyped_storage().data_ptr()
                    self._on_device[memory.cdata] = name or what, address
            if id(tensor) in written:
                if is_on_device:
                    self._require_captured(tensor.device)
                self._written.setdefault(identity, name)
        result = func(*args, **kwargs)
        given = set(map(_identity, tensors))
        self._made.update({_identity(t) for t in _plain(tree_leaves(result))} - given)
        return result

    def _require_given(self, leaves: Iterable[Any]) -> None:
        """Refuses a generator that is not put back before each replay. Torch says so up to 2.14."""
        for leaf in leaves:
            if isinstance(leaf, torch.Generator) and leaf.device.type != "cpu":
                own = torch.get_device_module(leaf.device).default_generators
                if _CDATA(leaf) not in map(_CDATA, (*self._generators, *own)):
                    raise CaptureError(
                        "it draws from a torch.Generator that graphed_step was not given",
                        fix="graphed_step(..., generator)",
                    )

    def _require_captured(self, device: torch.device) -> None:
        """Refuses a write on a stream that is no part of the capture, which takes place during it.
        On the step's own, between two parts of a split graph, torch writes what a graph draws from.
        """
        stream = torch.accelerator.current_stream(device)
        if stream != self._stream and not is_capturing(device):
            raise CaptureError(
                "it writes on a stream that is not captured, which a replay would not",
                expected="streams that wait for the step's, and that it waits for",
                got=str(stream),
                fix="inside the step, side.wait_stream(torch.cuda.current_stream()) before that "
                "work, and torch.cuda.current_stream().wait_stream(side) after it",
            )

    def refuse_kept(self, buffers: Iterable[torch.Tensor]) -> None:
        """Refuses a graph of a step that keeps an argument and reads it in the next call, where
        `buffers` has the next argument.
        """
        memory = set(map(_identity, buffers))
        for place in self.places:
            if memory.intersection(map(_identity, _plain([place.found()]))):
                raise CaptureError(
                    f"it keeps an argument in {place.name}, and reads it in the next call",
                    expected="memory of the program's for what the next call reads",
                    got="the graph's input, which the next call writes over",
                    fix=f"{place.name}.copy_(...), or pass it as an argument",
                )

    def written(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the memory, as bytes, that was there before the block, was written in it, and is
        there now; with the name of its place, "" where the function closes over none.
        """
        for identity, name in self._written.items():
            if identity not in self._memory:
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(self._memory[identity].cdata)
            if storage is not None and storage.nbytes():
                empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
                yield name, empty.set_(storage, 0, (storage.nbytes(),), (1,))

    @property
    def is_gone(self) -> bool:
        """True if the program has let go of memory of a device that the block used and was not
        given, wherever it had it: what a replay would find there is something else.
        """
        return any(map(_EXPIRED, self._on_device))

    def gone(self) -> list[str]:
        """Returns what that memory was."""
        return [what for memory, (what, _) in self._on_device.items() if _EXPIRED(memory)]

    def leave_out(self, segments: Iterable[tuple[int, int]]) -> None:
        """Forgets memory between these addresses, which is the graph's: inductor allocates without
        an operation, so it was taken for the program's.
        """
        for begin, end in segments:
            self._on_device = {
                memory: (what, address)
                for memory, (what, address) in self._on_device.items()
                if not begin <= address < end
            }


def _refuse_write_on_host(name: str) -> NoReturn:
    raise CaptureError(
        f"it writes {name} on the host, which a replay would not",
        expected="writes to memory of the device",
        got="an operation of the host",
        where=name,
        fix="keep it on the device, or write it after the call, or in shardgrad.graphs.outside",
    )


def _refuse_not_given(name: str) -> NoReturn:
    raise CaptureError(
        f"it uses {name}, a sharded module that graphed_step was not given",
        expected="every sharded module that the step uses",
        got="one whose state a graph can neither guard nor put back",
        fix=f"graphed_step(..., {name})",
    )


def _groups(leaves: Sequence[Any]) -> Iterator[dist.ProcessGroup]:
    """Yields the process group among the arguments of a collective on a device."""
    if all(leaf.device.type == "cpu" for leaf in leaves if isinstance(leaf, torch.Tensor)):
        return
    named: dict[str, dist.ProcessGroup]
    named = {name: group for group, name in dist.distributed_c10d._world.pg_names.items()}
    for leaf in leaves:
        if isinstance(leaf, str) and leaf in named:  # of a functional collective
            yield named[leaf]
        elif isinstance(leaf, torch.ScriptObject):
            with suppress(RuntimeError):  # the operation of a sum
                yield dist.ProcessGroup.unbox(leaf)


def _elements(value: Any) -> Iterable[Any]:
    """Returns what a list, a tuple or a dictionary has; a tensor by itself."""
    if isinstance(value, dict):
        return value.values()
    return [value] if isinstance(value, torch.Tensor) else value


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yields what an operation writes; collectives do not declare it."""
    declared = func._schema.arguments
    given = dict(zip([each.name for each in declared], args, strict=False)) | kwargs
    for each in declared:
        is_write = each.alias_info is not None and each.alias_info.is_write
        if is_write or func.namespace == "c10d":
            yield from _plain(tree_leaves(given.get(each.name)))


def _is_of_host(tensor: torch.Tensor) -> bool:
    """Returns whether the device gets what it holds as numbers; it reads pinned memory."""
    return tensor.device.type == "cpu" and not tensor.is_pinned()


def _plain(leaves: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors among leaves; of wrapper subclasses, the inner ones."""
    for leaf in leaves:
        if is_traceable_wrapper_subclass(leaf):
            yield from _plain(getattr(leaf, name) for name in leaf.__tensor_flatten__()[0])
        elif isinstance(leaf, torch.Tensor):
            yield leaf


def _identity(tensor: torch.Tensor) -> int:
    """Returns the identity of a tensor's storage; 0 if it has none, as sparse tensors."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return 0


def closed_over(
    function: Callable[..., Any],
    objects: Iterable[Any],
    given: frozenset[int] = frozenset(),
) -> Iterator[tuple[Place, Any]]:
    """Yields tensors, modules, numbers, strings, and lists, tuples and dictionaries of none but
    given parameters, with their places, those with the shortest way first.
    A tensor may have several.

    Args:
        function: to begin with.
        objects: to begin with, such as modules.
        given: identities of the given parameters and buffers.

    Capture: safe. Nothing on the device is read.
    """
    # A function's variables have names of their own; the attributes of another callable object do
    # not.
    first = "" if isinstance(function, FunctionType | MethodType) else "self"
    roots = [(first, function), *((type(each).__name__, each) for each in objects)]
    waiting = deque((Place(name, root), root) for name, root in roots)
    seen: dict[int, Any] = {}  # a method is an object that lives no longer than it is held
    for _ in range(_MOST_OBJECTS):
        if not waiting:
            return
        place, value = waiting.popleft()
        if isinstance(value, _NUMBERS):
            yield place, value
            continue
        if id(value) in seen and not isinstance(value, torch.Tensor):
            continue
        seen[id(value)] = value
        is_leaf = isinstance(value, torch.Tensor) or (
            isinstance(value, list | tuple | dict) and given.issuperset(map(id, _elements(value)))
        )
        if is_leaf or isinstance(value, nn.Module):
            yield place, value
        if is_leaf:
            continue
        root, way = (value, ()) if isinstance(value, nn.Module) else (place.root, place.way)
        for name, on in islice(_parts(value, given), _MOST_PARTS):
            with suppress(*_GONE):  # such as a variable that is not assigned yet
                part = _end_of(on, value)
                if not isinstance(part, _LEAVES):
                    is_behind = name.startswith((".", "["))
                    full = place.name + name if is_behind else name or place.name
                    waiting.append((Place(full, root, (*way, *on)), part))


def _end_of(way: _Way, root: Any) -> Any:
    for part_of in way:
        root = part_of(root)
    return root


def _parts(value: Any, given: frozenset[int]) -> Iterator[tuple[str, _Way]]:
    """Yields parts: the name, or what to write behind the object's, and the way to it."""
    if isinstance(value, FunctionType):
        if is_of_the_program(value.__code__.co_filename):
            yield from _variables(value)
        yield from _attributes(("__defaults__", "__kwdefaults__", "__wrapped__"))
    elif isinstance(value, MethodType):
        yield "self", (attrgetter("__self__"),)
        yield "", (attrgetter("__func__"),)
    elif isinstance(value, functools.partial):
        yield from _attributes(("func", "args", "keywords"))
    elif isinstance(value, property):
        yield from _attributes(("fget",))
    elif isinstance(value, list | tuple | dict | deque):
        for key in list(value) if isinstance(value, dict) else range(len(value) - 1):
            name = repr(key) if isinstance(key, _NUMBERS) else type(key).__name__
            yield f"[{name}]", (itemgetter(key),)
        if not isinstance(value, dict) and value:  # another one, once something is appended
            yield f"[{len(value) - 1}]", (itemgetter(-1),)
    elif isinstance(value, type):
        yield from _attributes(_of_classes(value))
    elif isinstance(value, nn.Module):
        own = vars(value)
        yield from _attributes([name for name in own if name not in _OF_EVERY_MODULE])
        yield from _attributes([name for name in own if name.endswith("_hooks") and own[name]])
        tensors = (value._parameters | value._buffers).items()
        yield from _attributes([name for name, tensor in tensors if id(tensor) not in given])
        yield from _attributes(list(value._modules))
        yield from _of_its_class(value)
    elif not isinstance(value, ModuleType) and not _is_torchs_or_ours(type(value)):
        yield from _attributes(list(getattr(value, "__dict__", ())))
        yield from _of_its_class(value)


def _of_classes(kind: type) -> dict[str, Any]:
    """Returns what a class has from classes of the program: code, and values."""
    own = [vars(each) for each in reversed(kind.__mro__) if not _is_torchs_or_ours(each)]
    return {
        name: part
        for name, part in chain.from_iterable(map(dict.items, map(dict, own)))
        if isinstance(part, _CODE) or not name.startswith("__")
    }


def _of_its_class(value: Any) -> Iterator[tuple[str, _Way]]:
    """Yields what an object finds in its class: slots and values, as attributes of the object,
    which may have one of its own later; and the class, with its code.
    """
    defined = _of_classes(type(value)).items()
    yield from _attributes([name for name, part in defined if not isinstance(part, _CODE)])
    yield "", (attrgetter("__class__"),)


def _attributes(names: Iterable[str]) -> Iterator[tuple[str, _Way]]:
    return ((f".{name}", (attrgetter(name),)) for name in names)


def _variables(function: FunctionType) -> Iterator[tuple[str, _Way]]:
    cells, variables = attrgetter("__closure__"), attrgetter("__globals__")
    for index, name in enumerate(function.__code__.co_freevars):
        yield name, (cells, itemgetter(index), attrgetter("cell_contents"))
    names = set(_names(function.__code__))
    for name in names & function.__globals__.keys():
        part = function.__globals__[name]
        if not isinstance(part, ModuleType):
            yield name, (variables, itemgetter(name))
        elif is_of_the_program(getattr(part, "__file__", None) or ""):
            for inner in names & vars(part).keys():
                yield f"{name}.{inner}", (variables, itemgetter(name), attrgetter(inner))


def _names(code: CodeType) -> Iterator[str]:
    """Yields the names of globals and attributes in a function, and in those that are defined
    inside.
    """
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_torchs_or_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "shardgrad")
