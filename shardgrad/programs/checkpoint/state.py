"""A state is data: what may be in one, its flat names as torch writes them, and its rebuilding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from shardgrad.errors import CheckpointError
from shardgrad.programs.text import printable


def flatten(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns the leaves of a nested state by their names, which are keys joined by dots.

    Raises:
        CheckpointError: the state has something in it that is not data, or two leaves have one
            name.
    """
    try:
        leaves, _ = flatten_state_dict(dict(state))
    except ValueError as error:
        raise _refused(
            str(error), "two entries with this name", "keys that differ as strings"
        ) from None
    for name, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided or leaf.is_meta:
                raise _refused(name, f"{leaf.layout} on {leaf.device}", "a dense tensor with data")
        else:
            _require_data(name, leaf)
    return leaves


def rebuild(state: Any, values: Mapping[str, Any], name: str = "") -> Any:
    """Returns a state of the same structure with some leaves replaced."""
    if name in values:
        return values[name]
    prefix = f"{name}." if name else ""
    if isinstance(state, Mapping):
        return {key: rebuild(value, values, f"{prefix}{key}") for key, value in state.items()}
    if isinstance(state, list):
        return [rebuild(value, values, f"{prefix}{i}") for i, value in enumerate(state)]
    return state


def _require_data(name: str, leaf: Any) -> None:
    if isinstance(leaf, Mapping):
        for key, value in leaf.items():
            _require_data(f"{name}.{key}", value)
    elif type(leaf) in (list, tuple):
        for i, value in enumerate(leaf):
            _require_data(f"{name}.{i}", value)
    elif leaf is not None and type(leaf) not in (bool, int, float, str):
        raise _refused(
            name,
            f"a {type(leaf).__name__}",
            "tensors, numbers, strings, booleans and None in dictionaries and lists; tuples "
            "without tensors",
        )


def _refused(name: str, got: str, expected: str) -> CheckpointError:
    return CheckpointError(
        "a state that is not plain data cannot be saved or loaded",
        expected=expected,
        got=got,
        where=printable(name),
        fix="remove it from the state, or represent it by tensors and numbers",
    )
