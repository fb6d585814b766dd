"""One rank whose collectives go through NCCL all the same: the transport that several GPUs use.

A group of one needs no collective, so the engine has none there. Here it is made to have them,
which is all of NCCL that one GPU can show: launches, waits, and captures of both.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import shardgrad
from shardgrad.engine import comm_context
from shardgrad.engine.transports import StreamTransport
from tests.support.gpu import ON_ONE_RANK
from tests.support.graphed import (
    Graphed,
    Values,
    eager,
    on_one_gpu,
    require_replays,
    require_same,
    step_of,
    values_of,
)

pytestmark = ON_ONE_RANK

STEPS = 20
LAUNCHES = StreamTransport.all_gather, StreamTransport.reduce_scatter
LOW_PRECISION = shardgrad.MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32
)


def train(graphed: Graphed, options: dict[str, Any]) -> Values:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]
    model = on_one_gpu(nn.Sequential(*layers), **options)
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)
    step = graphed(model, optimizer)(step_of(model, optimizer, 0.1))
    for number in range(STEPS):
        yield step(torch.randn(4, 32, generator=torch.Generator().manual_seed(number)).cuda())
    require_replays(step, 1, STEPS - 3)
    yield model


@pytest.mark.parametrize("graphed", [eager, shardgrad.graphed_step])
@pytest.mark.parametrize("options", [{}, {"mp_policy": LOW_PRECISION}], ids=["float32", "bfloat16"])
def test_twenty_steps_are_those_without_collectives_bit_for_bit(
    options: dict[str, Any], graphed: Graphed
) -> None:
    right = values_of(train(eager, options))
    with (
        patch.object(comm_context, "transport_for", lambda group, device: StreamTransport(group)),
        patch.object(StreamTransport, "all_gather", autospec=True) as gather,
        patch.object(StreamTransport, "reduce_scatter", autospec=True) as reduce,
    ):
        gather.side_effect, reduce.side_effect = LAUNCHES
        require_same(right, values_of(train(graphed, options)))
    assert gather.called
    assert reduce.called
