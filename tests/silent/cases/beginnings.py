"""What ranks begin with."""

import io
from functools import partial

import torch
from torch import Tensor, nn

from tests.silent.engines import Engine, mlp


def other_weights_on_each_rank(engine: Engine) -> nn.Module:
    """Every rank seeds itself before it builds the model.

    Report: https://github.com/pytorch/torchtitan/issues/166
    Right: all ranks begin with rank 0's weights, or the difference is named.
    """
    torch.manual_seed(engine.rank)
    model = engine.wrap(mlp())
    return engine.train(model)


def layers_in_another_order(engine: Engine) -> nn.Module:
    """Ranks register the same layers in another order.

    Report: https://github.com/NVIDIA/Megatron-LM/pull/2218
    Right: layers of one name are averaged, or the difference is named.
    """

    class Net(nn.Module):
        def __init__(self, names: list[str]) -> None:
            super().__init__()
            self.heads = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})
            for name in ("left", "right"):
                nn.init.constant_(self.heads[name].weight, 0.1 if name == "left" else 0.3)

        def forward(self, x: Tensor) -> Tensor:
            return self.heads["left"](x).tanh() + self.heads["right"](x)

    names = (
        ["left", "right"] if engine.rank == 0 else ["right", "left"]
    )  # the order of a set, for example
    model = engine.wrap(Net(names), units=[])
    return engine.train(model)


def resumed_from_the_file_of_rank_0(engine: Engine) -> nn.Module:
    """Rank 0 saves the model's `state_dict()` with `torch.save`, and every rank loads the file.

    Report: https://github.com/huggingface/accelerate/pull/4206
    Right: every rank goes on with its own shard, or is refused.
    """
    model = engine.wrap(mlp(4))
    return engine.train(model, steps=4, after=partial(engine.resumed, model))


def an_optimizer_resumed_from_the_file_of_rank_0(engine: Engine) -> nn.Module:
    """Rank 0 saves the optimizer's `state_dict()` with `torch.save`, and every rank loads the file.

    Report: https://github.com/huggingface/transformers/issues/23034
    Right: every rank goes on with its own moments, or is refused.
    """
    model = engine.wrap(mlp(4))
    optimizer = engine.optimizer(model, torch.optim.Adam, lr=0.1)
    resume = partial(engine.resumed, optimizer)
    return engine.train(model, steps=4, optimizer=optimizer, after=resume)


def saved_and_loaded_into_a_plain_model(engine: Engine) -> dict[str, Tensor]:
    """`state_dict()` is saved with `torch.save`, and a plain model loads it.

    Report: https://github.com/huggingface/transformers/issues/20082
    Report: https://github.com/pytorch/examples/issues/1029
    Right: the plain model has the trained weights, or loading is refused.
    """
    model = engine.train(engine.wrap(mlp()))
    file = io.BytesIO()
    torch.save(engine.inner(model).state_dict(), file)
    file.seek(0)
    fresh = mlp()
    fresh.load_state_dict(torch.load(file, weights_only=False), strict=False)
    return {name: param.detach() for name, param in fresh.named_parameters()}
