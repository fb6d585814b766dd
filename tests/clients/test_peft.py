"""LoRA through PEFT: a frozen base in one dtype, adapters in another."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.parity import Tensors
from tests.support.ranks import Ranks
from tests.support.under_patch import STARTUP_S, same_bits_under_both, skip_without

skip_without("peft")

# Whichever test is first, imports the framework on both ranks.
pytestmark = pytest.mark.timeout(300)


def adapted(dtype: torch.dtype) -> nn.Module:
    """A Llama in `dtype` with adapters, which PEFT makes float32 where the base is narrower."""
    import peft

    from tests.support.tiny_models import llama

    targets = ["q_proj", "v_proj"]
    return peft.get_peft_model(
        llama().to(dtype), peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM")
    )


def sharded_by_hand(dtype: torch.dtype) -> tuple[nn.Module, Tensors]:
    """Frozen and trainable parameters of both dtypes in each unit."""
    from torch.distributed.fsdp import fully_shard

    from tests.support.tiny_models import blocks, train

    model = adapted(dtype)
    for block in blocks(model.get_base_model()):
        fully_shard(block)
    return fully_shard(model), train(model)


def through_accelerate() -> tuple[nn.Module, Tensors]:
    from tests.support.accelerated import accelerated, cpus_as_accelerators, train

    with cpus_as_accelerators():
        prepared = accelerated(adapted(torch.float32))
        return prepared[1], train(*prepared)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_equals_fsdp2(client_ranks: Ranks, dtype: torch.dtype) -> None:
    client_ranks.run(same_bits_under_both, sharded_by_hand, dtype, timeout_s=STARTUP_S)


def test_lora_through_accelerate_equals_fsdp2(client_ranks: Ranks) -> None:
    skip_without("accelerate")
    client_ranks.run(same_bits_under_both, through_accelerate, timeout_s=STARTUP_S)
