"""Two tasks: the first one's gradients are kept while the second goes backward.

Report: https://github.com/NVIDIA/TransformerEngine/pull/2937
Right: what was kept does not change.
"""

from torch import nn

from tests.silent.engines import Engine, mlp, squares


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())
    optimizer = engine.optimizer(model)
    for step in range(3):
        kept = []
        for task in range(2):
            engine.backward(squares(model, rank, 2 * step + task), model)
            kept.append([param.grad for param in model.parameters()])
            for param in model.parameters():
                param.grad = None
        for param, one, other in zip(model.parameters(), *kept, strict=True):
            param.grad = 0.25 * one + 0.75 * other
        optimizer.step()
        optimizer.zero_grad()
    return model
