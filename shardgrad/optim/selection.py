"""Finds the gradients of a set of parameters, and multiplies them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from shardgrad.engine.grad_shard import GradShard
from shardgrad.engine.param_group import FSDPParam, ParamGroup, fsdp_param_of, is_claimed
from shardgrad.engine.streams import is_capturing
from shardgrad.errors import OptimizerParameterError
from shardgrad.optim.state import local_tensor


@dataclass(frozen=True)
class Selection:
    """Gradients chosen from one shard.

    Attributes:
        shard: the gradient shard that contains them.
        places: the indices of the chosen parameters in the shard.
        live: the indices among `places` whose parameter has a gradient.
    """

    shard: GradShard
    places: tuple[int, ...]
    live: tuple[int, ...]


@dataclass(frozen=True)
class Gradients:
    """The gradients of a set of parameters.

    Attributes:
        selections: the gradients in gradient shards, in the order of the parameters.
        plain: the gradients of parameters that no unit shards.
    """

    selections: list[Selection]
    plain: list[torch.Tensor]

    def multiply(self, factor: torch.Tensor) -> None:
        """Multiplies all of them in place, as `torch.nn.utils.clip_grad_norm_` does.

        Args:
            factor: float32 or float64 device scalar.

        Streams: the current stream. Capture: safe.
        """
        gradients = list(map(local_tensor, self.plain))
        for selection in self.selections:
            shard = selection.shard
            # The value of a gradient that is None may still be needed, so a shard is multiplied as
            # a whole only if all of its gradients are chosen and live.
            if len(selection.live) == shard.count:
                gradients.append(shard.values)
            else:
                gradients += [shard.views[place] for place in selection.live]
        for device in {each.device for each in gradients}:  # two, if only some are offloaded
            there = [each for each in gradients if each.device == device]
            torch._foreach_mul_(there, factor.to(device))


def gradients_of(group: ParamGroup, params: Iterable[torch.Tensor]) -> GradShard | None:
    """Returns a group's gradient shard, with memory; None if it has none and nothing was assigned.

    A frozen parameter to which the program assigned a gradient gets a place in the shard.
    """
    grads, attribute = group.grads, group.gradient_policy.attribute
    grads.join()
    written = [param for param in params if getattr(param, attribute, None) is not None]
    if (grads.shard is None or not grads.shard.has_memory) and not written:
        return None
    shard: GradShard = grads.require_shard()
    if shard.count < len(group.params) and any(shard.place_of(param) is None for param in written):
        grads.refresh_trainable()
        shard = grads.require_shard()
    shard.look(is_captured=is_capturing(shard.flat.device))
    shard.allocate()
    return shard


def plain_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """Returns the gradient of a parameter that no unit shards: `.grad`, else `.decoupled_grad`.

    The gradient of another library's DTensor may be a partial sum, or sharded otherwise. It is then
    replaced by one that is sharded like the parameter: a collective.
    """
    for attribute in ("grad", "decoupled_grad"):
        grad: torch.Tensor | None = getattr(param, attribute, None)
        if grad is not None:
            placements = getattr(param, "placements", ())
            if isinstance(grad, DTensor) and grad.placements != placements:
                grad = grad.redistribute(placements=placements)
                setattr(param, attribute, grad)
            return grad
    return None


def select(params: Iterable[torch.Tensor]) -> Gradients:
    """Finds the gradients of parameters, and updates the live flags on the device to the gradients
    that are bound.

    Raises:
        ForeignParameterError: a gradient is not sharded like its parameter.
        OptimizerParameterError: `fully_shard` has replaced a parameter, which gets no gradients.
    """
    by_group: dict[ParamGroup, dict[FSDPParam, None]] = {}
    plain = []
    for param in params:
        # After an evaluation, unsharded parameters may still be registered.
        managed = fsdp_param_of(param)
        if managed is not None:
            by_group.setdefault(managed.group, {})[managed] = None
        elif is_claimed(param):
            raise OptimizerParameterError(
                "fully_shard has replaced a parameter whose gradient was asked for",
                expected="the model's parameters after the last fully_shard",
                got=f"one of shape {tuple(param.shape)} from before it, which gets no gradients",
                fix="list(model.parameters()) after fully_shard",
            )
        elif (grad := plain_gradient(param)) is not None:
            plain.append(grad)
    selections = []
    for group, members in by_group.items():
        shard = gradients_of(group, [managed.sharded for managed in members])
        if shard is None:
            continue
        live = shard.settle()
        places = [shard.place_of(managed.sharded) for managed in members]
        chosen = tuple(place for place in places if place is not None)
        selections.append(Selection(shard, chosen, tuple(place for place in chosen if live[place])))
    return Gradients(selections, plain)
