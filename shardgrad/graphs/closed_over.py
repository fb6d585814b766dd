"""What a step's function closes over: tensors and numbers that it reaches without arguments.

A graph reads such a tensor where it was at the capture. If the program puts another one in its
place, such as the next batch in a global variable, an eager step reads the new one and a replay the
old one, and nothing raises. So a capture notes which of these tensors its operations read
(`reads.py`), and the graph is replayed only while they lie where they lay.

Followed from a function of the program are its closure, its default values and the globals that it
names, and from these the attributes of objects and modules, and of their classes, the elements of
lists, tuples and dictionaries, hooks of modules, and other functions of the program, such as
methods. So are objects among the step's arguments. Not followed are optimizers, what an iterator
has yet to give, objects of torch but for modules, and parameters and buffers of modules that the
step was given.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter, itemgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardgrad.graphs.outputs import host_value, plain_tensors
from shardgrad.graphs.program_line import is_of_the_program

__all__ = ["Place", "address_of", "closed_over", "elements", "value_of"]

_MOST_PARTS = 1_000  # of one object
_MOST_OBJECTS = 20_000
_NUMBERS = (bool, int, float, complex, str)
_LEAVES = (bytes, torch.dtype, torch.device, type(None), Optimizer)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
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
        return address_of(found), value_of(found)


def address_of(found: Any) -> Hashable:
    """Returns where a tensor lies, and how; which ones a list has; None of anything else."""
    if isinstance(found, list | tuple | dict):
        return tuple(map(id, elements(found)))
    if not isinstance(found, torch.Tensor):
        return None
    return tuple((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in plain_tensors([found]))


def value_of(found: Any) -> bytes:
    """Returns what a graph has frozen of a tensor; see `host_value`."""
    return host_value(found) if isinstance(found, torch.Tensor) else b""


def elements(value: Any) -> Iterable[Any]:
    """Returns what a list, a tuple or a dictionary has; a tensor by itself."""
    if isinstance(value, dict):
        return value.values()
    return [value] if isinstance(value, torch.Tensor) else value


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
            isinstance(value, list | tuple | dict) and given.issuperset(map(id, elements(value)))
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
