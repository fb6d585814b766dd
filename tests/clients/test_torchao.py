"""torchao's float8 training, emulated on the CPU: linear layers that cast weights, inputs and
gradients.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.parity import Tensors, stack
from tests.support.ranks import Ranks
from tests.support.under_patch import STARTUP_S, same_bits_under_both, skip_without

skip_without("torchao")

# Whichever test is first, imports the framework on both ranks.
pytestmark = pytest.mark.timeout(300)

WIDTH = 32  # float8 layers want multiples of 16


def float8_layers(*, gathers_float8: bool) -> tuple[nn.Module, Tensors]:
    from torch.distributed.fsdp import fully_shard
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = stack(WIDTH, 2 * WIDTH, WIDTH).bfloat16()
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gathers_float8)
    convert_to_float8_training(model, config=config)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    notes: Tensors = {}
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(16, WIDTH, generator=generator).bfloat16()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        notes[f"loss of step {step}"] = loss.detach()
    return model, notes


@pytest.mark.parametrize("gathers_float8", [False, True])
def test_float8_layers_equal_fsdp2(client_ranks: Ranks, *, gathers_float8: bool) -> None:
    """`gathers_float8` makes weights a tensor subclass with FSDP2's hooks around the all-gather."""
    client_ranks.run(
        same_bits_under_both, float8_layers, gathers_float8=gathers_float8, timeout_s=STARTUP_S
    )
