"""The model of a plan, and how its step is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from shardgrad.programs.function_named import function_named
from shardgrad.programs.plan.request import Request
from shardgrad.programs.train.failure import TrainingError, UsageError
from shardgrad.programs.train.model import Transformer, count_parameters
from shardgrad.programs.train.presets import PRESETS

Loss = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class PlanModel:
    """A model and its loss.

    Attributes:
        module: the model.
        loss: function of batch size and sequence length that runs forward and returns a scalar.
        ends: names of the modules outside of the blocks that become units anyway.
    """

    module: nn.Module
    loss: Loss
    ends: tuple[str, ...] = ()

    @property
    def blocks(self) -> nn.ModuleList:
        """The module list with the most parameters, each of whose modules becomes a unit; an empty
        one if there is none.
        """
        lists = [part for part in self.module.modules() if isinstance(part, nn.ModuleList)]
        return max(lists, key=count_parameters, default=nn.ModuleList())


def build_plan_model(request: Request) -> PlanModel:
    """Builds the model of a request, of fake tensors.

    Raises:
        UsageError: there is no such model, or it cannot be built of them.
    """
    if request.model is not None:
        return _user_model(request.model)
    dense = Transformer(PRESETS[request.preset])
    return PlanModel(dense, _loss_of(dense), dense.ends)


def _user_model(reference: str) -> PlanModel:
    """Calls `module:function`, which returns a model with `loss(tokens, targets)`, or (model,
    loss).

    In the second form `loss(model, batch_size, seq_len)` creates inputs, runs forward and returns a
    scalar.
    """
    function = function_named(reference, flag="--model")
    try:
        built = function()
    except TrainingError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        raise UsageError(
            f"{reference} cannot be built with fake tensors, which have no values "
            f"({type(error).__name__}: {first}): do not read values of tensors in it."
        ) from error
    module, loss = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(module, nn.Module):
        raise UsageError(f"{reference} returned {type(module).__name__}: return a torch.nn.Module.")
    if not any(param.requires_grad for param in module.parameters()):
        raise UsageError(f"{reference} returned a model without trainable parameters: add some.")
    if loss is None and not callable(getattr(module, "loss", None)):
        raise UsageError(
            f"{type(module).__name__} has no loss(tokens, targets): add one, or let {reference} "
            "return the model and a function of (model, batch_size, seq_len) that returns the loss."
        )
    return PlanModel(module, _loss_of(module) if loss is None else partial(loss, module))


def _loss_of(module: nn.Module) -> Loss:
    """Returns the loss of a language model on tokens."""

    def loss(batch_size: int, seq_len: int) -> Tensor:
        tokens = torch.zeros(batch_size, seq_len, dtype=torch.int64)
        result: Tensor = module.loss(tokens, torch.zeros_like(tokens))  # type: ignore[operator]
        return result

    return loss
