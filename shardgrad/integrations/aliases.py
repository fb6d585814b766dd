"""Plain parameters over the local shards, which an external optimizer gets instead of DTensors.

[Note: Aliases]
A kernel of an external optimizer takes addresses. A DTensor has none, and some releases of the
kernels fail when a rank holds no row of a parameter. So the external optimizer never sees our
parameters. Each has an *alias*: a plain parameter over the same memory, whose gradient is a plain
view of the gradient shard, set before each step. The alias of a parameter without elements on this
rank is not passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgrad.engine.param import FSDPParam, is_replaced, local_of, managed_by
from shardgrad.engine.param_group import ParamGroup, group_of
from shardgrad.errors import GradientError, OptimizerParameterError
from shardgrad.optim.selection import gradients_of
from shardgrad.sharding.dtensor import dtensor_like

__all__ = ["Alias", "bind_gradients", "make_alias"]


class Alias:
    """The alias of one parameter. See [Note: Aliases].

    Args:
        param: the parameter, here one that no unit shards.
        name: name for error messages.

    Attributes:
        param: the parameter.
        name: name for error messages.
        local: plain parameter over the same memory on this rank.
        attribute: attribute of the parameter that holds its gradient, "grad" or "decoupled_grad".
        grad_dtype: dtype of the gradient.
        is_sharded: True if a unit shards the parameter.
    """

    attribute = "grad"
    is_sharded = False

    def __init__(self, param: nn.Parameter, name: str) -> None:
        self.param = param
        self.name = name
        self.grad_dtype = param.dtype
        self.local = nn.Parameter(self._memory(), requires_grad=False)

    def _memory(self) -> torch.Tensor:
        return self.param.detach()

    @property
    def is_empty(self) -> bool:
        """True if this rank holds no element of the parameter."""
        return self.local.numel() == 0

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """Returns local optimizer state in the form of the parameter: a DTensor if the parameter is
        one.
        """
        return local

    def require_same(self) -> None:
        """Checks that the alias and the parameter have the same memory.

        Raises:
            OptimizerParameterError: the parameter was replaced or moved.
        """
        if is_replaced(self.param):
            raise _replaced(
                self.name, "a parameter of the model, not the one from before fully_shard"
            )
        if self.param.data_ptr() != self.local.data_ptr():
            raise _replaced(self.name, "the memory it had when the optimizer was built")

    def show(self, grad: torch.Tensor | None, attribute: str) -> None:
        """Sets the alias' gradient, which the external optimizer reads.

        Raises:
            GradientError: its dtype is not the one that was checked when the optimizer was built.
        """
        if grad is not None and grad.dtype is not self.grad_dtype:
            raise GradientError(
                f"the gradient of parameter {self.name} has another dtype than expected",
                expected=str(self.grad_dtype),
                got=str(grad.dtype),
                fix="build the optimizer after the last change of dtypes",
            )
        if attribute == "grad" and self.grad_dtype is not self.local.dtype:
            self.local.grad_dtype = self.grad_dtype
        setattr(self.local, attribute, grad)

    def gradient(self) -> torch.Tensor | None:
        """Returns the gradient of a parameter that no unit shards."""
        return self.param.grad

    def forget(self, *, set_to_none: bool) -> None:
        """Sets the parameter's gradient to None, or to zero."""
        grad = getattr(self.param, self.attribute, None)
        if grad is not None and set_to_none:
            setattr(self.param, self.attribute, None)
        elif grad is not None:
            grad.detach().zero_()


class ShardedAlias(Alias):
    """The alias of a parameter that a unit shards.

    Args:
        managed: the sharded parameter.

    Attributes:
        managed: the sharded parameter.
    """

    is_sharded = True

    def __init__(self, managed: FSDPParam) -> None:
        self.managed = managed
        super().__init__(managed.sharded, managed.name)
        self.attribute = group_of(managed).gradient_policy.attribute
        self.grad_dtype = group_of(managed).gradient_dtype

    def _memory(self) -> torch.Tensor:
        return local_of(self.managed.sharded)

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """See `Alias.wrap`: a DTensor."""
        return dtensor_like(local, cast(DTensor, self.param))

    def require_same(self) -> None:
        """See `Alias.require_same`."""
        managed = self.managed
        if managed.sharded is not self.param or local_of(self.param) is not managed.expected_local:
            raise _replaced(managed.name, "the part of the shard that the engine all-gathers from")
        if local_of(self.param).data_ptr() != self.local.data_ptr():
            raise _replaced(managed.name, "the shard it had when the optimizer was built")


def _replaced(name: str, expected: str) -> OptimizerParameterError:
    return OptimizerParameterError(
        f"parameter {name} was replaced or moved after the optimizer was built",
        expected=expected,
        got="other memory, which a step would not reach",
        fix="build the optimizer after the last model.to(...) or load_state_dict(assign=True)",
    )


def make_alias(param: nn.Parameter, name: str) -> Alias:
    """Returns the alias of a parameter.

    Args:
        param: a parameter that shardgrad shards, or a plain dense one.
        name: name for error messages, if no unit knows the qualified name.

    Raises:
        OptimizerParameterError: the parameter has no data yet, is not dense, or belongs to another
            engine.
    """
    managed = managed_by(param)
    why = fix = ""
    if param.device.type == "meta":
        why, fix = "it is on the meta device", "model.to_empty(device=...) and initialise it first"
    elif managed is None and isinstance(param, DTensor):
        why = "another engine shards it, or it was replaced after fully_shard"
        fix = "one optimizer for each engine's parameters"
    elif managed is None and not param.is_contiguous():
        why, fix = "it is not contiguous in memory", "param.data = param.data.contiguous()"
    if why:
        raise OptimizerParameterError(
            f"an optimizer was given parameter {name if managed is None else managed.name}, and "
            f"{why}",
            expected="contiguous parameters with data, sharded by shardgrad.fully_shard or not at "
            "all",
            got=why,
            fix=fix,
        )
    return Alias(param, name) if managed is None else ShardedAlias(managed)


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
    by_group: dict[ParamGroup, list[ShardedAlias]] = {}
    for alias in aliases:
        alias.require_same()
        if isinstance(alias, ShardedAlias):
            by_group.setdefault(group_of(alias.managed), []).append(alias)
        else:
            alias.show(alias.gradient(), attribute)
    verdicts: dict[int, torch.Tensor] = {}
    for group, members in by_group.items():
        views, nonfinite = _views(group, members)
        for member, view in zip(members, views, strict=True):
            member.show(view, attribute)
        if nonfinite is not None:
            verdicts[id(nonfinite)] = nonfinite
    return list(verdicts.values())


def _views(
    group: ParamGroup, members: Sequence[ShardedAlias]
) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
    shard = gradients_of(group, [member.param for member in members])
    if shard is None:
        return [None] * len(members), None
    places = [shard.place_of(member.param) for member in members]
    known = [place for place in places if place is not None]
    live: Mapping[int, bool] = dict(zip(known, shard.settle(known), strict=True))
    views = [shard.view(place) if place is not None and live[place] else None for place in places]
    return views, shard.nonfinite
