"""TransformerEngine's FusedAdam on sharded parameters.

[Note: Limits of TransformerEngine]
Limits that concern a caller. Numbers are those of the project's issues and pull requests. Other
limits, which its constructor, steps and kernels check, raise with the project's own message.

* Releases before 2.17 are refused: their kernels count elements in 32 bits, and before 2.6 take one
  dtype for parameter and gradient (#1888).
* Before 2.18 a launch does nothing if its last tensor is empty (#3207, #3212). Empty shards are not
  passed.
* Before 2.20 `capturable` needs gradients in the parameter's dtype (#3358, #3414).
* Before 2.20 a group without parameters does not count steps (#3318). With aliases, no group is
  empty: see [Note: Aliases].
* A parameter whose gradient is None is skipped silently, also if the gradient is in the other
  attribute. That raises here.
* `store_param_remainders` has no effect without float32 masters. That raises here.
* Float32 parameters get a master copy that nothing updates. It is not saved.
* With `capturable`, the step count follows the found_inf of the step before, and gradients are
  divided by the scale of a loss scaler in place.

Source: `transformer_engine/pytorch/optimizers/fused_adam.py` and `common/multi_tensor/adam.cu` in
NVIDIA/TransformerEngine, tags v2.4 to v2.18 and commit d0067d0d.
"""

from __future__ import annotations

from typing import Any

import torch

from shardgrad.integrations.fused_adam import MASTER, MOMENTS, Alias, BoundOptimizer

__all__ = ["FusedAdam"]


class FusedAdam(BoundOptimizer):
    """TransformerEngine's FusedAdam over sharded parameters. See `BoundOptimizer`, and
    [Note: Limits of TransformerEngine].

    `use_decoupled_grad` follows the model's `GradientPolicy` if it is left out, and must agree with
    it.
    """

    title = "TransformerEngine's FusedAdam"
    modules = ("transformer_engine", "transformer_engine.pytorch.optimizers")
    oldest = "2.17"
    install = "pip install --no-build-isolation transformer_engine[pytorch]"

    def check(self, alias: Alias, options: dict[str, Any]) -> None:
        """See `BoundOptimizer.check`."""
        super().check(alias, options)
        if alias.attribute == "decoupled_grad":
            options.setdefault("use_decoupled_grad", True)
        is_float32 = options.get("master_weight_dtype", torch.float32) is torch.float32
        if options.get("store_param_remainders") and not (
            options.get("master_weights") and is_float32
        ):
            why = "it would ignore store_param_remainders without float32 master weights"
            self.refuse(alias, why, "master_weights=True")

    def names(self, alias: Alias) -> tuple[str, ...]:
        """See `BoundOptimizer.names`. Float32 parameters get a master too, which no kernel
        reads.
        """
        partner: Any = self.partner
        has_master = partner.master_weights and alias.local.dtype is not torch.float32
        return (*MOMENTS, MASTER) if has_master else MOMENTS

    def start(self, alias: Alias) -> None:
        """See `BoundOptimizer.start`."""
        partner: Any = self.partner
        is_split = partner.store_param_remainders and alias.local.dtype is torch.bfloat16
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
