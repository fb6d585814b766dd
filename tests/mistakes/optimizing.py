"""Mistakes with optimizers, gradients and clipping."""

from __future__ import annotations

import torch
from torch import nn

import shardgrad
from shardgrad import fully_shard
from tests.mistakes.models import WIDTH, backward, batch, net, sharded
from tests.mistakes.table import mistake

UNTRAINED = "UntrainedParameterWarning: shardgrad: in the first step of"


@mistake(
    typed="`AdamW(...)` before `fully_shard`",
    says="OptimizerParameterError: AdamW was built over 8 parameters from before fully_shard",
    cure="build the optimizer after fully_shard",
)
def an_early_optimizer() -> None:
    model = net()
    optim = torch.optim.AdamW(model.parameters())
    sharded(model)
    backward(model)
    optim.step()


@mistake(
    typed="`AdamW([*model.parameters(), *head.parameters()])`, and `head` is not sharded",
    says="UnownedParameterWarning: shardgrad: AdamW trains a sharded model, but no unit owns 2 of",
    cure="shardgrad.fully_shard(module) on the module that has them, before building the optimizer",
)
def a_head_next_to_the_model() -> None:
    model, head = sharded(), nn.Linear(WIDTH, 1)
    optim = torch.optim.AdamW([*model.parameters(), *head.parameters()])
    head(model(batch())).sum().backward()
    optim.step()


@mistake(
    typed="`shardgrad.clip_grad_norm_(params, 1.0)` of parameters from before `fully_shard`",
    says="OptimizerParameterError: fully_shard has replaced a parameter whose gradient was",
    cure="list(model.parameters()) after fully_shard",
)
def early_parameters_to_clip() -> None:
    model = net()
    params = list(model.parameters())
    backward(sharded(model))
    shardgrad.clip_grad_norm_(params, 1.0)


@mistake(
    typed="`AdamW(...)` between forward and backward, or after `unshard()`",
    says="OptimizerParameterError: AdamW was built over 4 unsharded parameters",
    cure="module.reshard() on every unsharded unit, before building the optimizer",
)
def an_optimizer_over_whole_parameters() -> None:
    model = sharded()
    model.unshard()
    optim = shardgrad.optim.AdamW(model.parameters())
    backward(model)
    optim.step()


@mistake(
    typed="`optim.step()` without `backward()`",
    says=f"{UNTRAINED} AdamW, parameters that require a gradient had none",
    cure="Check that the loss depends on them, and that backward() was called before step()",
)
def a_step_without_backward() -> None:
    model = sharded()
    torch.optim.AdamW(model.parameters()).step()


@mistake(
    typed="an optimizer over frozen parameters",
    says=f"{UNTRAINED} AdamW, groups had no parameter that requires a gradient",
    cure="that none was frozen by accident",
)
def only_frozen() -> None:
    model = net()
    model.head.requires_grad_(False)
    sharded(model)
    optim = torch.optim.AdamW(
        [{"params": model.head.parameters()}, {"params": model.embed.parameters()}]
    )
    backward(model)
    optim.step()


@mistake(
    typed="`GradientPolicy(decoupled=True)` with torch's optimizer",
    says=f"{UNTRAINED} AdamW, parameters did not change although they have gradients",
    cure="Check that the optimizer reads the attribute that GradientPolicy binds (grad or "
    "decoupled_grad)",
)
def an_attribute_that_is_not_read() -> None:
    model = net()
    fully_shard(model, gradient_policy=shardgrad.GradientPolicy(decoupled=True))
    optim = torch.optim.AdamW(model.parameters())
    backward(model)
    optim.step()


@mistake(
    typed="a step too small for 16-bit weights, without a master",
    says=f"{UNTRAINED} SGD, parameters did not change although they have gradients",
    cure="keep a master",
)
def steps_that_vanish() -> None:
    model = net().bfloat16()
    sharded(model)
    optim = torch.optim.SGD(model.parameters(), lr=1e-9)
    model(batch().bfloat16()).square().mean().backward()
    optim.step()


@mistake(
    typed="`p.grad.data = dtensor`",
    says="GradientError: assigning to param.grad.data does not change the values of a DTensor",
    cure="param.grad.copy_(new), or param.grad = new",
)
def gradients_with_other_data() -> None:
    model = sharded()
    optim = torch.optim.AdamW(model.parameters())
    backward(model)
    for p in model.parameters():
        p.grad.data = p.grad.data * 0.1
    optim.step()


@mistake(
    typed="`shardgrad.optim.AdamW(lr=-1)`",
    says="OptionError: the optimizer's lr is outside its range",
    cure="group['lr'] = ... later",
)
def a_negative_rate() -> None:
    shardgrad.optim.AdamW(sharded().parameters(), lr=-1.0)


@mistake(
    typed='`group["lr"] = float("nan")`',
    says="OptionError: the optimizer's lr is outside its range",
    cure="group['lr'] = ... later",
)
def a_rate_that_is_nan() -> None:
    optim = shardgrad.optim.AdamW(sharded().parameters())
    optim.param_groups[0]["lr"] = float("nan")


@mistake(
    typed="`optim.load_state_dict` of another model's optimizer",
    says="OptimizerStateError: the optimizer state was not loaded: its groups differ",
    cure="load it into an optimizer built the same way, over a model with the same parameters in "
    "order",
)
def a_state_of_another_model() -> None:
    model, other = sharded(), fully_shard(nn.Linear(WIDTH, 4))
    optim, others = (shardgrad.optim.AdamW(each.parameters()) for each in (model, other))
    other(batch()).sum().backward()
    others.step()
    optim.load_state_dict(others.state_dict())


@mistake(
    typed="`clip_grad_norm_(model, -1.0)`",
    says="OptionError: max_norm must not be negative",
    cure="max_norm=1.0",
)
def a_negative_norm() -> None:
    model = sharded()
    backward(model)
    shardgrad.clip_grad_norm_(model, -1.0)


@mistake(
    typed="`p.grad = torch.zeros(...)` of the full shape",
    says="RuntimeError: aten.add_.Tensor got mixed torch.Tensor and DTensor",
    cure="need to convert all torch.Tensor to DTensor",
)
def a_gradient_of_the_full_shape() -> None:
    model = sharded()
    backward(model)
    model.head.weight.grad = torch.zeros(WIDTH, WIDTH)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
