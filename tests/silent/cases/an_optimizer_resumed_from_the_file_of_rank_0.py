"""Rank 0 saves the optimizer's `state_dict()` with `torch.save`, and every rank loads the file.

Report: https://github.com/huggingface/transformers/issues/23034
Right: every rank goes on with its own moments, or is refused.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, mlp, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp(4))
    optimizer = engine.optimizer(model, torch.optim.Adam, lr=0.1)

    def resume(step: int) -> None:
        if step == 1:
            state, file = optimizer.state_dict(), f"{engine.folder}/optimizer.pt"
            if rank == 0:
                torch.save(state, file)
            torch.distributed.barrier()
            optimizer.load_state_dict(torch.load(file, weights_only=False))

    return train(engine, model, rank, steps=4, optimizer=optimizer, after=resume)
