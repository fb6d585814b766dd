"""TransformerEngine's FusedAdam on sharded parameters.

[Note: Limits of TransformerEngine]
Limits of releases that concern a caller; numbers are those of issues and pull requests of the
project. What its constructor refuses is refused in its words.

* Before 2.6 a kernel takes one dtype for parameter and gradient (#1888). The release is not
  supported.
* Before 2.13 `capturable` needs float32 moments (#2632). Its constructor refuses others.
* Before 2.14 state of a DTensor parameter is not always a DTensor (#2424, #2795). Aliases are
  plain.
* Before 2.17 kernels count elements in 32 bits. Longer shards raise.
* Before 2.18 a launch does nothing if its last tensor is empty (#3207, #3212). Empty shards are not
  passed.
* Before 2.20 `capturable` needs gradients in the parameter's dtype (#3358, #3414). Others raise.
* Before 2.20 a group without parameters counts no steps (#3318). No group is without: see
  [Note: Aliases].

In all releases:

* A parameter whose gradient is None is skipped silently, also if the gradient is in the other
  attribute. That raises here.
* `capturable` takes float32 masters only, no remainders, and moments that are both float32 or both
  bfloat16. Its constructor refuses others.
* `store_param_remainders` has no effect without float32 masters. That raises here.
* Float16 and bfloat16 in one group raise in the middle of a step. Here they raise before it.
* Float32 parameters get a master copy that nothing updates. It is not saved.
* With `capturable`, the step count follows the found_inf of the step before.
* With `capturable`, gradients are divided by the scale of a loss scaler in place.

Source: `transformer_engine/pytorch/optimizers/fused_adam.py` and `common/multi_tensor/adam.cu` in
NVIDIA/TransformerEngine, tags v2.4 to v2.18 and commit d0067d0d.
"""

from __future__ import annotations

from typing import Any

import torch

from shardgrad.errors import OptionError
from shardgrad.integrations.aliases import Alias
from shardgrad.integrations.fused_adam import BoundOptimizer

__all__ = ["FusedAdam"]

_HALVES = (torch.float16, torch.bfloat16)


class FusedAdam(BoundOptimizer):
    """TransformerEngine's FusedAdam over sharded parameters. See `BoundOptimizer`, and
    [Note: Limits of TransformerEngine].

    Its own options are those of the installed release: `adam_w_mode`, `master_weight_dtype`,
    `exp_avg_dtype`, `exp_avg_sq_dtype`, `store_param_remainders`, and `use_decoupled_grad`, which
    follows the model's `GradientPolicy` if it is left out, and must agree with it.
    """

    title = "TransformerEngine's FusedAdam"
    modules = ("transformer_engine", "transformer_engine.pytorch.optimizers")
    oldest = "2.6"  # before, kernels take one dtype for parameter and gradient
    install = "pip install --no-build-isolation transformer_engine[pytorch]"

    def check(self, options: dict[str, Any]) -> None:
        """See `BoundOptimizer.check`."""
        if options.get("use_decoupled_grad") is None:
            options["use_decoupled_grad"] = any(
                alias.attribute == "decoupled_grad" for alias in self._aliases
            )
        self._has_remainders = bool(options.get("store_param_remainders"))
        if self._has_remainders and not (
            self._has_masters and options.get("master_weight_dtype") in (None, torch.float32)
        ):
            raise OptionError(
                f"{self.name} would ignore store_param_remainders without float32 master weights",
                expected="master_weights=True, master_weight_dtype=torch.float32",
                got=f"master_weights={self._has_masters}",
                fix="master_weights=True",
            )
        for group in self._groups:
            # One launch takes all 16-bit parameters of a group, another one the float32 ones.
            halves = [alias for alias in group if alias.local.dtype in _HALVES]
            others = [alias for alias in group if alias.local.dtype not in _HALVES]
            for launch in (halves, others):
                for alias in launch:
                    self._check_launch(launch[0], alias)

    def _check_launch(self, first: Alias, alias: Alias) -> None:
        dtype, grad_dtype = alias.local.dtype, alias.grad_dtype
        if dtype is not first.local.dtype:
            why = f"a launch takes parameters of one dtype, and others are {first.local.dtype}"
            self.refuse(alias, why, "one entry of param_groups for each dtype")
        if grad_dtype is not first.grad_dtype:
            why = f"a launch takes gradients of one dtype, and others are {first.grad_dtype}"
            self.refuse(alias, why, "one entry of param_groups for each GradientPolicy")
        if self.capturable and grad_dtype is not dtype and self._release < "2.20":
            self.refuse(
                alias,
                "with capturable=True, releases before 2.20 take gradients in the parameter's "
                "dtype only",
                "GradientPolicy(dtype=None), capturable=False, a later release, or "
                "shardgrad.optim.AdamW",
            )
        if self._release < "2.17":
            self.require_countable(alias)

    def keeps_master(self, alias: Alias) -> bool:
        """See `BoundOptimizer.keeps_master`. Float32 parameters get a copy too, which no kernel
        reads.
        """
        return self._has_masters and alias.local.dtype in _HALVES

    def start(self, alias: Alias) -> None:
        """See `BoundOptimizer.start`."""
        partner: Any = self.partner
        is_split = self._has_remainders and alias.local.dtype is torch.bfloat16
        partner.initialize_state(alias.local, is_split)

    def value(self, alias: Alias, name: str) -> torch.Tensor:
        """See `BoundOptimizer.value`."""
        partner: Any = self.partner
        value: torch.Tensor = partner.get_unscaled_state(alias.local, name)
        return value

    def write(self, alias: Alias, name: str, value: torch.Tensor) -> None:
        """See `BoundOptimizer.write`."""
        partner: Any = self.partner
        # The partner scales its argument in place, so it gets a copy.
        partner.set_scaled_state(alias.local, name, value.clone())
