"""`SGD` with momentum: one launch for each segment."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from shardgrad.errors import OptionError, unsupported
from shardgrad.ops.update import sgd_
from shardgrad.optim.flat import FlatOptimizer, Update
from shardgrad.optim.hyper import Hyper, at_least_zero
from shardgrad.optim.precision import Master, Precision
from shardgrad.optim.segment import Segment


class SGD(FlatOptimizer):
    """Stochastic gradient descent over flat segments, with the arguments of `torch.optim.SGD` and
    options for precision.

    For example:

        optimizer = shardgrad.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    Args:
        params: see `FlatOptimizer`.
        lr: learning rate, a number or a one-element tensor.
        momentum: factor of the momentum. It can change later, but not from 0, because without
            momentum there is no buffer: replace the entry of `param_groups` instead.
        dampening: `1 - dampening` times the gradient is added to the momentum.
        weight_decay: L2 penalty, added to the gradient.
        nesterov: use Nesterov momentum.
        maximize: maximize the loss instead of minimizing it.
        foreach: ignored, as is `fused`: every step is fused and capturable.
        differentiable: must be False.
        fused: see `foreach`.
        decoupled_weight_decay: subtract `lr * weight_decay` times the weight instead of using an L2
            penalty.
        moment_dtype: dtype of the momentum; None for float32, or float64 for float64 parameters.
        master: "float32" keeps a float32 copy of 16-bit weights; "remainder", for bfloat16, keeps
            the 16 bits of that copy that the weight lacks; None keeps neither.
        stochastic_rounding: round bf16 weights without a master stochastically.
        seed: seed of the stochastic rounding.
        check_finite: see `FlatOptimizer`.
        states_on_host: see `FlatOptimizer`.

    Raises:
        OptionError, OptimizerParameterError, UnsupportedError.
    """

    hypers: ClassVar[Sequence[Hyper]] = (
        Hyper("lr", at_least_zero, may_be_tensor=True),
        Hyper("momentum", at_least_zero),
        Hyper("dampening", at_least_zero),
        Hyper("weight_decay", at_least_zero),
    )
    fixed: ClassVar[Sequence[str]] = ("maximize", "nesterov", "decoupled_weight_decay")
    torch_keys: ClassVar[Mapping[str, Any]] = {
        "foreach": None,
        "differentiable": False,
        "fused": None,
    }

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        moment_dtype: torch.dtype | None = None,
        master: Master = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        check_finite: bool = False,
        states_on_host: bool = False,
    ) -> None:
        if differentiable:
            raise unsupported("differentiable=True", instead="torch.optim.SGD")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        precision = Precision(moment_dtype, master, stochastic_rounding, seed)
        super().__init__(
            params,
            defaults,
            precision,
            check_finite=check_finite,
            states_on_host=states_on_host,
        )

    def validate_group(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """Refuses momentum if the group has no buffer for it, and nesterov without momentum or with
        dampening.
        """
        if new["nesterov"] and (not new["momentum"] or new["dampening"]):
            raise OptionError(
                "Nesterov momentum requires a momentum and zero dampening",
                expected="momentum > 0 and dampening=0",
                got=f"momentum={new['momentum']!r}, dampening={new['dampening']!r}",
                fix="nesterov=False, or momentum=0.9",
            )
        if new["momentum"] and not old["momentum"]:
            raise OptionError(
                "momentum cannot be added to a group that was built without it",
                expected="momentum=0, as it was, or an optimizer built with momentum",
                got=f"momentum={new['momentum']!r}",
                fix="SGD(..., momentum=0.9)",
            )

    def state_dtypes(self, segment: Segment, group: Mapping[str, Any]) -> Mapping[str, torch.dtype]:
        """See `FlatOptimizer`: a momentum buffer if there is momentum, and the precision's
        master.
        """
        moments = ("momentum_buffer",) if group["momentum"] else ()
        return self._precision.dtypes(segment.dtype, moments)

    def guards(self) -> Hashable:
        """See `FlatOptimizer`. Without momentum, the buffer and the dampening have no effect."""
        return super().guards(), *[bool(group["momentum"]) for group in self.param_groups]

    def update(self, update: Update) -> None:
        """See `sgd_`."""
        launch, options = update.launch, update.segment.options
        sgd_(
            launch.param,
            launch.grad,
            update.state.get("momentum_buffer") if options["momentum"] else None,
            nesterov=options["nesterov"],
            **update.arguments(self._precision),
        )
