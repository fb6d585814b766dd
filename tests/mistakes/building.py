"""Mistakes in building: modules, meshes, policies, parameters."""

from __future__ import annotations

import os
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import shardgrad
from shardgrad import fully_shard
from tests.mistakes.models import Net, backward, batch, net, sharded
from tests.mistakes.table import mistake


@mistake(
    typed="`python mine.py`, without `torchrun`",
    says="MeshError: fully_shard was called without a process group or a launcher",
    cure="torchrun --nproc-per-node=2",
)
def no_torchrun() -> None:
    by_hand = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    with (
        mock.patch.dict(os.environ, by_hand, clear=True),
        mock.patch.object(dist, "is_initialized") as asked,
    ):
        asked.return_value = False
        fully_shard(net())


@mistake(
    typed="`fully_shard(nn.ModuleList(...))`",
    says="ContainerError: fully_shard does not support containers that do not implement forward",
    cure="for child in container: fully_shard(child)",
)
def a_container() -> None:
    fully_shard(net().blocks)


@mistake(
    typed="`fully_shard(model)` twice",
    says="AlreadyShardedError: Each distinct composable distributed API can only be applied to a "
    "module once",
    cure="remove the second fully_shard call",
)
def twice() -> None:
    fully_shard(fully_shard(net()))


@mistake(
    typed="`fully_shard(model)` before `fully_shard(block)`",
    says="ParameterClaimedError: parameter weight is already sharded by another unit",
    cure="apply fully_shard bottom-up: inner modules first, the root last",
)
def the_root_first() -> None:
    model = fully_shard(net())
    fully_shard(model.blocks[0])


@mistake(
    typed="`fully_shard` on two blocks that contain one module",
    says="ParameterClaimedError: parameter 1.weight is already sharded by another unit",
    cure="shard a module that several units contain before all of them",
)
def a_module_in_two_units() -> None:
    shared = nn.Linear(8, 8)
    first, second = nn.Sequential(nn.Linear(8, 8), shared), nn.Sequential(nn.Linear(8, 8), shared)
    fully_shard(first)
    fully_shard(second)


@mistake(
    typed="`fully_shard(model.parameters())`",
    says="OptionError: fully_shard expects a module or a non-empty list of modules",
    cure="fully_shard(model)",
)
def parameters_for_a_module() -> None:
    fully_shard(net().parameters())


@mistake(
    typed="`fully_shard(DDP(model))`",
    says="EngineError: the module already belongs to DistributedDataParallel",
    cure="fully_shard(ddp.module), and call ddp.module; or remove DDP",
)
def a_replica() -> None:
    fully_shard(DistributedDataParallel(net()))


@mistake(
    typed="`DDP(fully_shard(model))`",
    says="EngineError: DistributedDataParallel wraps a sharded module",
    cure="remove DDP",
)
def a_replica_of_shards() -> None:
    DistributedDataParallel(sharded())


@mistake(
    typed="`fully_shard(FullyShardedDataParallel(model))`",
    says="EngineError: the module already belongs to FullyShardedDataParallel",
    cure="fully_shard on each module that FSDP1 would wrap, inner ones first",
)
def shards_of_fsdp1() -> None:
    backward(fully_shard(fsdp.FullyShardedDataParallel(net(), device_id=torch.device("cpu"))))


@mistake(
    typed="torch's `fully_shard` for blocks, this one for the root",
    says="EngineError: blocks.0 already belongs to torch's fully_shard",
    cure="from shardgrad import fully_shard for every module, or shardgrad.patch()",
)
def two_engines() -> None:
    model = net()
    for block in model.blocks:
        fsdp.fully_shard(block)
    backward(fully_shard(model))


@mistake(
    typed="`mesh=dist.group.WORLD`",
    says="OptionError: mesh must be a DeviceMesh",
    cure="init_device_mesh(device_type, (world_size,))",
)
def a_group_for_a_mesh() -> None:
    fully_shard(net(), mesh=dist.group.WORLD)


@mistake(
    typed="a 2-D mesh without names",
    says="MeshNamesError: Please init the 2D mesh for HSDP with mesh_dim_names specified",
    cure="mesh_dim_names=('replicate', 'shard')",
)
def a_mesh_without_names() -> None:
    fully_shard(net(), mesh=init_device_mesh("cpu", (1, 2)))


@mistake(
    typed="a 3-D mesh",
    says="MeshError: fully_shard expects a 1D or 2D DeviceMesh but got",
    cure="pass one axis of the mesh, for example mesh['shard']",
)
def a_mesh_of_three_axes() -> None:
    fully_shard(net(), mesh=init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("pp", "dp", "tp")))


@mistake(
    typed="a mesh of other ranks",
    says="MeshError: this rank is not in the mesh DeviceMesh",
    cure="if mesh.get_coordinate() is not None: fully_shard(model, mesh=mesh)",
)
def a_mesh_of_other_ranks() -> None:
    others = [DeviceMesh("cpu", [rank]) for rank in (1, 0)]
    fully_shard(net(), mesh=others[dist.get_rank()])


@mistake(
    typed="a mesh of ranks in another order, `DeviceMesh(device_type, [1, 0])`",
    says="MeshError: the ranks of a mesh are not in the order of its process groups",
    cure="init_device_mesh, or DeviceMesh(device_type, mesh.mesh.sort().values)",
)
def a_mesh_in_another_order() -> None:
    fully_shard(net(), mesh=DeviceMesh("cpu", [1, 0]))


@mistake(
    typed='`dp_mesh_dims="dp"`',
    says="OptionError: dp_mesh_dims must be a DataParallelMeshDims",
    cure="dp_mesh_dims=DataParallelMeshDims(shard='dp')",
)
def a_name_for_mesh_dims() -> None:
    fully_shard(
        net(), mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), dp_mesh_dims="dp"
    )


@mistake(
    typed="`dp_mesh_dims` with an axis that the mesh lacks",
    says="MeshError: Mesh dim name 'fsdp' not found in mesh.mesh_dim_names ('dp',)",
    cure="DataParallelMeshDims(shard='dp')",
)
def an_axis_that_the_mesh_lacks() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    fully_shard(net(), mesh=mesh, dp_mesh_dims=shardgrad.DataParallelMeshDims(shard="fsdp"))


@mistake(
    typed="`mp_policy=torch.bfloat16`",
    says="OptionError: mp_policy must be a MixedPrecisionPolicy",
    cure="mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
)
def a_dtype_for_a_policy() -> None:
    fully_shard(net(), mp_policy=torch.bfloat16)


@mistake(
    typed="`mp_policy=MixedPrecision(...)` of FSDP1",
    says="OptionError: mp_policy must be a MixedPrecisionPolicy",
    cure="mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
)
def a_policy_of_fsdp1() -> None:
    fully_shard(net(), mp_policy=fsdp.MixedPrecision(param_dtype=torch.bfloat16))


@mistake(
    typed='`MixedPrecisionPolicy(param_dtype="bf16")`',
    says="OptionTypeError: MixedPrecisionPolicy.param_dtype must be a torch.dtype",
    cure="MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
)
def a_dtype_as_text() -> None:
    backward(fully_shard(net(), mp_policy=shardgrad.MixedPrecisionPolicy(param_dtype="bf16")))


@mistake(
    typed="`offload_policy=CPUOffload(offload_params=True)` of FSDP1",
    says="UnsupportedError: shardgrad does not yet support CPUOffload",
    cure="offload_policy=CPUOffloadPolicy()",
)
def offload_of_fsdp1() -> None:
    fully_shard(net(), offload_policy=fsdp.CPUOffload(offload_params=True))


@mistake(
    typed='`reshard_after_forward="FULL_SHARD"`',
    says="OptionError: reshard_after_forward should be a bool or an int",
    cure="reshard_after_forward=True",
)
def a_strategy_for_a_flag() -> None:
    fully_shard(net(), reshard_after_forward="FULL_SHARD")


@mistake(
    typed="`reshard_after_forward=3` on 2 ranks",
    says="OptionError: If passing reshard_after_forward as an int, it should be a factor of 2, not "
    "3",
    cure="reshard_after_forward=True, False, or such a divisor",
)
def no_divisor() -> None:
    fully_shard(net(), reshard_after_forward=3)


@mistake(
    typed="`zero_stage=4`",
    says="OptionError: zero_stage=4 does not exist",
    cure="zero_stage=3",
)
def a_stage_that_is_not() -> None:
    fully_shard(net(), zero_stage=4)


@mistake(
    typed='`comm="nvlink"`',
    says="OptionError: comm='nvlink' does not exist",
    cure='comm="collectives"',
)
def a_way_that_is_not() -> None:
    fully_shard(net(), comm="nvlink")


@mistake(
    typed="`zero_stage=2, reshard_after_forward=True`",
    says="OptionError: zero_stage=2 keeps parameters unsharded, which contradicts"
    " reshard_after_forward",
    cure="zero_stage=3",
)
def a_stage_that_contradicts() -> None:
    fully_shard(net(), zero_stage=2, reshard_after_forward=True)


@mistake(
    typed='`zero_stage="hfsdp"` on a 1-D mesh',
    says='OptionError: zero_stage="hfsdp" needs a second axis to shard optimizer states over',
    cure="mesh_dim_names=('outer', 'inner')",
)
def two_levels_on_one_axis() -> None:
    fully_shard(net(), zero_stage="hfsdp")


@mistake(
    typed="a parameter of no dimensions",
    says="UnsupportedParameterError: fully_shard doesn't support scalar parameters",
    cure="self.temperature = nn.Parameter(torch.tensor([value]))",
)
def a_scalar() -> None:
    model = net()
    model.temperature = nn.Parameter(torch.ones(()))
    fully_shard(model)


@mistake(
    typed="`torch.jit.script(model.head)`",
    says="UnsupportedParameterError: fully_shard cannot shard head.weight, which is in TorchScript",
    cure="torch.compile instead of torch.jit",
)
def a_script() -> None:
    model = net()
    model.head = torch.jit.script(model.head)
    fully_shard(model)


@mistake(
    typed="a transposed parameter",
    says="UnsupportedParameterError: FSDP does not support non-contiguous parameters yet: "
    "head.weight",
    cure="param.data = param.data.contiguous() before fully_shard",
)
def not_contiguous() -> None:
    model = net()
    model.head.weight = nn.Parameter(torch.ones(4, 8).t())
    fully_shard(model)


@mistake(
    typed="a parameter of complex numbers",
    says="UnsupportedParameterError: fully_shard cannot reduce gradients of phase in "
    "torch.complex64",
    cure="requires_grad=False, or pass it in ignored_params",
)
def complex_numbers() -> None:
    model = net()
    model.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    fully_shard(model)


@mistake(
    typed="`shard_placement_fn=Shard(1)`",
    says="OptionError: shard_placement_fn must be callable",
    cure="shard_placement_fn=lambda param: Shard(0)",
)
def a_placement_for_a_function() -> None:
    fully_shard(net(), shard_placement_fn=Shard(1))


@mistake(
    typed="`shard_placement_fn=lambda p: Replicate()`",
    says="PlacementError: Invalid shard_placement_fn result: Replicate()",
    cure="shard_placement_fn=lambda param: Shard(1) if param.ndim > 1 else None",
)
def a_replicated_placement() -> None:
    fully_shard(net(), shard_placement_fn=lambda p: Replicate())


@mistake(
    typed="`shard_placement_fn=lambda p: Shard(1)` with biases",
    says="PlacementError: Shard dim 1 is invalid for 1D tensor: embed.bias",
    cure="return Shard(0) or None for it from shard_placement_fn",
)
def a_dim_that_is_not() -> None:
    fully_shard(net(), shard_placement_fn=lambda p: Shard(1))


@mistake(
    typed="`Shard(1)` of a dim that the ranks do not divide",
    says="UnsupportedParameterError: FSDP does not support uneven sharding on dim 1: weight",
    cure="return Shard(0), which may be uneven, for it from shard_placement_fn",
)
def an_uneven_dim() -> None:
    fully_shard(nn.Linear(7, 8, bias=False), shard_placement_fn=lambda p: Shard(1))


@mistake(
    typed="part of the model on `meta`",
    says="DeviceError: parameters of one unit are on several devices",
    cure="module.to('cpu') before fully_shard",
)
def half_on_meta() -> None:
    model = net()
    model.head.to("meta")
    fully_shard(model)


@mistake(
    typed="a model on `meta`, called before it is loaded",
    says="MetaParameterError: FSDP parameters should be materialized from meta device before "
    "training",
    cure="model.to_empty(device=...) and initialize, or load_state_dict(..., assign=True)",
)
def on_meta() -> None:
    with torch.device("meta"):
        model = Net()
    sharded(model)(batch())


@mistake(
    typed='`ignored_params={"head.weight"}`',
    says="OptionTypeError: ignored_params must contain parameters, not names",
    cure="ignored_params=set(module.parameters())",
)
def names_for_ignored_params() -> None:
    fully_shard(net(), ignored_params={"head.weight"})


@mistake(
    typed="units that share a weight, under no root",
    says="TiedParameterError: parameter weight is shared by units, none of which contains "
    "the others",
    cure="call shardgrad.fully_shard on a module that contains them, and run it as the root",
)
def tied_without_a_root() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    fully_shard(model[0])
    fully_shard(model[1])
    model(batch())


@mistake(
    typed="`model.head.weight = model.embed.weight` after `fully_shard`",
    says="TiedParameterError: parameter 1.weight was tied to 0.weight after fully_shard",
    cure="tie the modules before the first fully_shard call that contains one of them",
)
def tied_too_late() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model)
    model[1].weight = model[0].weight
    model(batch())


@mistake(
    typed="`fully_shard([a, b])` over units, run as roots",
    says="RootError: fully_shard requires a single root module but got several",
    cure="call fully_shard on their parent too, and run the parent",
)
def several_roots() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    inner = nn.Sequential(nn.Linear(8, 8))
    fully_shard(inner[0])
    fully_shard([inner, model[1]])
    inner(batch())


@mistake(
    typed="`gradient_policy=torch.float32`",
    says="OptionTypeError: gradient_policy must be a GradientPolicy",
    cure="gradient_policy=shardgrad.GradientPolicy(dtype=torch.float32)",
)
def a_dtype_for_gradients() -> None:
    backward(fully_shard(net(), gradient_policy=torch.float32))
