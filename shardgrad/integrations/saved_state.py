"""Loads optimizer state in the format of TransformerEngine's FusedAdam with DTensor parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from shardgrad.integrations.aliases import Alias
from shardgrad.optim.state import local_part, misfit

__all__ = ["Loaded", "resolve"]


@dataclass(frozen=True)
class Loaded:
    """The saved state of one parameter on this rank.

    Attributes:
        alias: alias of the parameter.
        values: this rank's part of each state tensor in the saved state, by name.
    """

    alias: Alias
    values: Mapping[str, torch.Tensor]


def resolve(
    aliases: Sequence[Sequence[Alias]],
    dtypes: Mapping[Alias, Mapping[str, torch.dtype]],
    state_dict: Mapping[str, Any],
) -> tuple[list[Loaded], list[int]]:
    """Checks a saved state and returns this rank's part of it. Changes nothing.

    Args:
        aliases: the aliases of every parameter group.
        dtypes: dtypes of the state tensors of each parameter, by name.
        state_dict: result of `state_dict()` of this class, of TransformerEngine's FusedAdam or of
            torch's AdamW.

    Returns:
        The state of each parameter, and the step count of each group.

    Raises:
        OptimizerStateError: the saved state does not fit.
    """
    saved_groups = state_dict["param_groups"]
    ours, theirs = (
        [len(group) for group in aliases],
        [len(group["params"]) for group in saved_groups],
    )
    if ours != theirs:
        raise misfit("its groups are others", f"groups of {ours} parameters", f"groups of {theirs}")
    keys = chain.from_iterable(group["params"] for group in saved_groups)
    loaded = []
    for key, alias in zip(keys, chain.from_iterable(aliases), strict=True):
        saved = state_dict["state"].get(key, {})
        loaded.append(Loaded(alias, _values(alias, dtypes[alias], saved)))
    return loaded, [_steps(group, state_dict["state"]) for group in saved_groups]


def _values(
    alias: Alias, dtypes: Mapping[str, torch.dtype], saved: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    unknown = [
        name for name in saved if name not in dtypes and name not in ("step", "master_param")
    ]
    if unknown:
        raise misfit(
            f"parameter {alias.name} has unknown state",
            str(sorted(dtypes)),
            str(unknown),
        )
    values = {}
    for name, dtype in dtypes.items():
        value = saved.get(name)
        if value is None:
            continue
        # An int16 remainder has the bits of a float; other dtypes are numbers that can be
        # converted.
        if (dtype is torch.int16) != (value.dtype is torch.int16):
            raise misfit(
                f"{name} of parameter {alias.name} is kept otherwise", str(dtype), str(value.dtype)
            )
        into = alias.wrap(alias.local.detach())
        values[name] = local_part(into, value, f"{name} of parameter {alias.name}").to(dtype)
    return values


def _steps(group: Mapping[str, Any], state: Mapping[Any, Mapping[str, Any]]) -> int:
    """Returns a group's step count; torch has it in each parameter's state, of which the highest
    counts.
    """
    if "step" in group:
        return int(group["step"])
    of_params = [state.get(key, {}).get("step", 0) for key in group["params"]]
    return max((int(step) for step in of_params), default=0)
