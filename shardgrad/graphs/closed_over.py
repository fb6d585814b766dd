"""Finds the tensors, functions and constants that a step's function closes over: those it reaches
without arguments.

A graph reads such a tensor at the address it had at the capture. If the program assigns another
tensor, such as the next batch to a global variable, an eager step reads the new one but a replay
reads the old one without an error. So a capture records which of these tensors its operations read
(`reads.py`), and the graph is replayed only while their addresses are unchanged.

A constant, such as the weight of a loss, or a function decides in Python what is launched, and no
operation shows that it was read. What the step's code names (`named_by_code`) may have been read,
so the graph is replayed only while that is unchanged.

The search starts from the program's function and the objects among the step's arguments. It follows
a function's closure, default values and the globals that it names; attributes of objects and
modules and of their classes; elements of lists, tuples and dictionaries; module hooks; and other
functions of the program, such as methods. It does not follow optimizers, iterators, and objects of
torch other than modules and schedulers.
"""

from __future__ import annotations

import functools
import reprlib
from collections import ChainMap, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from operator import attrgetter, delitem, getitem, is_, setitem
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardgrad.graphs.outputs import host_value, plain_tensors
from shardgrad.graphs.program_line import is_of_the_program

_MOST_PARTS = 1_000  # limit of attributes or elements followed in one object
_MOST_WAYS = 4  # limit of ways on which the parts of one object are followed
_MOST_OBJECTS = 20_000  # limit of objects visited in one search
NUMBERS = (bool, int, float, complex, str)
_CONSTANTS = (*NUMBERS, NoneType, Enum, torch.dtype)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_CODE = (FunctionType, staticmethod, classmethod, property, functools.cached_property)
# What code may reach without naming it: `self`, what a function is called with by default, and what
# calls, operators and loops run.
_NAMED = {"self", "args", "keywords", "__defaults__", "__kwdefaults__", "forward", "__call__"}
_NAMED |= {"__wrapped__", "__getitem__", "__iter__", "__enter__"}

# What a graph freezes of a plain tensor that it reads.
ADDRESS: tuple[Callable[[torch.Tensor], Hashable], ...] = (
    torch.Tensor.data_ptr,
    torch.Tensor.size,
    torch.Tensor.stride,
    attrgetter("dtype"),
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
)

# From one object to the next: (getattr, name), (getitem, key), or (tensors_in, id).
_Way = tuple[tuple[Callable[[Any, Any], Any], Any], ...]

GONE = object()  # the value of a place that does not exist
# The exceptions of a way whose attribute or element no longer exists.
_GONE = (AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, eq=False)
class Place:
    """A variable, attribute or element that holds a tensor. Two places may have the same name, for
    example globals of two Python modules.

    Attributes:
        name: as the program writes it, such as "batch['targets']" or "self.mask".
        root: the object at which the way starts: the function, a module, or an argument.
        way: the attributes, keys and indices that lead from the root to the value.
        names: the variables and attributes on the way, which code that goes it names.
    """

    name: str
    root: Any
    way: _Way = ()
    names: tuple[str, ...] = ()

    @property
    def where(self) -> Hashable:
        """Equal for the same place in another search."""
        return id(self.root), self.way

    def found(self) -> Any:
        """Returns the value that is there now; `GONE` if the place no longer exists."""
        value = self.root
        with suppress(*_GONE):
            for get, name in self.way:
                value = get(value, name)
            return value
        return GONE

    def holder(self) -> Place:
        """Returns the place to assign to: this one or, in a tuple or a frozen object, that of the
        whole.
        """
        if self.put(self.found()) or len(self.way) == 1:
            return self
        return self.owner().holder()

    def owner(self) -> Place:
        """Returns the place of the object that has this attribute, key or index."""
        return Place(self.name, self.root, self.way[:-1])

    def put(self, value: Any) -> bool:
        """Assigns a value to this attribute, key or index, or removes it, for the value `GONE`.
        Returns whether it could.
        """
        get, name = self.way[-1]
        owner = self.owner().found()
        with suppress(*_GONE):
            if value is GONE:
                (delattr if get is getattr else delitem)(owner, name)
            else:
                (setattr if get is getattr else setitem)(owner, name, value)
            return True
        return False

    def assignment(self) -> tuple[Place, Any]:
        """Returns the place to assign to, and the value with which this place is as it is now."""
        value, owner = self.found(), self.owner()
        if value is GONE:
            return owner.assignment() if owner.way and owner.found() is None else (self, GONE)
        holder = self.holder()
        return holder, holder.found()

    def key(self) -> Hashable:
        """Returns the address and host value of the tensor there. A replay reads that tensor only
        if the key equals the one of the capture.
        """
        found = self.found()
        return address_of(found), host_value(found)


def address_of(found: Any) -> Hashable:
    """Returns what a graph freezes of a tensor: what `ADDRESS` reads; () for anything else."""
    return tuple(read(each) for each in plain_tensors([found]) for read in ADDRESS)


def closed_over(
    function: Callable[..., Any],
    objects: Iterable[Any],
) -> Iterator[tuple[Place, Any]]:
    """Yields (place, value) for the tensors and functions that are reachable, for numbers and other
    constants, for the lengths of lists and dictionaries, and for the number of tensors in each
    list. The search is breadth-first, so places with the shortest way come first. A tensor may have
    several places: an object that is found again may be replaced there alone, so its parts are
    followed again.

    Args:
        function: where the search starts.
        objects: where else it starts, such as modules.

    Capture: safe. Nothing on the device is read.
    """
    # Variables of a function are named as they are; attributes of another callable start with
    # "self".
    of_objects = (Place(type(each).__name__, each) for each in objects)
    waiting = deque([Place("self", function), *of_objects])
    # Holds the objects, since bound methods are temporary, and ids are reused.
    seen = defaultdict[int, list[Any]](list)
    for _ in range(_MOST_OBJECTS):
        if not waiting:
            return
        place = waiting.popleft()
        value = place.found()
        is_leaf = isinstance(value, (torch.Tensor, *_CONSTANTS))
        if is_leaf or isinstance(value, FunctionType | BuiltinFunctionType):
            yield place, value
        if is_leaf:
            continue
        if len(seen[id(value)]) < _MOST_WAYS and not isinstance(value, bytes | Optimizer):
            seen[id(value)].append(value)
            for name, on in islice(_parts(value), _MOST_PARTS):
                full = place.name + name if name.startswith((".", "[")) else name or place.name
                # A module may call its submodules without their names, as nn.Sequential does.
                is_submodule = isinstance(value, nn.Module) and name[1:] in value._modules
                is_unnamed = is_submodule or name[:1] in ("", "[")
                names = () if is_unnamed else name.rpartition(".")[2:]
                waiting.append(Place(full, place.root, (*place.way, *on), (*place.names, *names)))


def tensors_in(values: Sequence[Any], identity: int) -> int:
    """Returns the number of tensors in the list with this identity; raises for another list."""
    if id(values) != identity:
        raise LookupError
    return sum(isinstance(each, torch.Tensor) for each in values)


def length(values: Any, _: None) -> int:
    """Returns the number of elements of a list or a dictionary."""
    return len(values)


def named_by_code(found: Iterable[tuple[Place, Any]]) -> list[tuple[Place, Any]]:
    """Returns the functions and constants among what `closed_over` has found that code of the step
    names. Its code is that of the functions of the program which it names in turn. The floats of
    torch's layers, such as `p` of a dropout, are among them: torch's code names those.
    """
    found = list(found)
    code = [(place.names, f.__code__) for place, f in found if isinstance(f, FunctionType)]
    named, known = _NAMED, 0
    while len(named) > known:
        known = len(named)
        runs = [each for names, each in code if named.issuperset(names)]
        runs = [each for each in runs if is_of_the_program(each.co_filename)]
        named = named.union(*map(_names, runs), *[each.co_freevars for each in runs])
    return [
        (place, value)
        for place, value in found
        if place.names and not isinstance(value, torch.Tensor)
        if getattr(value, "__name__", None) not in place.names  # else it is a definition
        if named.issuperset(place.names) or _is_of_torchs_layer(place, value)
    ]


def _is_of_torchs_layer(place: Place, value: Any) -> bool:
    owner = place.owner().found() if isinstance(value, float) else None
    return isinstance(owner, nn.Module) and _is_torchs_or_ours(type(owner))


def changes(found: Sequence[tuple[Place, Any]]) -> Callable[[], list[str]]:
    """Returns a function that returns the names of the places whose value has changed.

    It is called at each replay. So what modules, classes and closures hold, which may be thousands
    of numbers, is compared in one pass in C. It keeps no other object that the program may drop.
    """
    near: list[tuple[Any, ...]] = []
    far = []
    for place, value in found:
        owner = place.owner().found()
        if isinstance(owner, nn.Module | type | CellType):  # whose parts are attributes
            near.append((owner, place.way[-1][1], value))
        else:
            far.append((place, value))
    owners, names, values = ([each[column] for each in near] for column in range(3))

    def changed() -> list[str]:
        compared = found
        with suppress(*_GONE):
            if all(map(is_, map(getattr, owners, names), values)):
                compared = far
        return [place.name for place, value in compared if not is_same(place.found(), value)]

    return changed


def is_same(one: Any, other: Any) -> bool:
    """Returns whether a constant or function is the same as another; new objects may be equal."""
    return one is other or (type(one) is type(other) and one == other)


def changed_numbers(before: Iterable[tuple[Place, Any]]) -> Iterator[str]:
    """Describes the numbers and strings that `closed_over` found before and that have changed."""
    for place, value in before:
        now = place.found()
        is_number = isinstance(value, NUMBERS) and isinstance(now, NUMBERS)
        if is_number and now != value and place.way[-1][0] is not length:
            yield f"{place.name} changed from {reprlib.repr(value)} to {reprlib.repr(now)}"


def _parts(value: Any) -> Iterator[tuple[str, _Way]]:
    """Yields (name, way) of each part to follow. A name that begins with "." or "[" is appended to
    the object's name; others replace it.
    """
    names: Iterable[str] = ()
    if isinstance(value, FunctionType):
        if is_of_the_program(value.__code__.co_filename):
            yield from _variables(value)
        names = "__defaults__", "__kwdefaults__", *vars(value)
    elif isinstance(value, MethodType):
        yield "self", ((getattr, "__self__"),)
        yield "", ((getattr, "__func__"),)
    elif isinstance(value, functools.partial):
        yield "", ((getattr, "func"),)
        names = "args", "keywords"
    elif isinstance(value, property):
        yield "", ((getattr, "fget"),)
    elif isinstance(value, dict):
        for key in list(value):
            name = repr(key) if isinstance(key, NUMBERS) else type(key).__name__
            yield f"[{name}]", ((getitem, key),)
        yield "[...]", ((length, None),)
    elif isinstance(value, list | tuple | deque):
        for index in range(len(value)):
            yield f"[{index}]", ((getitem, index),)
        if not isinstance(value, tuple):
            yield ".__len__()", ((tensors_in, id(value)),)
            yield "[...]", ((length, None),)
    elif isinstance(value, type):
        own: Any = [vars(each) for each in value.__mro__ if not _is_torchs_or_ours(each)]
        parts = ChainMap(*own).items()
        names = [n for n, part in parts if isinstance(part, _CODE) or not n.startswith("__")]
    elif isinstance(value, nn.Module | LRScheduler) or not _is_torchs_or_ours(type(value)):
        names = _attributes(value)
        yield "", ((getattr, "__class__"),)  # for its functions, and what they find there
    for name in names:
        yield f".{name}", ((getattr, name),)


def _attributes(value: Any) -> Iterator[str]:
    """Yields the names of an object's own attributes."""
    own = getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        for register in (value._modules, value._parameters, value._buffers):
            yield from register.keys()  # TorchScript's are no dictionaries
        for name, part in own.items():
            if name not in _OF_EVERY_MODULE or (name.endswith("_hooks") and part):
                yield name
    elif not isinstance(value, ModuleType):
        yield from own
        for each in type(value).__mro__:
            slots = [n for n, part in vars(each).items() if isinstance(part, MemberDescriptorType)]
            yield from [name for name in slots if not name.startswith("__")]


def _variables(function: FunctionType) -> Iterator[tuple[str, _Way]]:
    """Yields what the function's code names: its closure, globals, and what is in modules."""
    names = set(_names(function.__code__))
    waiting: list[tuple[str, _Way]] = [
        (name, ((getattr, "__closure__"), (getitem, index), (getattr, "cell_contents")))
        for index, name in enumerate(function.__code__.co_freevars)
    ]
    for name in names & function.__globals__.keys():
        waiting.append((name, ((getattr, "__globals__"), (getitem, name))))
    seen = set[ModuleType]()
    for name, way in waiting:  # to which modules add what they contain
        yield name, way
        part = Place(name, function, way).found()
        if isinstance(part, ModuleType) and part not in seen:
            seen.add(part)
            waiting += [(f"{name}.{n}", (*way, (getattr, n))) for n in names & vars(part).keys()]


def _names(code: CodeType) -> Iterator[str]:
    """Yields the names of globals and attributes in a function and in the functions defined inside
    it.
    """
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_torchs_or_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "shardgrad")
