"""Nested states as flat names: JSON pointers (RFC 6901) without the first slash."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shardgrad.checkpoint.text import printable
from shardgrad.errors import CheckpointError

__all__ = ["Value", "flatten", "join", "rebuild", "split"]

Value = bool | int | float | str | None


def join(path: tuple[Any, ...]) -> str:
    """Returns the name of a path in a nested state."""
    return "/".join(str(key).replace("~", "~0").replace("/", "~1") for key in path)


def split(name: str) -> tuple[str, ...]:
    """Returns the keys of a name."""
    return tuple(key.replace("~1", "/").replace("~0", "~") for key in name.split("/"))


def flatten(state: Mapping[Any, Any]) -> dict[str, torch.Tensor | Value]:
    """Returns every leaf of a nested state by its name.

    Args:
        state: dictionaries, lists and tuples of tensors, numbers, strings, booleans and None.

    Raises:
        CheckpointError: the state has another type in it, or two leaves have one name.
    """
    leaves: dict[str, torch.Tensor | Value] = {}
    for path, leaf in _walk(state, ()):
        name = join(path)
        if not (
            leaf is None or isinstance(leaf, torch.Tensor) or type(leaf) in (bool, int, float, str)
        ):
            raise _refused(
                name, f"a {type(leaf).__name__}", "tensors, numbers, texts, booleans and None"
            )
        if name in leaves:
            raise _refused(name, "two entries of this name", "keys that differ as text")
        leaves[name] = leaf
    return leaves


def rebuild(state: Any, leaves: Mapping[str, Any], path: tuple[Any, ...] = ()) -> Any:
    """Returns a state of the same structure with some leaves replaced."""
    if isinstance(state, Mapping):
        return {key: rebuild(value, leaves, (*path, key)) for key, value in state.items()}
    if isinstance(state, list | tuple):
        values = [rebuild(value, leaves, (*path, i)) for i, value in enumerate(state)]
        return values if isinstance(state, list) else tuple(values)
    return leaves.get(join(path), state)


def _walk(state: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(state, Mapping):
        for key, value in state.items():
            if type(key) not in (str, int):
                raise _refused(
                    join((*path, key)), f"a key of type {type(key).__name__}", "texts and integers"
                )
            yield from _walk(value, (*path, key))
    elif isinstance(state, list | tuple):
        for i, value in enumerate(state):
            yield from _walk(value, (*path, i))
    else:
        yield path, state


def _refused(name: str, got: str, expected: str) -> CheckpointError:
    return CheckpointError(
        "a state that is not plain data cannot be saved",
        expected=expected,
        got=got,
        where=printable(name),
        fix="remove it from the state, or represent it by tensors and numbers",
    )
