"""Which activations of a block backward recomputes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def checkpointed(block: nn.Module, mode: str) -> nn.Module:
    """Returns a block whose backward recomputes activations.

    Args:
        block: the block, before `fully_shard`, so that it is recomputed with unsharded parameters.
        mode: "none" returns the block itself; "full" keeps the block's inputs only; "selective"
            also keeps the results of attention and of every second matrix product, which cost most
            to compute again.
    """
    if mode == "none":
        return block
    selective: dict[str, Any] = {"context_fn": _contexts} if mode == "selective" else {}
    wrapped: nn.Module = checkpoint_wrapper(block, preserve_rng_state=False, **selective)
    return wrapped


def _contexts() -> Any:
    products = {False: 0, True: 0}  # met so far: in forward, and when it is recomputed

    def policy(
        context: SelectiveCheckpointContext, func: OpOverload, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        if func in _ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if func in _PRODUCTS:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
