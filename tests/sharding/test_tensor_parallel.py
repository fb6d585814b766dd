"""Parameters that tensor parallelism has made DTensors of: bits, placements and state as under
FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

import shardgrad
from shardgrad import errors
from tests.support import parity
from tests.support.parity import (
    FSDP2,
    SHARDGRAD,
    Engine,
    Tensors,
    assert_close,
    assert_same_bits,
    closely_as_under_fsdp2,
    last_dim,
    same_bits_as_fsdp2,
    unchanged,
)
from tests.support.ranks import Ranks, on_ranks
from tests.support.tensor_parallel import (
    WIDTH,
    build,
    grid,
    inputs,
    mlps,
    needs_dims,
    parallelize,
    train,
)
from tests.support.two_engines import whole

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def left_free(param: nn.Parameter) -> Shard:
    """The dim that tensor parallelism has not cut."""
    return Shard(
        1
        if isinstance(param, DTensor) and param.placements == (Shard(0),) and param.ndim == 2
        else 0
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hidden": 6},
        {"mp_policy": BF16},
        {"reshard_after_forward": False, "micro_batches": 2},
        {"micro_batches": 2, "sync_each": False},
        {"max_norm": 0.1},
        {"recomputed": True},
        {"from_meta": True},
        {"hidden": 8, "shard_placement_fn": last_dim},
        {"hidden": 8, "shard_placement_fn": left_free},
    ],
    ids=str,
)
def test_two_by_two_ranks_train_bit_for_bit_like_fsdp2(
    four_ranks: Ranks, options: dict[str, Any]
) -> None:
    four_ranks.run(same_bits_as_fsdp2, train, (2, 2), **options)


@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (2, 2, 1), (2, 1, 2)], ids=str)
@on_ranks(4)
@closely_as_under_fsdp2
def test_every_shape_of_mesh_trains_like_fsdp2(engine: Engine, shape: tuple[int, ...]) -> Tensors:
    return train(engine, shape, hidden=12)


# -- faces and state


def describe(engine: Engine, shape: tuple[int, ...], **options: Any) -> dict[str, Any]:
    model = build(engine, shape, 8, **options)
    model(inputs(0, grid(*shape))).sum().backward()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optim.step()
    engine.snapshot(model)
    faces: dict[str, Any] = {}
    for name, param in model.state_dict().items():
        mesh = param.device_mesh
        shape_of = (param.shape, param.stride(), param.to_local().shape)
        faces[name] = (param.placements, mesh.mesh_dim_names, mesh.mesh.tolist(), *shape_of)
    for name, param in model.named_parameters():
        assert param.grad is not None
        faces[f"{name}.grad"] = param.grad.placements
        faces[f"{name}.exp_avg"] = optim.state[param]["exp_avg"].placements
    return faces


@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2)], ids=["2d", "3d"])
@pytest.mark.parametrize(
    "options",
    [{}, {"shard_placement_fn": last_dim}, {"shard_placement_fn": left_free}],
    ids=["rows", "columns", "the dim left free"],
)
@on_ranks(4)
def test_placements_meshes_and_state_are_those_of_fsdp2(
    shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    assert describe(SHARDGRAD, shape, **options) == describe(FSDP2, shape, **options)


@on_ranks(4)
def test_a_full_state_on_rank_0_reaches_both_axes() -> None:
    """What rank 0 holds whole, as a checkpoint of a plain run is, goes to all ranks of both
    axes.
    """

    def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build(SHARDGRAD, (2, 2), seed=seed)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(inputs(seed, grid(2, 2))).square().mean().backward()
        optim.step()
        for module in (model, *model):
            module.reshard()
        return model, optim

    model, optim = trained(0)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = get_state_dict(model, optim, options=full)
    assert bool(saved[0]) is bool(saved[1]) is (torch.distributed.get_rank() == 0)
    other, other_optim = trained(1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, saved[0], options=options)
    set_optimizer_state_dict(other, other_optim, saved[1], options=options)
    assert_same_bits(whole(other, other_optim), whole(model, optim))


# -- our own optimizers and clipping


def train_flat(make: Any, clip: Callable[..., Tensor], norm_type: float) -> Tensors:
    model = build(SHARDGRAD, (2, 2), 6)
    optim = make.AdamW(model.parameters(), lr=1e-2)
    found: Tensors = {}
    for step in range(3):
        model(inputs(step, grid(2, 2))).square().sum().backward()
        norm = clip(model.parameters(), 0.1, norm_type)
        found[f"norm {step}"] = (norm.full_tensor() if isinstance(norm, DTensor) else norm).float()
        optim.step()
        optim.zero_grad()
    found |= SHARDGRAD.snapshot(model)
    for name, param in model.named_parameters():
        moment = optim.state[param]["exp_avg"]
        assert moment.placements == param.placements
        found[f"{name}.exp_avg"] = moment.full_tensor()
    return found


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@on_ranks(4)
def test_norms_count_each_element_once_over_both_axes(norm_type: float) -> None:
    """Some parameters are replicated over tensor-parallel ranks, the others are cut."""
    ours = train_flat(shardgrad.optim, shardgrad.clip_grad_norm_, norm_type)
    theirs = train_flat(torch.optim, nn.utils.clip_grad_norm_, norm_type)
    assert_close(ours, theirs, tolerance=1e-5)


@on_ranks(4)
def test_an_infinity_on_one_rank_makes_all_skip() -> None:
    """An infinity on one tensor-parallel rank makes every rank skip."""
    model = build(SHARDGRAD, (2, 2))
    optim = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)
    model(inputs(0, grid(2, 2))).sum().backward()
    if torch.distributed.get_rank() == 3:
        model.get_parameter("0.up.weight").grad.to_local().fill_(float("inf"))
    with unchanged(model.parameters()):
        shardgrad.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()


# -- dp_mesh_dims


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8, bias=False)
        self.down = nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


def on_full_mesh(mesh: DeviceMesh, data_axes: tuple[str, ...]) -> Pair:
    """Distributes over all axes: replicated over data-parallel ones, cut over `tp`."""
    torch.manual_seed(0)
    model = Pair()

    def distribute(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, param in list(module._parameters.items()):
            cut = Shard(0) if name == "up" else Shard(1)
            names = mesh.mesh_dim_names or ()
            if param is None:
                continue
            placements = [Replicate() if axis in data_axes else cut for axis in names]
            module.register_parameter(key, nn.Parameter(distribute_tensor(param, mesh, placements)))

    return distribute_module(model, mesh, distribute)


@cache
def full_mesh(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@needs_dims
@pytest.mark.parametrize(
    ("sizes", "dims"),
    [
        ({"b": 2, "tp": 2}, {"shard": "b"}),
        ({"tp": 2, "b": 2}, {"shard": "b"}),
        ({"b": 2, "tp": 2}, {"replicate": "b"}),
        ({"a": 2, "b": 1, "tp": 2}, {"shard": "b", "replicate": "a"}),
        ({"a": 1, "b": 2, "tp": 2}, {"shard": "b", "replicate": "a"}),
        ({"a": 2, "b": 2, "tp": 1}, {"shard": ("a", "b")}),
        ({"a": 2, "b": 1, "tp": 2}, {"shard": ("a", "b")}),
        ({"a": 2, "b": 2, "tp": 1}, {"replicate": ("a", "b")}),
    ],
    ids=str,
)
@on_ranks(4)
@closely_as_under_fsdp2
def test_parameters_on_a_full_mesh_train_like_under_fsdp2(
    engine: Engine, sizes: dict[str, int], dims: dict[str, Any]
) -> Tensors:
    mesh = full_mesh(**sizes)
    model = on_full_mesh(mesh, ("a", "b"))
    engine.fully_shard(model, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(**dims))

    def loss(number: int) -> Tensor:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
        cuts = [Replicate() if axis == "tp" else Shard(0) for axis in sizes]
        x = distribute_tensor(x.to(torch.get_default_dtype()), mesh, cuts)
        return model(x).square().mean().full_tensor()

    found = parity.train(engine, model, loss=loss, steps=2)
    for name, param in model.named_parameters():
        found[f"{name} whole"] = param.full_tensor().detach()
        places = torch.tensor([hash(str(param.placements)) % 2**31, param.device_mesh.ndim])
        found[f"{name} places"] = places.double()
    return found


# -- refusals


@on_ranks(4)
def test_what_cannot_be_done_with_dtensors_is_refused() -> None:
    mesh = grid(2, 2)
    model = parallelize(mlps(), mesh["tp"])
    with pytest.raises(errors.UnsupportedError, match="reshard_after_forward as an int"):
        shardgrad.fully_shard(model, mesh=mesh["dp"], reshard_after_forward=2)
    with pytest.raises(errors.MeshError, match="cannot be combined"):
        shardgrad.fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    model[1].elsewhere = nn.Parameter(torch.ones(4, device="meta"))
    with pytest.raises(errors.DeviceError, match="elsewhere on meta"):
        shardgrad.fully_shard(model, mesh=mesh["dp"])
    del model[1].elsewhere
    sharded = shardgrad.fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(errors.OptimizerParameterError, match="whose rows are split"):
        shardgrad.optim.Muon([sharded.get_parameter("0.up.weight")])


@needs_dims
@on_ranks(4)
def test_a_full_mesh_that_cannot_be_used_is_refused() -> None:
    mesh = full_mesh(b=2, tp=2)
    dims = fsdp.DataParallelMeshDims(shard="b")
    with pytest.raises(errors.MeshError, match="each data-parallel axis once"):
        shardgrad.fully_shard(Pair(), mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims("b", "b"))
    with pytest.raises(errors.PlacementError, match="all parameters must be DTensors"):
        shardgrad.fully_shard(Pair(), mesh=mesh, dp_mesh_dims=dims)
    with pytest.raises(
        errors.PlacementError, match=r"Expected Replicate\(\) on data-parallel axis 'b'"
    ):
        shardgrad.fully_shard(on_full_mesh(mesh, ()), mesh=mesh, dp_mesh_dims=dims)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    with pytest.raises(errors.PlacementError, match="to be the same mesh"):
        shardgrad.fully_shard(on_full_mesh(other, ("x",)), mesh=mesh, dp_mesh_dims=dims)
