"""What programs written for FSDP2 rely on, beyond plain training: each is run under both engines.

docs/reference/fsdp2.md lists such behaviors with the test that shows each.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import implicit_replication

import shardgrad
from tests.support.parity import (
    FSDP2,
    SHARDGRAD,
    Engine,
    Tensors,
    as_under_fsdp2,
    as_unsharded,
    hsdp_mesh,
    make_optimizer,
    stack,
    tower,
    train,
    train_squares,
)
from tests.support.ranks import on_ranks

# -- meshes


@pytest.mark.parametrize("replicas", [1, 2])
@on_ranks(2)
@as_under_fsdp2
def test_a_mesh_made_of_process_groups_works_like_a_sliced_one(
    engine: Engine, replicas: int
) -> Tensors:
    sliced = hsdp_mesh(replicas, dist.get_world_size() // replicas)
    groups = [sliced.get_group(name) for name in ("replicate", "shard")]
    mesh = DeviceMesh.from_group(
        groups, "cpu", mesh=sliced.mesh, mesh_dim_names=("replicate", "shard")
    )
    return train(engine, engine.shard_tower(tower(), mesh=mesh))


# -- construction and calls


@on_ranks(2)
@as_under_fsdp2
def test_layers_may_be_sharded_as_they_are_built(engine: Engine) -> Tensors:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers.append(engine.fully_shard(nn.Linear(5, 5)))
        gc.collect()
    return train_squares(engine, engine.fully_shard(nn.Sequential(*layers)), 5)


@on_ranks(2)
@as_unsharded
def test_a_list_of_plain_modules_needs_no_root(engine: Engine) -> Tensors:
    model = stack(5, 7, 3)
    engine.fully_shard([model[0], model[2]])
    return train_squares(engine, model, 5)


@on_ranks(2)
def test_registering_a_method_of_a_plain_module_does_nothing() -> None:
    model = nn.Linear(3, 3)
    before = model.extra_repr
    shardgrad.register_fsdp_forward_method(model, "extra_repr")
    assert model.extra_repr == before
    shardgrad.fully_shard(model)
    with pytest.raises(ValueError, match="nothing_of_the_kind"):
        shardgrad.register_fsdp_forward_method(model, "nothing_of_the_kind")


@on_ranks(2)
@as_under_fsdp2
def test_a_forward_without_inputs_uses_parameters_directly(engine: Engine) -> Tensors:
    """A forward without inputs, which uses parameters and not their modules."""

    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = nn.Linear(5, 5)
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            return (self.field.weight.square().sum() + self.scale.exp().sum()) * self.scale.mean()

    torch.manual_seed(0)
    model = engine.fully_shard(Energy())
    optim = make_optimizer("adamw", model)
    for _ in range(3):
        optim.zero_grad()
        model().backward()
        optim.step()
    return engine.snapshot(model)


@on_ranks(2)
@as_under_fsdp2
def test_a_penalty_in_the_roots_forward_finds_the_shards_of_its_blocks(engine: Engine) -> Tensors:
    class Penalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks(x)
            squares = [p.square().sum() for p in self.blocks.parameters()]
            return x + 0.1 * sum(squares).full_tensor()

    torch.manual_seed(0)
    model = Penalized()
    for block in model.blocks:
        engine.fully_shard(block)
    return train_squares(engine, engine.fully_shard(model), 5)


# -- beside torch's data parallelism


@on_ranks(2)
@as_under_fsdp2
def test_units_inside_a_replicated_module_are_left_to_the_engine(engine: Engine) -> Tensors:
    """Units inside a module that torch's composable DDP replicates: it leaves their parameters
    alone.

    The module's own forward begins to gather its units ahead of their use.
    """

    class Ahead(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            handles = [self[i].unshard(async_op=True) for i in (2, 4)]
            x = self[1](self[0](x))
            handles[0].wait()
            return self[4](self[3](self[2](x)))

    torch.manual_seed(0)
    model = Ahead(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))
    for inner in (model[2], model[4]):
        engine.fully_shard(inner)
    replicate(model, device_mesh=None)
    optim = make_optimizer("sgd", model)
    for step in range(3):
        model(engine.inputs(step, 5)).square().mean().backward()
        with implicit_replication():
            optim.step()
        optim.zero_grad()
    inner = engine.snapshot(model[2]) | {
        f"last {k}": v for k, v in engine.snapshot(model[4]).items()
    }
    return inner | {"outer": model[0].weight.detach().clone()}


@on_ranks(2)
def test_replicating_a_sharded_module_is_refused() -> None:
    for engine in (SHARDGRAD, FSDP2):
        model = engine.fully_shard(stack(5, 3))
        with pytest.raises((RuntimeError, AssertionError)):
            replicate(model)


# -- everything at once


@on_ranks(2)
@as_under_fsdp2
def test_programs_that_import_from_the_old_path_train_like_under_fsdp2(engine: Engine) -> Tensors:
    """A program that imports from where FSDP2 was before it was public."""
    with shardgrad.patch() if engine is SHARDGRAD else nullcontext():
        from torch.distributed._composable.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        model = stack(5, 7, 3)
        for module in (model[0], model):
            fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    assert isinstance(model, FSDPModule)
    assert isinstance(model, shardgrad.FSDPModule) is (engine is SHARDGRAD)
    assert type(model).__name__ == "FSDPSequential"
    return train_squares(engine, model, 5)


@on_ranks(1)
def test_a_divide_factor_is_a_number() -> None:
    with pytest.raises(shardgrad.errors.OptionError, match="'8'"):
        SHARDGRAD.fully_shard(stack(5, 3)).set_gradient_divide_factor("8")
