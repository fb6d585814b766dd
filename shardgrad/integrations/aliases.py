"""Plain parameters over the local shards, which an external optimizer gets instead of DTensors.

[Note: Aliases]
A kernel of an external optimizer takes addresses. A DTensor has none, and some releases of the
kernels fail when a rank holds no row of a parameter. So the external optimizer never sees our
parameters. Each has an *alias*: a plain parameter over the same memory, whose gradient is a plain
view of the gradient shard, set before each step. The alias of a parameter without elements on this
rank is one unused element that never gets a gradient: kernels skip it, and step counts go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgrad.engine.param import is_replaced, local_of, managed_by
from shardgrad.engine.param_group import group_of
from shardgrad.errors import GradientError, OptimizerParameterError
from shardgrad.optim.selection import plain_gradient, select
from shardgrad.sharding.dtensor import dtensor_like

__all__ = ["Alias", "bind_gradients"]


class Alias:
    """The alias of one parameter. See [Note: Aliases].

    Args:
        param: a parameter that shardgrad shards, or a plain dense one.
        name: name for error messages, if no unit knows the qualified name.

    Attributes:
        managed: the parameter, if a unit shards it.
        attribute: attribute of the parameter that holds its gradient, "grad" or "decoupled_grad".
        grad_dtype: dtype of the gradient.
        local: plain parameter over the same memory.

    Raises:
        OptimizerParameterError: the parameter has no data yet, is not dense, or belongs to another
            engine.
    """

    def __init__(self, param: nn.Parameter, name: str) -> None:
        self.param = param
        self.managed = managed = managed_by(param)
        self.name = name if managed is None else managed.name
        why = fix = ""
        if param.device.type == "meta":
            why = "it is on the meta device"
            fix = "model.to_empty(device=...) and initialise it first"
        elif managed is None and isinstance(param, DTensor):
            why = "another engine shards it, or it was replaced after fully_shard"
            fix = "one optimizer for each engine's parameters"
        elif managed is None and not param.is_contiguous():
            why, fix = "it is not contiguous in memory", "param.data = param.data.contiguous()"
        if why:
            raise OptimizerParameterError(
                f"an optimizer was given parameter {self.name}, and {why}",
                expected="contiguous parameters with data, sharded by shardgrad.fully_shard or not "
                "at all",
                got=why,
                fix=fix,
            )
        self.attribute, self.grad_dtype = "grad", param.dtype
        if managed is not None:
            group = group_of(managed)
            self.attribute = group.gradient_policy.attribute
            self.grad_dtype = group.gradient_dtype
        memory = self.memory.new_zeros(1) if self.is_empty else self.memory
        self.local = nn.Parameter(memory, requires_grad=False)

    @property
    def memory(self) -> torch.Tensor:
        """What this rank holds of the parameter."""
        return self.param.detach() if self.managed is None else local_of(self.param)

    @property
    def is_empty(self) -> bool:
        """True if this rank holds no element of the parameter."""
        return self.memory.numel() == 0

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """Returns local optimizer state in the form of the parameter: a DTensor if the parameter is
        one.
        """
        if self.is_empty:
            local = local.new_empty(self.memory.shape)
        return local if self.managed is None else dtensor_like(local, cast(DTensor, self.param))

    def require_same_memory(self) -> None:
        """Checks that the alias and the parameter have the same memory.

        Raises:
            OptimizerParameterError: the parameter was replaced or moved.
        """
        managed, expected = self.managed, ""
        if managed is None and is_replaced(self.param):
            expected = "a parameter of the model, not the one from before fully_shard"
        elif managed is not None and (
            managed.sharded is not self.param or self.memory is not managed.expected_local
        ):
            expected = "the part of the shard that the engine all-gathers from"
        elif not self.is_empty and self.memory.data_ptr() != self.local.data_ptr():
            expected = "the memory it had when the optimizer was built"
        if expected:
            raise OptimizerParameterError(
                f"parameter {self.name} was replaced or moved after the optimizer was built",
                expected=expected,
                got="other memory, which a step would not reach",
                fix="build the optimizer after the last model.to(...) or "
                "load_state_dict(assign=True)",
            )


def bind_gradients(aliases: Iterable[Alias], attribute: str) -> list[torch.Tensor]:
    """Sets the gradient of every alias to that of its parameter.

    Args:
        aliases: the aliases of one optimizer.
        attribute: attribute that the external optimizer reads.

    Returns:
        Device scalars, each above zero if a non-finite value was found among some of these
        gradients.

    Streams: the current stream, which backward has made wait for the gradients.
    Capture: safe; which parameters have a gradient is fixed by the capture.

    Raises:
        OptimizerParameterError, ForeignParameterError, GradientError: before anything is changed by
            a step.
    """
    aliases = list(aliases)
    for alias in aliases:
        alias.require_same_memory()
    selections = select(alias.param for alias in aliases if alias.managed is not None).selections
    # Compared by identity, as every DTensor operator would be a dispatch.
    views = {
        id(chosen.shard.params[place]): chosen.shard.view(place)
        for chosen in selections
        for place in chosen.live
    }
    for alias in aliases:
        grad = views.get(id(alias.param))
        if alias.managed is None:
            grad = plain_gradient(alias.param)
        if grad is not None and grad.dtype is not alias.grad_dtype:
            raise GradientError(
                f"the gradient of parameter {alias.name} has another dtype than expected",
                expected=str(alias.grad_dtype),
                got=str(grad.dtype),
                fix="build the optimizer after the last change of dtypes",
            )
        if attribute == "grad" and alias.grad_dtype is not alias.local.dtype:
            alias.local.grad_dtype = alias.grad_dtype
        setattr(alias.local, attribute, None if alias.is_empty else grad)
    found = (chosen.shard.nonfinite for chosen in selections)
    return [nonfinite for nonfinite in found if nonfinite is not None]
