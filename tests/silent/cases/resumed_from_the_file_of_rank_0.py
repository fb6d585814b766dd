"""Rank 0 saves the model's `state_dict()` with `torch.save`, and every rank loads the file.

Report: https://github.com/huggingface/accelerate/pull/4206
Right: every rank goes on with its own shard, or is refused.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, mlp, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp(4))

    def resume(step: int) -> None:
        if step == 1:
            state, file = model.state_dict(), f"{engine.folder}/model.pt"
            if rank == 0:
                torch.save(state, file)
            torch.distributed.barrier()
            model.load_state_dict(torch.load(file, weights_only=False))

    return train(engine, model, rank, steps=4, after=resume)
