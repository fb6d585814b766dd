"""Mistakes in running: forward, backward, what belongs to no unit, switches."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardgrad
from shardgrad import fully_shard
from tests.mistakes.models import WIDTH, Net, backward, batch, net, sharded
from tests.mistakes.table import mistake


@mistake(
    typed="`x @ model.head.weight`, outside of the model",
    says="RuntimeError: aten.mm.default got mixed torch.Tensor and DTensor",
    cure="need to convert all torch.Tensor to DTensor",
)
def a_weight_outside() -> None:
    model = sharded()
    backward(model)
    batch() @ model.head.weight


@mistake(
    typed="`loss + sum(p.square().sum() for p in model.parameters())`",
    says="RuntimeError: aten.mul.Tensor got mixed torch.Tensor and DTensor",
    cure="need to convert all torch.Tensor to DTensor",
)
def a_penalty_on_shards() -> None:
    model = sharded()
    loss = model(batch()).square().mean()
    (loss + sum(p.square().sum() for p in model.parameters())).backward()


@mistake(
    typed='`register_fsdp_forward_method(model, "generte")`',
    says="ForwardMethodError: FSDPNet does not have a method los",
    cure="one of ['loss'",
)
def a_method_that_is_not() -> None:
    shardgrad.register_fsdp_forward_method(sharded(), "los")


@mistake(
    typed="an adapter, after `fully_shard`",
    says="UnownedParameterError: no unit owns blocks.0.lora.weight, blocks.0.lora.bias",
    cure="shardgrad.fully_shard(model.get_submodule('blocks.0.lora'))",
)
def a_late_adapter() -> None:
    model = sharded()
    model.blocks[0].lora = nn.Linear(WIDTH, WIDTH)
    backward(model)


@mistake(
    typed="`fully_shard` for each block, and not for the root",
    says="UnownedParameterError: no unit owns embed.weight, embed.bias, head.weight, head.bias",
    cure="shardgrad.fully_shard(model) for the outermost module too, after the inner ones",
)
def no_root() -> None:
    model = net()
    for block in model.blocks:
        fully_shard(block)
    backward(model)


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = sharded()
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value(self.model(x))


@mistake(
    typed="a module around the root, with parameters",
    says="UnownedParameterError: no unit owns value.weight, value.bias",
    cure="shardgrad.fully_shard(model) for the outermost module too, after the inner ones",
)
def an_outer_module() -> None:
    backward(Agent())


@mistake(
    typed='`set_reshard_after_forward("no")`',
    says="OptionError: reshard_after_forward should be a bool, got <class 'str'>",
    cure="pass an int to fully_shard itself to reshard to fewer ranks",
)
def text_for_a_switch() -> None:
    sharded().set_reshard_after_forward("no")


@mistake(
    typed="`set_modules_to_forward_prefetch([model.embed])`",
    says="OptionError: Expects list of FSDPModules but got Linear(",
    cure="fully_shard(module) first",
)
def prefetch_of_no_unit() -> None:
    model = sharded()
    model.set_modules_to_forward_prefetch([model.embed])


@mistake(
    typed="`set_gradient_divide_factor(0)`",
    says="OptionError: the gradient divide factor must be positive",
    cure="set_gradient_divide_factor(1.0) to sum instead of averaging",
)
def divided_by_nothing() -> None:
    sharded().set_gradient_divide_factor(0)


@mistake(
    typed="`set_reduce_scatter_max_input_buffers(0)`",
    says="OptionError: max_input_buffers must be a positive int, got 0",
    cure="set_reduce_scatter_max_input_buffers(1)",
)
def no_buffers() -> None:
    sharded().set_reduce_scatter_max_input_buffers(0)


@mistake(
    typed="`block.reset_iter_state()`",
    says="RootError: reset_iter_state must be called on the root FSDP module",
    cure="root.reset_iter_state(...)",
)
def reset_of_a_block() -> None:
    model = sharded()
    backward(model)
    model.blocks[0].reset_iter_state()


@mistake(
    typed="`with participate(model.blocks[0]):`",
    says="RootError: participate() must be called with the root",
    cure="shardgrad.participate(root)",
)
def participation_of_a_block() -> None:
    model = sharded()
    backward(model)
    with shardgrad.participate(model.blocks[0]):
        pass


@mistake(
    typed="`share_comm_ctx([plain])`",
    says="OptionError: Expects list of FSDPModules but got Net(",
    cure="fully_shard(module) first",
)
def sharing_with_no_unit() -> None:
    shardgrad.share_comm_ctx([net()])


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH, sparse=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.table(rows)


@mistake(
    typed="`nn.Embedding(..., sparse=True)`",
    says="GradientError: a gradient of a sharded parameter cannot be used",
    cure="sparse=False in the embedding",
)
def a_sparse_gradient() -> None:
    torch.manual_seed(0)
    fully_shard(Lookup())(torch.tensor([1, 2])).sum().backward()


@mistake(
    typed="`loss.backward()` twice",
    says="RuntimeError: Trying to backward through the graph a second time",
    cure="Specify retain_graph=True",
)
def backward_twice() -> None:
    loss = sharded()(batch()).square().mean()
    loss.backward()
    loss.backward()


@mistake(
    typed="`model.head.weight = nn.Parameter(...)`",
    says="ForeignParameterError: parameter head.weight was replaced by a tensor that its unit "
    "cannot adopt",
    cure="torch.distributed.tensor.distribute_tensor(full, p.device_mesh, p.placements)",
)
def a_replaced_parameter() -> None:
    model = sharded()
    model.head.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    backward(model)


@mistake(
    typed="`block.bfloat16()` of a part of a unit",
    says="ForeignParameterError: parameters of unit 'FSDPNet' no longer share a dtype",
    cure="cast the whole unit at once, for example model.to(torch.bfloat16)",
)
def half_a_unit() -> None:
    model = sharded()
    model.head.bfloat16()
    backward(model)


@mistake(
    typed="`p.data = dtensor`, as SAM and swaps of averaged weights do",
    says="ForeignParameterError: assigning to the data of embed.weight",
    cure="with torch.no_grad(): param.copy_(new)",
)
def data_of_its_own() -> None:
    model = sharded().to("cpu")  # as it was, in other objects
    for p in model.parameters():
        p.data = p.data.clone()
    backward(model)


@mistake(
    typed="`model.head.weight = nn.Parameter(...)` of a tied weight, after `fully_shard`",
    says="TiedParameterError: the tied parameter 0.weight was replaced in 1 of its 2 places",
    cure="untie the modules before fully_shard",
)
def untied_too_late() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    fully_shard(model)
    model[1].weight = nn.Parameter(model[0].weight.detach().clone())
    model(batch())


@mistake(
    typed="`weight_norm(model.head)`, after `fully_shard`",
    says="ForeignParameterError: parameter head.weight was replaced by a tensor that its unit "
    "cannot adopt",
    cure="parametrize, or remove parameters, before fully_shard",
)
def late_parametrization() -> None:
    model = sharded()
    torch.nn.utils.parametrizations.weight_norm(model.head)
    backward(model)


@mistake(
    typed="ranks of different seeds",
    says="RankDisagreementError: ranks had different weights when fully_shard sharded them",
    cure="torch.manual_seed(0) before building the model",
)
def different_seeds() -> None:
    torch.manual_seed(dist.get_rank())
    backward(sharded(Net()))


@mistake(
    typed="models of different depth",
    says="RankDisagreementError: ranks built different models",
    cure="build the model from the same configuration, in the same order, on every rank",
)
def different_models() -> None:
    model = net()
    if dist.get_rank() == 1:
        model.blocks.append(nn.Linear(WIDTH, WIDTH))
    backward(sharded(model))


@mistake(
    typed="a parameter frozen on one rank",
    says="RankDisagreementError: ranks built different models",
    cure="build the model from the same configuration, in the same order, on every rank",
)
def frozen_on_one_rank() -> None:
    model = net()
    model.head.requires_grad_(dist.get_rank() == 0)
    backward(sharded(model))


@mistake(
    typed="`mesh` of one rank",
    says="RankDisagreementError: ranks built different models",
    cure="build the model from the same configuration, in the same order, on every rank",
)
def a_mesh_of_one_rank() -> None:
    shape = (1, 2) if dist.get_rank() else (2, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    backward(fully_shard(net(), mesh=mesh))
