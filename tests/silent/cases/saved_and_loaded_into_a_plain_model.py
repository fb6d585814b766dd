"""`state_dict()` is saved with `torch.save`, and a plain model loads it.

Report: https://github.com/huggingface/transformers/issues/20082
Report: https://github.com/pytorch/examples/issues/1029
Right: the plain model has the trained weights, or loading is refused.
"""

import io

import torch

from tests.silent.engines import Engine, mlp, train


def program(engine: Engine, rank: int) -> dict[str, torch.Tensor]:
    model = train(engine, engine.wrap(mlp()), rank)
    file = io.BytesIO()
    torch.save(engine.inner(model).state_dict(), file)
    file.seek(0)
    fresh = mlp()
    fresh.load_state_dict(torch.load(file, weights_only=False), strict=False)
    return {name: param.detach() for name, param in fresh.named_parameters()}
