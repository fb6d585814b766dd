"""apex's FusedAdam on sharded parameters.

[Note: Limits of apex]
apex has had one version number, 0.1, for years, so nothing here depends on the version.

* PyPI's `apex` is another project, and NVIDIA's needs its native library `amp_C`: both are checked.
* It reads `param.grad` only. A decoupled gradient raises.
* Kernels assume that the parameter has the gradient's dtype, without a check. Other dtypes raise.
* Its master weights are copied when it is built, and are not saved. They raise.
* Kernels count elements in 32 bits and would update only a part of a longer shard. That raises.
* A launch does nothing if its last tensor is empty. Empty shards are not passed.
* With `capturable`, gradients are divided by the scale of a loss scaler in place.

Source: `apex/optimizers/fused_adam.py`, `csrc/multi_tensor_adam.cu` and
`csrc/multi_tensor_apply.cuh` in NVIDIA/apex, commit 6424da3b.
"""

from __future__ import annotations

from typing import Any

import torch

from shardgrad.integrations.fused_adam import MOMENTS, Alias, BoundOptimizer

__all__ = ["FusedAdam"]


class FusedAdam(BoundOptimizer):
    """apex' FusedAdam over sharded parameters. See `BoundOptimizer`, and [Note: Limits of apex]."""

    title = "apex' FusedAdam"
    modules = ("apex", "apex.optimizers", "amp_C")
    install = "build https://github.com/NVIDIA/apex with APEX_CPP_EXT=1 APEX_CUDA_EXT=1"

    def check(self, alias: Alias, options: dict[str, Any]) -> None:
        """See `BoundOptimizer.check`."""
        super().check(alias, options)
        if alias.grad_dtype is not alias.local.dtype:
            why = "its kernels would read the parameter as if it had the gradient's dtype"
            self.refuse(alias, why, "GradientPolicy(dtype=None), or shardgrad.optim.AdamW")
        if alias.local.numel() > 2**31 - 1:
            why = "its kernels count the elements of a tensor in 32 bits, and would update a part"
            self.refuse(alias, why, "more ranks, or shardgrad.optim.AdamW")
        if options.get("master_weights"):
            why = "it copies master weights when it is built, and saves none"
            fix = 'shardgrad.optim.AdamW(master="float32"), or TransformerEngine'
            self.refuse(alias, why, fix)

    def start(self, alias: Alias) -> None:
        """See `BoundOptimizer.start`."""
        state = self.partner.state[alias.local]
        for name in MOMENTS:
            state[name] = torch.zeros_like(alias.local, dtype=torch.float32)
