"""Optimizers and weights."""

import torch
from torch import Tensor, nn

from tests.silent.engines import Engine, mlp


def an_optimizer_that_takes_norms(engine: Engine) -> nn.Module:
    """An optimizer that scales updates by the norms of parameters, as LARS and LAMB do.

    Report: https://github.com/deepspeedai/DeepSpeed/issues/490
    Right: norms are those of whole parameters.
    """

    class Lars(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        ratio = param.norm() / (param.grad.norm() + 1e-3)
                        param.add_(param.grad * ratio, alpha=-group["lr"])

    model = engine.wrap(mlp())
    return engine.train(
        model,
        optimizer=engine.optimizer(model, Lars(model.parameters(), {"lr": 0.1})),
    )


def adafactor(engine: Engine) -> nn.Module:
    """Adafactor, whose statistics are those of whole rows and columns.

    Report: https://github.com/pytorch/pytorch/issues/109581
    Right: the statistics are of the whole parameter, or the optimizer is refused.
    """
    model = engine.wrap(mlp())
    return engine.train(
        model,
        optimizer=engine.optimizer(model, torch.optim.Adafactor, lr=0.1),
    )


def muon_with_replicas(engine: Engine) -> nn.Module:
    """Muon under HSDP: its update takes whole matrices.

    Report: https://github.com/ByteDance-Seed/VeOmni/pull/1011
    Right: updates are those of whole matrices.
    """
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))
    model = engine.wrap(model, mesh=(2, 1))
    return engine.train(
        model,
        optimizer=engine.optimizer(model, torch.optim.Muon, lr=0.1),
    )


def a_trainer_that_resets_its_optimizer(engine: Engine) -> nn.Module:
    """ReLoRA: the optimizer's state is cleared in the middle of training.

    Report: https://github.com/deepspeedai/DeepSpeed/issues/5615
    Right: moments begin again from zero.
    """
    model = engine.wrap(mlp())
    optimizer = engine.optimizer(model, torch.optim.Adam, lr=0.1)

    def reset(step: int) -> None:
        if step == 1:
            optimizer.state.clear()

    return engine.train(model, steps=4, optimizer=optimizer, after=reset)


def optimizer_state_moved_away_and_back(engine: Engine) -> nn.Module:
    """RL: between two steps every tensor of the optimizer's state is moved away and back.

    Report: https://github.com/Tencent-Hunyuan/UniRL/pull/441
    Right: moments and step counts go on from where they were.
    """

    def moved(optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.to("cpu", copy=True)

    model = engine.wrap(mlp())
    optimizer = engine.optimizer(model, torch.optim.AdamW, lr=0.1)

    def away_and_back(step: int) -> None:
        moved(optimizer)  # weights are sent to the generator meanwhile
        moved(optimizer)

    return engine.train(model, steps=4, optimizer=optimizer, after=away_and_back)


def sharpness_aware(engine: Engine) -> nn.Module:
    """SAM: weights move along the gradient, a second gradient is taken, and they move back.

    Report: https://github.com/facebookresearch/fairscale/issues/989
    Right: the norm is that of the whole gradient, and weights come back.
    """
    model = engine.wrap(mlp())
    optimizer = engine.optimizer(model)
    for step in range(3):
        engine.backward(engine.squares(model, step), model)
        params = [param for param in model.parameters() if param.grad is not None]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        moves = [param.grad / norm for param in params]
        for param, move in zip(params, moves, strict=True):
            param.data.add_(move)
        optimizer.zero_grad()
        engine.backward(engine.squares(model, step), model)
        for param, move in zip(params, moves, strict=True):
            param.data.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
    return model


def kept_whole_over_a_step(engine: Engine) -> nn.Module:
    """Parameters stay whole after forward, and the model is evaluated before the step.

    Report: https://github.com/NVIDIA/Megatron-LM/pull/6336
    Right: the next forward computes with the new weights.
    """
    model = engine.wrap(mlp(), keep=True)

    def evaluate() -> None:
        with torch.no_grad():
            model(engine.batch(99))

    return engine.train(model, lambda step: model(engine.batch(step)).square().sum(), then=evaluate)


def weights_edited_while_whole(engine: Engine) -> nn.Module:
    """The weights are made whole, edited, and sharded again.

    Report: https://github.com/pytorch/pytorch/issues/107081
    Right: the edit stays, or its loss is named.
    """
    model = engine.wrap(mlp())

    def loss(step: int) -> Tensor:
        if step == 1:
            with engine.whole(model), torch.no_grad():
                engine.inner(model)[0].weight[:4] = 0  # such as rows of new tokens
        return engine.squares(model, step)

    return engine.train(model, loss)


def weights_written_in_forward(engine: Engine) -> nn.Module:
    """Forward normalizes its weight in place, as nGPT does.

    Report: https://github.com/pytorch/pytorch/issues/103958
    Right: the weight stays normalized, or the loss of the write is named.
    """

    class Normalized(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.div_(self.weight.norm(dim=1, keepdim=True))
            return super().forward(x)

    model = engine.wrap(nn.Sequential(Normalized(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    return engine.train(model)


def a_low_precision_copy_of_a_weight(engine: Engine) -> nn.Module:
    """A layer keeps a copy of its weight in low precision, made again when the weight has changed.

    Report: https://github.com/NVIDIA/TransformerEngine/issues/3051
    Right: every step computes with a copy of the weight as it is then.
    """

    class Quantized(nn.Linear):
        version = -1

        def forward(self, x: Tensor) -> Tensor:
            if self.weight._version != self.version:
                self.version = self.weight._version
                self.__dict__["copy"] = self.weight.detach().half()
            low = self.copy.to(x.dtype)
            return nn.functional.linear(x, self.weight + (low - self.weight).detach(), self.bias)

    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Quantized(8, 3)))
    return engine.train(model)


def to_another_dtype_and_back(engine: Engine) -> nn.Module:
    """The model goes to another dtype and back between two steps.

    Report: https://github.com/pytorch/pytorch/issues/104336
    Right: training goes on as before.
    """
    model = engine.wrap(mlp())

    def loss(step: int) -> Tensor:
        if step == 2:
            model.double().float()
        return engine.squares(model, step)

    return engine.train(model, loss, steps=4)
