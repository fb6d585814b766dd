"""Which parameters are trained together."""

import copy

import torch
from torch import Tensor, nn

from tests.silent.engines import Engine, mlp, whole


def adapter_attached_after_wrapping(engine: Engine) -> nn.Module:
    """An adapter is attached to a model that is wrapped already.

    Report: https://github.com/huggingface/transformers/pull/48792
    Right: all ranks train one adapter.
    """

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.adapter = nn.Linear(8, 8), None

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) if self.adapter is None else self.base(x) + self.adapter(x)

    model = engine.wrap(Net())
    engine.inner(model).adapter = nn.Linear(8, 8)
    return engine.train(model)


def only_blocks_wrapped(engine: Engine) -> dict[str, Tensor]:
    """Blocks are wrapped, and the module that contains them is forgotten.

    Report: https://github.com/Tencent-Hunyuan/UniRL/pull/7
    Right: what lies outside of the blocks is averaged too, or refused by name.
    """
    model = mlp(8)
    model[2] = engine.wrap(model[2])
    engine.train(model)
    return {name.replace("module.", ""): whole(param) for name, param in model.named_parameters()}


def a_part_whose_shard_size_is_one(engine: Engine) -> dict[str, Tensor]:
    """Each part is wrapped if its shard size is above one; that of one part is one.

    Report: https://github.com/nvidia-cosmos/cosmos-predict2.5/issues/143
    Right: that part is averaged too, or refused by name.
    """
    model = mlp()
    for number, shard_size in {0: 2, 2: 1}.items():
        if shard_size > 1:
            model[number] = engine.wrap(model[number])
    engine.train(model)
    return dict(model[2].named_parameters())


def optimizer_before_wrapping(engine: Engine) -> nn.Module:
    """The optimizer is built first, and holds parameters that wrapping replaces.

    Report: https://github.com/huggingface/accelerate/issues/3256
    Right: the model is trained, or the optimizer is named.
    """
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = engine.wrap(net)
    return engine.train(
        model,
        optimizer=engine.optimizer(model, optimizer),
    )


def optimizer_after_a_forward(engine: Engine) -> nn.Module:
    """The model runs once before the optimizer is built.

    Report: https://github.com/pytorch/pytorch/issues/149205
    Right: the model is trained, or the optimizer is refused.
    """
    model = engine.wrap(mlp(), units=[])
    with torch.no_grad():
        model(engine.batch(99))  # to see that it runs
    return engine.train(model)


def unfrozen_after_wrapping(engine: Engine) -> nn.Module:
    """A layer is frozen when the model is wrapped, and unfrozen later.

    Report: https://github.com/Lightning-AI/pytorch-lightning/issues/20340
    Right: from then on it is trained, averaged.
    """
    net = mlp()
    net[0].requires_grad_(False)
    model = engine.wrap(net)

    def loss(step: int) -> Tensor:
        if step == 2:
            engine.inner(model)[0].requires_grad_(True)
        return engine.squares(model, step)

    return engine.train(model, loss, steps=4)


def frozen_after_wrapping(engine: Engine) -> nn.Module:
    """A layer is frozen in the middle of training.

    Report: https://github.com/NVIDIA/apex/pull/46
    Right: the rest goes on, averaged.
    """
    model = engine.wrap(mlp())

    def loss(step: int) -> Tensor:
        if step == 2:
            engine.inner(model)[0].requires_grad_(False)
        return engine.squares(model, step)

    return engine.train(model, loss, steps=4)


def a_discriminator_frozen_in_turns(engine: Engine) -> nn.Module:
    """GAN: generator and discriminator are trained through each other, one frozen at a time.

    Report: https://github.com/pytorch/pytorch/issues/132068
    Right: each is trained in its turn.
    """
    model = engine.wrap(mlp(1))

    def loss(step: int) -> Tensor:
        generator, _, discriminator = engine.inner(model)
        discriminator.requires_grad_(step % 2 == 1)
        generator.requires_grad_(step % 2 == 0)
        return engine.squares(model, step)

    return engine.train(model, loss, steps=4)


def a_tied_weight_that_does_not_divide(engine: Engine) -> nn.Module:
    """A weight is tied across units, and its rows do not divide evenly.

    Report: https://github.com/pytorch/pytorch/issues/176076
    Right: every row gets the gradients of both uses.
    """
    net = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5, bias=False))
    net[1].weight = net[0].weight
    model = engine.wrap(net)
    return engine.train(model, lambda step: engine.of_tokens(model, step, vocabulary=5))


def tied_after_wrapping(engine: Engine) -> nn.Module:
    """Weights are tied after the model is wrapped.

    Report: https://github.com/NVIDIA-NeMo/Automodel/pull/2213
    Right: one weight gets the gradients of both uses.
    """
    model = engine.wrap(nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 6, bias=False)))
    embedding, head = engine.inner(model)
    head.weight = embedding.weight
    return engine.train(model, lambda step: engine.of_tokens(model, step, vocabulary=6))


def an_unused_layer_decays(engine: Engine) -> nn.Module:
    """A layer that no rank uses, and weight decay.

    Report: https://github.com/pytorch/pytorch/issues/28294
    Right: the layer stays as it is.
    """

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x)

    model = engine.wrap(Net(nn.Linear(8, 8), nn.Linear(8, 8)), units=[])
    return engine.train(
        model,
        optimizer=engine.optimizer(model, torch.optim.AdamW, lr=0.1, weight_decay=0.5),
    )


def a_copy_as_target(engine: Engine) -> nn.Module:
    """A target network is a copy of the wrapped model, and follows it slowly.

    Report: https://github.com/pytorch/pytorch/issues/82070
    Report: https://github.com/deepspeedai/DeepSpeed/issues/2056
    Right: the copy has the model's weights, and follows them.
    """
    model = engine.wrap(mlp())
    optimizer = engine.optimizer(model)
    target = copy.deepcopy(model).requires_grad_(False)

    def loss(step: int) -> Tensor:
        with torch.no_grad():
            goal = target(engine.batch(50 + step)) + 1
        return (model(engine.batch(step)) - goal).square().mean()

    def follow(step: int) -> None:
        for slow, param in zip(target.parameters(), model.parameters(), strict=True):
            slow.data.lerp_(param.data, 0.5)

    return engine.train(model, loss, optimizer=optimizer, after=follow)
