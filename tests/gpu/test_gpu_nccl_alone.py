"""One rank whose collectives go through NCCL all the same: the transport that several GPUs use.

A group of one needs no collective, so the engine has none there. Here it is made to have them,
which is all of NCCL that one GPU can show: launches, waits, and captures of both.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shardgrad
from shardgrad.engine import comm_context
from shardgrad.engine.transports import StreamTransport
from tests.support.graphed import on_one_gpu, step_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.usefixtures("one_rank"),
]

STEPS = 20
LOW_PRECISION = shardgrad.MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32
)


def train(*, graphed: bool, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]
    model = on_one_gpu(nn.Sequential(*layers), **options)
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)
    step: Any = step_of(model, optimizer, 0.1)
    if graphed:
        step = shardgrad.graphed_step(model, optimizer)(step)
    seen = []
    for number in range(STEPS):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(number)).cuda()
        seen.append(step(x).clone())
    seen += [p.to_local().detach() for p in model.parameters()]
    if graphed:
        assert step.captures == 1
        step.close()
    return seen


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
@pytest.mark.parametrize("options", [{}, {"mp_policy": LOW_PRECISION}], ids=["float32", "bfloat16"])
def test_twenty_steps_are_those_without_collectives_bit_for_bit(
    options: dict[str, Any], graphed: bool
) -> None:
    right = train(graphed=False, **options)
    launched: list[str] = []

    class Counted(StreamTransport):
        def all_gather(self, *args: Any, **kwargs: Any) -> Any:
            launched.append("all-gather")
            return super().all_gather(*args, **kwargs)

        def reduce_scatter(self, *args: Any, **kwargs: Any) -> Any:
            launched.append("reduce-scatter")
            return super().reduce_scatter(*args, **kwargs)

    with patch.object(comm_context, "transport_for", lambda group, device: Counted(group)):
        ours = train(graphed=graphed, **options)
    assert {"all-gather", "reduce-scatter"} == set(launched)
    assert all(map(torch.equal, ours, right))
