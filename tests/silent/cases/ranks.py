"""Ranks that do not do the same."""

import contextlib

import torch
from torch import Tensor, nn

from tests.silent.engines import Engine, mlp


def equal_experts(engine: Engine) -> nn.Module:
    """Ranks use different experts of one size in the same step.

    Report: https://github.com/pytorch/pytorch/issues/158719
    Right: each expert gets its own gradients, halved.
    """

    class Net(nn.Sequential):
        def forward(self, x: Tensor, expert: int) -> Tensor:
            return self[expert](x)

    model = engine.wrap(Net(nn.Linear(8, 8), nn.Linear(8, 8)), units=[])
    return engine.train(
        model, lambda step: model(engine.batch(step), (engine.rank + step) % 2).square().mean()
    )


def a_tower_unused_on_one_rank(engine: Engine) -> nn.Module:
    """One rank has no image in its batch, so the image tower has no gradient there.

    Report: https://github.com/huggingface/transformers/issues/37186
    Right: the tower's gradient is the other rank's, halved.
    """

    class Net(nn.Sequential):
        def forward(self, x: Tensor, image: bool) -> Tensor:
            return self[0](x) + self[1](x) if image else self[0](x)

    model = engine.wrap(Net(nn.Linear(8, 8), nn.Linear(8, 8, bias=False)), units=[])
    return engine.train(
        model, lambda step: model(engine.batch(step), engine.rank == 0).square().mean()
    )


def a_skipped_layer(engine: Engine) -> nn.Module:
    """LayerDrop: a rank skips a layer that the other rank runs.

    Report: https://github.com/facebookresearch/fairscale/issues/796
    Right: a layer's gradients are averaged with those of the ranks that ran it, or ranks are told.
    """

    class Net(nn.Sequential):
        def forward(self, x: Tensor, dropped: int) -> Tensor:
            for number, layer in enumerate(self):
                x = x if number == dropped else layer(x).tanh()
            return x

    model = engine.wrap(Net(*(nn.Linear(8, 8) for _ in range(3))))
    return engine.train(
        model, lambda step: model(engine.batch(step), (engine.rank + step) % 3).square().mean()
    )


def fewer_batches_on_one_rank(engine: Engine) -> nn.Module:
    """A rank has one batch less than the other.

    Report: https://github.com/deepspeedai/DeepSpeed/issues/2223
    Right: the last gradients are averaged with none, or a rank that waits says for whom.
    """
    model = engine.wrap(mlp())

    def loss(step: int) -> Tensor | None:
        is_left = engine.rank == 0 or step < 3
        return engine.squares(model, step) if is_left else None

    return engine.train(model, loss, steps=4)


def a_loss_skipped_on_one_rank(engine: Engine) -> nn.Module:
    """A rank skips the backward of a loss that is not finite, and goes on.

    Report: https://github.com/Project-MONAI/monai-physio/pull/137
    Right: the other rank's gradients are averaged with none, or ranks are told that they are apart.
    """
    model = engine.wrap(mlp(8))

    def loss(step: int) -> Tensor | None:
        loss = engine.squares(model, step)
        if engine.rank == 1 and step == 1:
            loss = loss * float("nan")
        return loss if loss.isfinite() else None

    return engine.train(model, loss, steps=4)


def a_bad_sample_on_one_rank(engine: Engine) -> nn.Module:
    """A bad sample raises inside the model of one rank, which catches that and goes on.

    Report: https://github.com/NVIDIA-NeMo/Automodel/pull/2468
    Right: the other rank's gradients are averaged with none, or ranks are told that they are apart.
    """

    class Check(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.abs().max() > 100:
                raise ValueError("bad sample")
            return x

    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), Check(), nn.Linear(8, 8)))

    def loss(step: int) -> Tensor:
        x, loss = engine.batch(step), None
        if engine.rank == 1 and step == 1:
            x[0] = 1e4
        with contextlib.suppress(ValueError):
            loss = model(x).square().mean()
        return loss

    return engine.train(model, loss, steps=4)


def evaluation_on_rank_0(engine: Engine) -> nn.Module:
    """Rank 0 alone evaluates the model between two steps.

    Report: https://github.com/facebookresearch/fairscale/issues/703
    Right: it evaluates, or ranks are told that they are apart.
    """
    model = engine.wrap(mlp(8))

    def evaluate(step: int) -> None:
        if engine.rank == 0:
            with torch.no_grad():
                model(engine.batch(99))

    return engine.train(model, after=evaluate)


def saving_on_rank_0(engine: Engine) -> nn.Module:
    """Rank 0 alone collects the whole weights, to save them.

    Report: https://github.com/kyuz0/amd-strix-halo-llm-finetuning/pull/6
    Right: it gets them, or a rank that waits says for whom.
    """
    model = engine.wrap(mlp(8))

    def save(step: int) -> None:
        if engine.rank == 0:
            engine.parameters(model)

    return engine.train(model, after=save)


def texts_of_different_length(engine: Engine) -> nn.Module:
    """Ranks generate until an end token, one of them for longer.

    Report: https://github.com/deepspeedai/DeepSpeed/issues/8262
    Right: each generates its text, or ranks are told that they are apart.
    """
    model = engine.wrap(mlp(8))

    def loss(step: int) -> Tensor:
        with torch.no_grad():
            x = engine.batch(step)
            for _ in range(2 + engine.rank):  # tokens until the end
                x = model(x)
        return model(x).square().mean()

    return engine.train(model, loss)


def a_metric_reduced_on_rank_0(engine: Engine) -> nn.Module:
    """Rank 0 alone averages its loss over the ranks, to log it.

    Report: https://github.com/Lightning-AI/pytorch-lightning/issues/19106
    Right: the metric does not mix with gradients, and a rank that waits for it says so.
    """
    model = engine.wrap(mlp(8))

    def loss(step: int) -> Tensor:
        loss = engine.squares(model, step)
        if engine.rank == 0 and engine.name != "torch":
            torch.distributed.all_reduce(loss.detach().clone())
        return loss

    return engine.train(model, loss)
