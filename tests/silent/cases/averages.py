"""When gradients are averaged."""

import contextlib

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from tests.silent.engines import Engine, mlp


def a_last_window_that_is_not_full(engine: Engine) -> nn.Module:
    """Three micro-batches, accumulated by two: the optimizer steps after the third, which did not
    synchronize.

    Report: https://github.com/huggingface/accelerate/issues/2831
    Right: the third one's gradients are averaged before the step.
    """
    model = engine.wrap(mlp())
    optimizer = engine.optimizer(model)
    for _ in range(2):
        for number in range(3):
            is_boundary = number % 2 == 1
            with contextlib.nullcontext() if is_boundary else engine.no_sync(model):
                engine.backward(engine.squares(model, number), model)
            if is_boundary or number == 2:
                optimizer.step()
                optimizer.zero_grad()
    return model


def sync_on_the_wrong_micro_batch(engine: Engine) -> nn.Module:
    """The first of two micro-batches synchronizes, not the last.

    Report: https://github.com/modelscope/FunASR/pull/3472
    Right: both are averaged before the step, or the loss of one is named.
    """
    model = engine.wrap(mlp())

    def loss(step: int) -> None:
        engine.backward(engine.squares(model, 2 * step), model)
        with engine.no_sync(model):
            engine.backward(engine.squares(model, 2 * step + 1), model)

    return engine.train(model, loss)


def forward_without_sync_backward_with(engine: Engine) -> nn.Module:
    """Forward runs inside of `no_sync`, backward after it.

    Report: https://github.com/huggingface/accelerate/pull/1726
    Right: the backward averages its gradients.
    """
    model = engine.wrap(mlp())

    def loss(step: int) -> Tensor:
        with engine.no_sync(model):
            loss = engine.squares(model, step)
        return loss

    return engine.train(model, loss)


def two_backwards_through_one_forward(engine: Engine) -> nn.Module:
    """Two losses of one forward go backward one after the other.

    Report: https://github.com/pytorch/pytorch/issues/47260
    Right: both are averaged and added.
    """
    model = engine.wrap(mlp())

    def loss(step: int) -> Tensor:
        out = model(engine.batch(step))
        with engine.no_sync(model):
            engine.backward(out.square().mean(), model, retain_graph=True)
        return out.abs().mean()

    return engine.train(model, loss)


def two_forwards_and_batch_norm(engine: Engine) -> nn.Module:
    """Two views of a batch go through one model, with BatchNorm, before backward.

    Report: https://github.com/pytorch/pytorch/issues/175024
    Right: both contribute to the gradient.
    """
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))

    def loss(step: int) -> Tensor:
        one, other = model(engine.batch(step)), model(engine.batch(50 + step))
        return (one - other).square().mean() - one.mean()

    return engine.train(model, loss)


def gradients_from_autograd_grad(engine: Engine) -> nn.Module:
    """Gradients come from `torch.autograd.grad`, not from `backward`.

    Report: https://github.com/pytorch/pytorch/issues/47562
    Right: they are averaged, or the call is refused.
    """
    model = engine.wrap(mlp())

    def loss(step: int) -> None:
        params = list(model.parameters())
        grads = torch.autograd.grad(engine.squares(model, step), params)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad

    return engine.train(model, loss)


def a_backward_that_writes_the_gradient(engine: Engine) -> nn.Module:
    """A custom backward writes `weight.grad` itself, as fused kernels and zero-bubble schedules do.

    Report: https://github.com/pytorch/pytorch/issues/144530
    Right: that gradient is averaged like the others.
    """

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            found = grad.t() @ x
            weight.grad = found if weight.grad is None else weight.grad + found
            return grad @ weight, None

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Fused.apply(x, self.weight) + self.bias

    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), Layer(8, 8), nn.Linear(8, 3)))
    return engine.train(model)


def gradients_in_memory_that_is_written_again(engine: Engine) -> nn.Module:
    """A backward hands out its gradient in memory that its next run writes, as a replayed graph.

    Report: https://github.com/pytorch/pytorch/issues/96693
    Right: the gradients of both micro-batches are added, not the last one twice.
    """

    class Replayed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, static):
            ctx.save_for_backward(x, weight)
            ctx.static = static
            return x @ weight.t()

        @staticmethod
        def backward(ctx, grad):
            torch.mm(grad.t(), ctx.saved_tensors[0], out=ctx.static)
            return grad @ ctx.saved_tensors[1], ctx.static.detach(), None

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            static = self.__dict__.setdefault("static", torch.empty(8, 8))
            return Replayed.apply(x, self.weight, static)

    model = engine.wrap(nn.Sequential(Layer(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 3)))

    def loss(step: int) -> Tensor:
        with engine.no_sync(model):
            engine.backward(engine.squares(model, step), model)
        return engine.squares(model, 9 + step)

    return engine.train(model, loss)


def a_gradient_penalty(engine: Engine) -> nn.Module:
    """A penalty on the gradients of the inputs: `create_graph=True`.

    Report: https://github.com/pytorch/pytorch/issues/63812
    Right: the penalty's gradients arrive too, averaged.
    """
    model = engine.wrap(mlp())

    def loss(step: int) -> Tensor:
        x = engine.batch(step).requires_grad_()
        score = model(x).sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        return score + slope.square().sum()

    return engine.train(model, loss)


def forces(engine: Engine) -> nn.Module:
    """A potential: forces are gradients inside of forward, and the loss is on them.

    Report: https://github.com/soran-ghaderi/torchebm/issues/244
    Right: the second derivatives arrive, averaged.
    """

    class Potential(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            energy = super().forward(x.requires_grad_())
            return torch.autograd.grad(energy.sum(), x, create_graph=True)[0]

    model = engine.wrap(Potential(*mlp(1)))
    return engine.train(model)


def reentrant_checkpoints(engine: Engine) -> nn.Module:
    """Reentrant activation checkpoints of a layer that runs twice.

    Report: https://github.com/pytorch/pytorch/issues/153354
    Right: gradients of both calls are added and averaged.
    """

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            x = self[0](x)
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(self[1], x.tanh(), use_reentrant=True)
            return x

    model = engine.wrap(Net(nn.Linear(8, 8), nn.Linear(8, 8)))
    return engine.train(model)


def a_shard_group_of_one(engine: Engine) -> nn.Module:
    """HSDP whose shard groups have one rank each, and two micro-batches.

    Report: https://github.com/verl-project/verl/issues/7493
    Right: gradients are averaged over the replicas.
    """
    model = engine.wrap(mlp(), mesh=(2, 1))

    def loss(step: int) -> Tensor:
        engine.backward(engine.squares(model, 2 * step), model)
        return engine.squares(model, 2 * step + 1)

    return engine.train(model, loss)


def micro_batches_before_replicas_are_averaged(engine: Engine) -> nn.Module:
    """HSDP with three micro-batches: replicas are averaged in the last one only.

    Report: https://github.com/NVIDIA/Megatron-LM/pull/7186
    Right: the gradients of all three come to the step, not those of the last one.
    """
    model = engine.wrap(mlp(), mesh=(2, 1))

    def loss(step: int) -> Tensor:
        with engine.no_sync(model, replicas=True):
            for part in range(2):
                engine.backward(engine.squares(model, 3 * step + part), model)
        return engine.squares(model, 3 * step + 2)

    return engine.train(model, loss)


def a_forward_that_fails_and_is_repeated(engine: Engine) -> nn.Module:
    """A forward runs out of memory on every rank, is caught, and repeated with half of the batch.

    Report: https://github.com/pytorch/torchtitan/issues/1329
    Right: the second forward counts alone.
    """

    class Check(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 4:
                raise RuntimeError("out of memory")
            return x

    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), Check(), nn.Linear(8, 3)))

    def loss(step: int) -> Tensor:
        x = engine.batch(step, rows=8)
        try:
            loss = model(x).square().mean()
        except RuntimeError:
            loss = model(x[:4]).square().mean()
        return loss

    return engine.train(model, loss)
