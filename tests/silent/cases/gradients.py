"""What happens to gradients before the step."""

import torch
from torch import Tensor, nn

from tests.silent.engines import Engine, mlp


def clipping_with_torch(engine: Engine) -> nn.Module:
    """Gradients are clipped with `torch.nn.utils.clip_grad_norm_`.

    Report: https://github.com/pytorch/pytorch/issues/72548
    Report: https://github.com/deepspeedai/DeepSpeed/issues/6480
    Right: the norm is that of the whole model.
    """
    model = engine.wrap(mlp())
    return engine.train(
        model,
        lambda step: model(100 * engine.batch(step)).square().sum(),
        then=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5),
    )


def clipping_after_an_evaluation(engine: Engine) -> nn.Module:
    """The model is evaluated between backward and clipping.

    Report: https://github.com/pytorch/pytorch/issues/144289
    Right: all gradients are clipped by the norm of all.
    """
    net = mlp()
    model = engine.wrap(net, units=[net[0]])

    def evaluate_and_clip() -> None:
        with torch.no_grad():
            model(engine.batch(99))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    def loss(step: int) -> Tensor:
        return model(10 * engine.batch(step)).square().sum()

    return engine.train(model, loss, then=evaluate_and_clip)


def the_norm_that_is_logged(engine: Engine) -> dict[str, float]:
    """The norm that clipping returns is logged.

    Report: https://github.com/pytorch/pytorch/issues/170862
    Right: it is the norm of the whole gradient.
    """
    model = engine.wrap(mlp())
    engine.optimizer(model)
    engine.backward(model(engine.batch(0)).square().sum(), model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return {"gradient norm": norm.item() / 10}


def gradients_scaled_by_hand(engine: Engine) -> nn.Module:
    """Gradients are changed between backward and step.

    Report: https://github.com/deepspeedai/DeepSpeed/issues/1295
    Right: the optimizer sees the change.
    """
    model = engine.wrap(mlp())

    def halve() -> None:
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)

    return engine.train(model, then=halve)


def gradients_kept_per_task(engine: Engine) -> nn.Module:
    """Two tasks: the first one's gradients are kept while the second goes backward.

    Report: https://github.com/NVIDIA/TransformerEngine/pull/2937
    Right: what was kept does not change.
    """
    model = engine.wrap(mlp())
    optimizer = engine.optimizer(model)
    for step in range(3):
        kept = []
        for task in range(2):
            engine.backward(engine.squares(model, 2 * step + task), model)
            kept.append([param.grad for param in model.parameters()])
            for param in model.parameters():
                param.grad = None
        for param, one, other in zip(model.parameters(), *kept, strict=True):
            param.grad = 0.25 * one + 0.75 * other
        optimizer.step()
        optimizer.zero_grad()
    return model


def a_hook_on_a_parameter(engine: Engine) -> nn.Module:
    """A hook of `register_hook` masks a parameter's gradient, so that pruned weights stay zero.

    Report: https://github.com/meta-pytorch/torchrec/pull/4268
    Report: https://github.com/pytorch/pytorch/issues/103958
    Right: the hook runs.
    """
    net = mlp()
    model = engine.wrap(net)
    weight = next(model.parameters())
    weight.register_hook(lambda grad: grad * 0)
    return engine.train(model)


def optimizers_in_backward(engine: Engine) -> nn.Module:
    """Each parameter has its own optimizer, which steps in a hook as soon as the gradient is there.

    Report: https://github.com/kohya-ss/musubi-tuner/issues/679
    Right: each steps with the averaged gradient.
    """
    model = engine.wrap(mlp())
    engine.optimizer(model)
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def step_at_once(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    engine.on_gradient(model, step_at_once)
    for step in range(3):
        engine.backward(engine.squares(model, step), model)
    return model


def a_scaler_that_decides_alone(engine: Engine) -> nn.Module:
    """A plain `GradScaler`, and an overflow in the shard of one rank.

    Report: https://github.com/facebookresearch/fairscale/issues/754
    Right: all ranks skip the step.
    """
    net = nn.Linear(8, 8, bias=False)
    model = engine.wrap(net)
    optimizer = engine.optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    for step in range(4):
        out = model(engine.batch(step))
        weight = torch.ones(8)
        if step == 1:
            weight[0] = 1e38  # overflows in the first row of the weight only
        engine.backward(scaler.scale((out * weight).mean()), model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model
