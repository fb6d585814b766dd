"""What the loss goes through."""

import torch
from torch import Tensor, nn

from tests.silent.engines import Engine, mlp


def loss_through_the_inner_module(engine: Engine) -> nn.Module:
    """The loss goes through `model.module`, past the wrapper.

    Report: https://github.com/jingyaogong/minimind/issues/853
    Right: gradients are averaged.
    """
    model = engine.wrap(mlp())

    def loss(step: int) -> Tensor:
        policy = engine.inner(model)
        return policy(engine.batch(step)).square().mean()

    return engine.train(model, loss)


def loss_in_another_method(engine: Engine) -> nn.Module:
    """The loss is computed by a method that is not forward.

    Report: https://github.com/OpenTSLM/OpenTSLM/pull/49
    Right: gradients are averaged, or the call is refused by name.
    """

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.scale = nn.Parameter(torch.ones(8))

        def compute_loss(self, x: Tensor) -> Tensor:
            return (self.b(self.a(x)) * self.scale - x).square().mean()

    model = engine.wrap(Net())
    return engine.train(model, lambda step: engine.inner(model).compute_loss(engine.batch(step)))


def a_functional_call(engine: Engine) -> nn.Module:
    """The model is called by `torch.func.functional_call`, with its own parameters.

    Report: https://github.com/soran-ghaderi/torchebm/pull/251
    Right: gradients are averaged as after a call of the model.
    """
    model = engine.wrap(mlp())

    def loss(step: int) -> Tensor:
        net = engine.inner(model)
        out = torch.func.functional_call(net, dict(net.named_parameters()), (engine.batch(step),))
        return out.square().mean()

    return engine.train(model, loss)


def a_weight_used_outside_of_forward(engine: Engine) -> nn.Module:
    """The loss uses the head's weight itself, as fused cross-entropies do.

    Report: https://github.com/apple/ml-cross-entropy/issues/31
    Right: the head is trained, averaged, or the use is refused by name.
    """

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x).tanh()

    model = engine.wrap(Net(nn.Linear(8, 8), nn.Linear(8, 6, bias=False)))

    def loss(step: int) -> Tensor:
        hidden = model(engine.batch(step))
        logits = hidden @ engine.inner(model)[1].weight.t()
        return nn.functional.cross_entropy(logits, torch.arange(4))

    return engine.train(model, loss)


def attention_that_uses_a_childs_weight(engine: Engine) -> nn.Module:
    """`MultiheadAttention` uses the weight of its projection, a unit, without calling it.

    Report: https://github.com/facebookresearch/fairscale/issues/899
    Right: the weight is trained, or the call is refused by name.
    """
    attention = nn.MultiheadAttention(8, 2)
    model = engine.wrap(attention, units=[attention.out_proj])  # a policy that wraps every Linear

    def loss(step: int) -> Tensor:
        x = engine.batch(step)
        return model(x, x, x)[0].square().mean()

    return engine.train(model, loss)


def an_output_of_a_class_of_its_own(engine: Engine) -> nn.Module:
    """Forward returns an object that torch cannot look into.

    Report: https://github.com/pytorch/pytorch/issues/124666
    Report: https://github.com/pytorch/pytorch/issues/168143
    Right: gradients are averaged.
    """

    class Output:
        def __init__(self, loss: Tensor) -> None:
            self.loss = loss

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Output:
            return Output(super().forward(x).square().mean())

    model = engine.wrap(Net(*mlp(8)), units=[])
    return engine.train(model, lambda step: model(engine.batch(step)).loss)


def an_output_changed_in_place(engine: Engine) -> nn.Module:
    """The output of a layer is a view, and is changed in place.

    Report: https://github.com/pytorch/pytorch/issues/181832
    Right: the layer is trained.
    """

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x).unsqueeze(0) * self.weight.mean()).squeeze(0)

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y = self[0](x)
            y += x
            return self[1](y)

    model = engine.wrap(Net(Block(8, 8), nn.Linear(8, 8)))
    return engine.train(model)


def noise_drawn_in_the_step(engine: Engine) -> nn.Module:
    """Diffusion: a step, replayed where an engine can, draws times, noise and dropout masks.

    Report: https://github.com/baidu-baige/LoongForge/issues/49
    Right: every step draws numbers of its own, those that the step draws without an engine.
    """
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8))
    model = engine.wrap(model)
    optimizer = engine.optimizer(model)
    torch.manual_seed(engine.rank)

    def train(x: Tensor) -> None:
        time, noise = torch.rand(len(x), 1), torch.randn_like(x)
        predicted = model(time * x + (1 - time) * noise)
        engine.backward((predicted - (x - noise)).square().mean(), model)
        optimizer.step()
        optimizer.zero_grad()

    train = engine.replayed(train, model, optimizer)
    for step in range(8):
        train(engine.batch(step))
    return model
