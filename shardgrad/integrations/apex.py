"""apex' FusedAdam on sharded parameters.

[Note: Limits of apex]
apex has had one version number, 0.1, for years, so nothing here depends on the version.

* PyPI's `apex` is another project, and NVIDIA's needs its native library `amp_C`: both are checked.
* It reads `param.grad` only. A decoupled gradient raises.
* Kernels assume that the parameter has the gradient's dtype, without a check. Other dtypes raise.
* Kernels count elements in 32 bits. Longer shards raise.
* A launch does nothing if its last tensor is empty. Empty shards are not passed.
* `master_weights` needs `capturable`, and is ignored for bfloat16. Both raise.
* Master weights are created by the constructor and not saved, so a resumed run would return to the
  weights of that moment. Here they are copied from the parameters at the first step, and saved.
* `add_param_group` does not create master weights, so new parameters would not be trained. It
  raises.
* With `capturable`, a group's learning rate must be a tensor. It is converted.
* With `capturable`, gradients are divided by the scale of a loss scaler in place.

Source: `apex/optimizers/fused_adam.py`, `csrc/multi_tensor_adam.cu` and
`csrc/multi_tensor_apply.cuh` in NVIDIA/apex, commit 6424da3b.
"""

from __future__ import annotations

from typing import Any

import torch

from shardgrad.integrations.aliases import Alias
from shardgrad.integrations.fused_adam import MOMENTS, BoundOptimizer

__all__ = ["FusedAdam"]


class FusedAdam(BoundOptimizer):
    """apex' FusedAdam over sharded parameters. See `BoundOptimizer`, and [Note: Limits of apex].

    Its own option is `adam_w_mode`; `master_weights` needs `capturable`.
    """

    title = "apex' FusedAdam"
    modules = ("apex", "apex.optimizers", "amp_C")
    install = "build https://github.com/NVIDIA/apex with APEX_CPP_EXT=1 APEX_CUDA_EXT=1"

    def check(self, options: dict[str, Any]) -> None:
        """See `BoundOptimizer.check`."""
        for alias in self._aliases:
            if alias.grad_dtype is not alias.local.dtype:
                why = "its kernels would read the parameter as if it had the gradient's dtype"
                self.refuse(alias, why, "GradientPolicy(dtype=None), or shardgrad.optim.AdamW")
            if self._has_masters and alias.local.dtype is torch.bfloat16:
                why = "it keeps master copies of bfloat16 parameters without ever using them"
                fix = 'shardgrad.optim.AdamW(master="float32"), or TransformerEngine'
                self.refuse(alias, why, fix)
            self.require_countable(alias)

    def keeps_master(self, alias: Alias) -> bool:
        """See `BoundOptimizer.keeps_master`. Here float32 parameters are trained through their copy
        too.
        """
        return self._has_masters

    def start(self, alias: Alias) -> None:
        """See `BoundOptimizer.start`."""
        state = self.partner.state[alias.local]
        for name in MOMENTS:
            state[name] = torch.zeros_like(alias.local, dtype=torch.float32)

    def stored(self, alias: Alias, name: str) -> torch.Tensor:
        """See `BoundOptimizer.stored`. Master weights are in groups of their own."""
        partner: Any = self.partner
        if name in MOMENTS:
            return super().stored(alias, name)
        found: torch.Tensor = next(
            master
            for group, others in zip(partner.param_groups, partner.param_groups_master, strict=True)
            for param, master in zip(group["params"], others["params"], strict=True)
            if param is alias.local
        )
        return found
