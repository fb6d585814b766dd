"""Muon under HSDP: its update takes whole matrices.

Report: https://github.com/ByteDance-Seed/VeOmni/pull/1011
Right: updates are those of whole matrices.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))
    model = engine.wrap(model, mesh=(2, 1))
    return train(
        engine,
        model,
        rank,
        optimizer=engine.optimizer(model, torch.optim.Muon, lr=0.1),
    )
