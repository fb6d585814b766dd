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
        raise _refused(str(error), "two entries whose keys are equal as strings") from None
    for name, leaf in leaves.items():
        if not isinstance(leaf, torch.Tensor):
            odd = _not_data_in(leaf)
        else:
            is_dense = leaf.layout is torch.strided and not leaf.is_meta
            odd = "" if is_dense else f"a tensor of {leaf.layout} on {leaf.device}"
        if odd:
            raise _refused(name, odd)
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


def _not_data_in(value: Any) -> str:
    """Returns what in a value is not data; nothing if all of it is."""
    parts = list(value.values()) if isinstance(value, Mapping) else value
    if type(parts) in (list, tuple):
        return next(filter(None, map(_not_data_in, parts)), "")
    is_data = value is None or type(value) in (bool, int, float, str)
    return "" if is_data else f"an entry of type {type(value).__name__}"


def _refused(name: str, got: str) -> CheckpointError:
    return CheckpointError(
        "a state that is not plain data cannot be saved or loaded",
        expected="dense tensors, numbers, strings, booleans and None in dictionaries and lists; "
        "tuples without tensors",
        got=got,
        where=printable(name),
        fix="remove it from the state, or represent it by tensors and numbers",
    )
