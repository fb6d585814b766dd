"""Loads a saved optimizer state into existing buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from shardgrad.errors import OptimizerStateError
from shardgrad.optim.hyper import OptimGroup
from shardgrad.sharding.dtensor import require_own_shards

# Copies (into, value), made once everything is checked.
_Copies = list[tuple[torch.Tensor, torch.Tensor]]


def load_state(
    groups: Sequence[OptimGroup],
    state: Mapping[Any, Mapping[str, torch.Tensor]],
    state_dict: Mapping[str, Any],
    *,
    ignored: Collection[str] = (),
) -> None:
    """Copies the values of `state_dict` into the groups and buffers of an optimizer.

    Args:
        groups: the optimizer's `param_groups`.
        state: the optimizer's own entries of `state`, by parameter.
        state_dict: the state to load.
        ignored: keys of groups that are checked but not loaded.

    A parameter without an entry in the state dict starts from zero state. Tensors that this
    optimizer does not keep (`max_exp_avg_sq`) are refused. Tensors that only this optimizer keeps
    (a master copy) are made from the parameter at the next step.

    Raises:
        OptimizerStateError: groups, parameters, names or shapes do not fit; nothing was changed.
    """
    copies = copies_of_all(groups, state, state_dict)
    saved_groups = state_dict["param_groups"]
    for group, saved in zip(groups, saved_groups, strict=True):
        group.check({key: value for key, value in saved.items() if key != "params"})
    with torch.no_grad():
        for into, value in copies:
            into.copy_(value)
    for group, saved in zip(groups, saved_groups, strict=True):
        loaded = {k: value for k, value in saved.items() if k != "params" and k not in ignored}
        # A scheduler may change a learning rate that is a tensor in place, which must not reach
        # the saved one.
        group.update(deepcopy(loaded))


def copies_of_all(
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Mapping[str, torch.Tensor]],
    state_dict: Mapping[str, Any],
) -> _Copies:
    """Returns the copies (into, value) for all parameters of an optimizer, in order.

    Raises:
        OptimizerStateError: groups, parameters, names or shapes do not fit.
    """
    saved_groups = state_dict["param_groups"]
    ours, theirs = ([len(g["params"]) for g in g_list] for g_list in (groups, saved_groups))
    if ours != theirs:
        raise _misfit("its groups differ", f"groups of {ours} parameters", f"groups of {theirs}")
    ids = chain.from_iterable(group["params"] for group in saved_groups)
    params = chain.from_iterable(group["params"] for group in groups)
    saved_state = state_dict["state"]
    copies: _Copies = []
    for number, (key, param) in enumerate(zip(ids, params, strict=True)):
        copies += copies_into(number, state[param], saved_state.get(key, {}))
    return copies


def copies_into(
    number: int, ours: Mapping[str, torch.Tensor], saved: Mapping[str, Any]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the copies (into, value) for one parameter."""
    # A parameter that comes into a group without momentum brings its own along, as in torch.
    known = ours.keys() | ({"momentum_buffer"} if ours.keys() == {"step"} else set())
    unknown = [
        key for key, value in saved.items() if key not in known and isinstance(value, torch.Tensor)
    ]
    if unknown:
        raise _misfit(
            f"parameter {number} has state that this optimizer does not keep",
            f"{sorted(ours)}",
            f"{sorted(unknown)}",
        )
    if "momentum_buffer" in ours.keys() - saved.keys():
        saved = {**saved, "step": None}  # as in torch, the next step fills the momentum
    for key, into in ours.items():
        value = saved.get(key)
        if key == "step":
            yield into, _count(number, value, saved.get("momentum_buffer"))
        elif value is None:
            yield into, torch.zeros((), dtype=into.dtype, device=into.device)
        else:
            yield local_tensor(into), local_part(into, value, f"{key} of parameter {number}")


def _count(number: int, step: Any, momentum: Any) -> torch.Tensor:
    """Returns the number of steps that a parameter has taken, float32.

    torch's SGD does not count steps. If the count is missing or 0, a momentum that is not zero
    means that there was at least one step.
    """
    if step is None:
        step = float(momentum is not None)
    count = torch.as_tensor(step, dtype=torch.float32)
    if count.numel() != 1:
        raise _misfit(
            f"step of parameter {number} has the wrong shape", "()", str(tuple(count.shape))
        )
    count = count.reshape(())
    if isinstance(momentum, torch.Tensor):
        count = count.maximum(local_tensor(momentum).any().to(count))
    return count


def local_part(into: torch.Tensor, value: Any, what: str) -> torch.Tensor:
    """Returns this rank's part of a saved tensor.

    Args:
        into: the target: a DTensor, or an unsharded tensor.
        value: a DTensor with any placements on any mesh, or an unsharded tensor. A collective if
            its placements or its mesh differ from the target's.
        what: the name for the error message.

    Raises:
        OptimizerStateError: `value` has the wrong shape, or is not a tensor.
        ForeignParameterError: it is a shard that another rank has saved.
    """
    if not isinstance(value, torch.Tensor) or value.shape != into.shape:
        got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise _misfit(f"{what} has the wrong shape", str(tuple(into.shape)), str(got))
    require_own_shards([(what, value)])
    if not isinstance(into, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if not isinstance(value, DTensor):
        value = DTensor.from_local(
            value.to(into.device),
            into.device_mesh,
            [Replicate()] * into.device_mesh.ndim,
            run_check=False,
        )
    elif value.device_mesh != into.device_mesh:
        value = distribute_tensor(value.full_tensor(), into.device_mesh, into.placements)
    local: torch.Tensor = value.redistribute(placements=into.placements).to_local()
    return local


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _misfit(what: str, expected: str, got: str) -> OptimizerStateError:
    """Returns the error for a state that does not fit."""
    return OptimizerStateError(
        f"the optimizer state was not loaded: {what}",
        expected=expected,
        got=got,
        fix="load it into an optimizer built the same way, over a model with the same parameters "
        "in order",
    )
