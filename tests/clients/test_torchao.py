"""torchao's training in few bits, captured: its tensor subclasses under the engine.

Float8 is emulated, as not every device has products of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardgrad
from tests.support.graphed import on_one_gpu, step_of
from tests.support.parity import stack
from tests.support.under_patch import skip_without

skip_without("torchao")

WIDTH = 32  # float8 layers want multiples of 16


def float8() -> nn.Sequential:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = stack(WIDTH, 2 * WIDTH, WIDTH)
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
    return convert_to_float8_training(model, config=config)


def int8() -> nn.Sequential:
    return _quantized("int8_mixed_precision_training")


def bitnet() -> nn.Sequential:
    return _quantized("bitnet_training")


def _quantized(name: str) -> nn.Sequential:
    from torchao.prototype import quantized_training
    from torchao.quantization import quantize_

    model = stack(WIDTH, 2 * WIDTH, WIDTH)
    quantize_(model, getattr(quantized_training, name)())
    return model


class LoRA(nn.Module):
    """A linear layer of 4 bits, which is frozen, and an adapter."""

    def __init__(self, width: int, rank: int) -> None:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        super().__init__()
        self.weight = nn.Parameter(to_nf4(torch.randn(width, width)), requires_grad=False)
        self.down, self.up = nn.Linear(width, rank), nn.Linear(rank, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        added: torch.Tensor = self.up(self.down(x))
        return linear_nf4(x, self.weight) / 16 + added


def nf4() -> nn.Sequential:
    return nn.Sequential(LoRA(256, 8), nn.Tanh(), LoRA(256, 8))


def losses(build: Callable[[], nn.Sequential], *, is_graph: bool) -> list[float]:
    torch.manual_seed(0)
    model = on_one_gpu(build())
    trained = [p for p in model.parameters() if p.requires_grad]
    rate = torch.tensor(1e-2, device="cuda")  # as `graphed_step` makes it
    optimizer = torch.optim.AdamW(trained, lr=rate, capturable=True)
    step: Any = step_of(model, optimizer)
    if is_graph:
        step = shardgrad.graphed_step(model, optimizer)(step)
    width = 256 if build is nf4 else WIDTH
    batches = [torch.randn(32, width, device="cuda") for _ in range(8)]
    found = [step(x).item() for x in batches]
    assert not is_graph or step.replays == 5
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("build", [float8, int8, bitnet, nf4])
@pytest.mark.usefixtures("one_rank")
def test_captured_steps_have_the_bits_of_eager_ones(build: Callable[[], nn.Sequential]) -> None:
    eager, captured = (losses(build, is_graph=each) for each in (False, True))
    assert eager == captured
    assert len(set(eager)) == len(eager)
