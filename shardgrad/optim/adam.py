"""`AdamW` and `Adam`: one launch for each segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from shardgrad.errors import unsupported
from shardgrad.ops.update import adam_
from shardgrad.optim.flat import FlatOptimizer, Update
from shardgrad.optim.hyper import Hyper, at_least_zero, fractions
from shardgrad.optim.precision import Master, Precision
from shardgrad.optim.segment import Segment


class Adam(FlatOptimizer):
    """Adam over flat segments, with the arguments of `torch.optim.Adam` and options for precision.

    For example, to train bfloat16 weights with float32 precision:

        optimizer = shardgrad.optim.Adam(model.parameters(), lr=3e-4, master="remainder")

    Args:
        params: see `FlatOptimizer`.
        lr: learning rate, a number or a one-element tensor.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: L2 penalty, added to the gradient.
        amsgrad: must be False.
        maximize: maximize the loss instead of minimizing it.
        foreach: ignored, as are `capturable` and `fused`: every step is fused and capturable.
        capturable: see `foreach`.
        differentiable: must be False.
        fused: see `foreach`.
        decoupled_weight_decay: decay weights as `AdamW` does.
        moment_dtype: dtype of both moments; None for float32, or float64 for float64 parameters.
        master: "float32" keeps a float32 copy of 16-bit weights; "remainder", for bfloat16, keeps
            the 16 bits of that copy that the weight lacks; None keeps neither.
        stochastic_rounding: round bf16 weights without a master stochastically.
        seed: seed of the stochastic rounding.
        check_finite: see `FlatOptimizer`.
        states_on_host: see `FlatOptimizer`.

    Raises:
        OptionError, OptimizerParameterError, UnsupportedError.

    Source: Kingma and Ba, "Adam: a method for stochastic optimization", 2015.
    """

    hypers: ClassVar[Sequence[Hyper]] = (
        Hyper("lr", at_least_zero, may_be_tensor=True),
        Hyper("betas", fractions, count=2),
        Hyper("eps", at_least_zero),
        Hyper("weight_decay", at_least_zero),
    )
    fixed: ClassVar[Sequence[str]] = ("maximize", "decoupled_weight_decay")
    torch_keys: ClassVar[Mapping[str, Any]] = {
        "amsgrad": False,
        "foreach": None,
        "capturable": None,
        "differentiable": False,
        "fused": None,
    }

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = True,
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
            raise unsupported("differentiable=True", instead="torch.optim.AdamW")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
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
        """Refuses `amsgrad`, whether from an argument, a group, or a state dict of torch."""
        if new.get("amsgrad"):
            raise unsupported("amsgrad=True", instead="amsgrad=False, or torch.optim.AdamW")

    def state_dtypes(self, segment: Segment, group: Mapping[str, Any]) -> Mapping[str, torch.dtype]:
        """See `FlatOptimizer`: two moments, and the master copy of the precision."""
        return self._precision.dtypes(segment.dtype, ("exp_avg", "exp_avg_sq"))

    def update(self, update: Update) -> None:
        """See `adam_`."""
        launch, state = update.launch, update.state
        adam_(
            launch.param,
            launch.grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            **update.arguments(self._precision),
        )


class AdamW(Adam):
    """AdamW over flat segments, with the arguments of `torch.optim.AdamW` and of `Adam`.

    For example:

        optimizer = shardgrad.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)

    Args:
        params: see `FlatOptimizer`.
        lr: learning rate, a number or a one-element tensor.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: each step subtracts `lr * weight_decay` times the weight.
        amsgrad: must be False.
        **options: keyword arguments of `Adam`.

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        options.setdefault("decoupled_weight_decay", True)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
