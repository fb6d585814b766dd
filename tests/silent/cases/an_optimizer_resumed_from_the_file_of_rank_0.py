"""Rank 0 saves the optimizer's `state_dict()` with `torch.save`, and every rank loads the file.

Report: https://github.com/huggingface/transformers/issues/23034
Right: every rank goes on with its own moments, or is refused.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)))
    optimizer = engine.optimizer(model, torch.optim.Adam, lr=0.1)
    for step in range(4):
        engine.backward(model(batch(rank, step)).square().mean(), model)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            state, file = optimizer.state_dict(), f"{engine.folder}/optimizer.pt"
            if rank == 0:
                torch.save(state, file)
            torch.distributed.barrier()
            optimizer.load_state_dict(torch.load(file, weights_only=False))
    return model
