"""Tensors that a step can reach without being given them: what its function closes over.

A graph reads such a tensor where it was at the capture. If the program puts another one in its
place, such as the next batch in a global variable, an eager step reads the new one and a replay the
old one, and nothing raises. `watch` finds which of these tensors a step reads; here is where to
look, and how to look again.

Followed from a function of the program are its closure, its default values and the globals that it
names, and from these the attributes of objects and modules, the elements of lists, tuples and
dictionaries, and other functions of the program. Not followed are optimizers, what an iterator has
yet to give, objects of torch but for modules, and parameters and buffers, which belong to a step's
participants.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter, itemgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardgrad.graphs.outputs import local_tensor
from shardgrad.graphs.preflight.source_location import is_of_the_program

__all__ = ["Place", "tensors_closed_over"]

_DEPTH = 8
_MOST_PARTS = 1_000  # of one object
_MOST_OBJECTS = 20_000
_LEAVES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None), Optimizer)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

_Get = Callable[[Any], Any]


@dataclass(frozen=True, eq=False)
class Place:
    """A variable, an attribute or an element, in which a function finds a tensor.

    Attributes:
        name: as the program writes it, such as "batch['targets']" or "self.mask".
        get: returns what is there now; raises what Python raises if there is nothing.
    """

    name: str
    get: Callable[[], Any]

    def key(self) -> Hashable:
        """Returns where the tensor that is there now lies, and how; None if there is no tensor."""
        try:
            found = self.get()
        except (
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ):  # what the way leads over has changed
            return None
        if not isinstance(found, torch.Tensor):
            return None
        local = local_tensor(found)
        return local.data_ptr(), local.shape, local.stride(), local.dtype


def tensors_closed_over(
    function: Callable[..., Any], modules: Mapping[str, nn.Module]
) -> Iterator[tuple[Place, torch.Tensor]]:
    """Yields tensors with their places, those with the shortest way to them first.

    Args:
        function: of the step.
        modules: that the step uses, by their names.

    Capture: for eager steps only. Nothing on the device is read.
    """
    named = [(name or type(module).__name__, module) for name, module in modules.items()]
    # A function's variables have names of their own; the attributes of another callable object do
    # not.
    first = "" if isinstance(function, FunctionType | MethodType) else "self"
    roots: list[tuple[str, Any]] = [(first, function), *named]
    waiting = deque((Place(name, functools.partial(_same, root)), root, 0) for name, root in roots)
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_OBJECTS:
        place, value, depth = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield place, value
        elif depth < _DEPTH:
            # What a module holds is looked up in the module, which stays; other things, from the
            # beginning.
            get = functools.partial(_same, value) if isinstance(value, nn.Module) else place.get
            for name, part_of, part in islice(_parts(value), _MOST_PARTS):
                if not isinstance(part, _LEAVES):
                    full = place.name + name if name.startswith((".", "[")) else name or place.name
                    waiting.append(
                        (Place(full, functools.partial(_part, get, part_of)), part, depth + 1)
                    )


def _same(value: Any) -> Any:
    return value


def _part(get: Callable[[], Any], part_of: _Get) -> Any:
    return part_of(get())


def _parts(value: Any) -> Iterator[tuple[str, _Get, Any]]:
    """Yields parts: the name, or what to write behind the object's; how to get it from the
    object.
    """
    if isinstance(value, FunctionType):
        if is_of_the_program(value.__code__.co_filename):
            yield from _variables(value)
    elif isinstance(value, MethodType):
        yield "self", attrgetter("__self__"), value.__self__
        yield "", attrgetter("__func__"), value.__func__
    elif isinstance(value, functools.partial):
        yield from (
            (".func", attrgetter("func"), value.func),
            (".args", attrgetter("args"), value.args),
        )
        yield ".keywords", attrgetter("keywords"), value.keywords
    elif isinstance(value, dict):
        for key, part in list(value.items()):
            yield f"[{key!r}]", itemgetter(key), part
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield f"[{index}]", itemgetter(index), part
    elif isinstance(value, nn.Module):
        plain = [
            (name, part) for name, part in list(vars(value).items()) if name not in _OF_EVERY_MODULE
        ]
        for name, part in (*plain, *value._modules.items()):
            yield f".{name}", attrgetter(name), part
        yield "", attrgetter("__class__.forward"), type(value).forward
    elif not isinstance(value, type | ModuleType) and not _is_torchs_or_ours(type(value)):
        for name, part in list(getattr(value, "__dict__", {}).items()):
            yield f".{name}", attrgetter(name), part
        if callable(value):
            yield "", attrgetter("__class__.__call__"), type(value).__call__


def _variables(function: FunctionType) -> Iterator[tuple[str, _Get, Any]]:
    for index, (name, cell) in enumerate(
        zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    ):
        try:
            part = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        yield name, functools.partial(_content, index), part
    names = set(_names(function.__code__))
    for name in names & function.__globals__.keys():
        part = function.__globals__[name]
        if isinstance(part, ModuleType):
            if is_of_the_program(getattr(part, "__file__", None) or ""):
                for inner in names & vars(part).keys():
                    yield (
                        f"{name}.{inner}",
                        functools.partial(_global, f"{name}.{inner}"),
                        vars(part)[inner],
                    )
        else:
            yield name, functools.partial(_global, name), part
    for argument, part in (function.__kwdefaults__ or {}).items():
        yield argument, functools.partial(_default, argument), part
    for index, part in enumerate(function.__defaults__ or ()):
        yield f"default {index}", functools.partial(_default, index), part


def _content(index: int, function: Any) -> Any:
    return function.__closure__[index].cell_contents


def _global(name: str, function: Any) -> Any:
    first, _, rest = name.partition(".")
    value = function.__globals__[first]
    return getattr(value, rest) if rest else value


def _default(which: str | int, function: Any) -> Any:
    return (function.__kwdefaults__ if isinstance(which, str) else function.__defaults__)[which]


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
