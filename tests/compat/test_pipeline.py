"""torch's pipeline schedules over sharded stages train the unsharded model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor
from torch.func import functional_call

import shardgrad
from tests.support.parity import (
    FSDP2,
    SHARDGRAD,
    Block,
    Engine,
    Tensors,
    assert_close,
    assert_same_bits,
    float64,
    stack,
)
from tests.support.ranks import on_ranks

SCHEDULES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
ONE_STAGE_A_RANK = ("GPipe", "1F1B")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")

MICRO_BATCHES = 4
ROWS = 2  # of a micro-batch on a rank
WIDTH = 6
STEPS = 2
# Of 64-bit numbers with 53 bits, and of 32-bit ones with 24, that go through some thousand
# operations.
TOLERANCE, TOLERANCE_IN_32_BITS = 1e-12, 1e-5


@dataclass(frozen=True)
class Case:
    """How a model is trained.

    Attributes:
        scale_grads: the schedule divides by the number of micro-batches.
        in_32_bits: the policy casts the 64-bit parameters and inputs to 32 bits, and reduces in 64.
        max_norm: of all gradients of the model; None does not clip.
    """

    scale_grads: bool = True
    reshard_after_forward: bool = False
    in_32_bits: bool = False
    max_norm: float | None = None

    @property
    def policy(self) -> MixedPrecisionPolicy:
        if self.in_32_bits:
            return MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
        return MixedPrecisionPolicy()


@cache
def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))


def part(index: int) -> nn.Sequential:
    """Returns one of the model's stages, the same on every rank."""
    torch.manual_seed(index)
    return nn.Sequential(Block(WIDTH, 10), nn.Linear(WIDTH, WIDTH), nn.Tanh())


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets of one data-parallel rank."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    both = torch.randn(2, MICRO_BATCHES * ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return both.unbind()


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


# -- the oracle


def train_unsharded(schedule: str, case: Case) -> Tensors:
    """Trains the whole model in plain torch on the batches of all data-parallel ranks."""
    model = nn.Sequential(*(part(index) for index in range(stages_of(schedule))))
    optim = optimizer(model.parameters())
    found: Tensors = {}
    for step in range(STEPS):
        losses = []
        for replica in range(2):
            for x, target in zip(
                *(part.chunk(MICRO_BATCHES) for part in batch(step, replica)), strict=True
            ):
                if case.in_32_bits:
                    cast = {name: param.float() for name, param in model.named_parameters()}
                    loss = F.mse_loss(functional_call(model, cast, x.float()), target)
                else:
                    loss = F.mse_loss(model(x), target)
                # The mean over replicas, of the mean or the sum over micro-batches.
                (loss / 2 / (MICRO_BATCHES if case.scale_grads else 1)).backward()
                losses.append(loss.detach())
        for i, loss in enumerate(losses):
            found[f"loss {step}.{i // MICRO_BATCHES}.{i % MICRO_BATCHES}"] = loss
        if case.max_norm is not None:
            found[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        for name, param in model.named_parameters():
            assert param.grad is not None
            found[f"{name}.grad {step}"] = param.grad.clone()
        optim.step()
        optim.zero_grad()
    return found | {name: param.detach() for name, param in model.named_parameters()}


# -- the pipeline


def stages_of(schedule: str) -> int:
    """Returns of how many stages, which are the parts of the model, two pipeline ranks train it."""
    return 2 if schedule in ONE_STAGE_A_RANK else 4


def indices_of(schedule: str, rank: int) -> list[int]:
    """Returns the parts of the model that a pipeline rank trains."""
    if schedule in V_SHAPED:
        return [rank, 3 - rank]
    return list(range(rank, stages_of(schedule), 2))


def clip(params: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Clips by the norm over all pipeline ranks, as training programs over FSDP2 do."""
    norm = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    squares = norm.square()
    dist.all_reduce(squares, group=grid().get_group("pp"))
    nn.utils.clip_grads_with_norm_(params, max_norm, squares.sqrt())
    return squares.sqrt()


def train(engine: Engine, schedule: str, case: Case) -> Tensors:
    """Trains on two pipeline ranks of two data-parallel ranks each; returns what this rank's stages
    have.
    """
    mesh = grid()
    rank, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    indices = indices_of(schedule, rank)
    parts = [part(index) for index in indices]
    options = {
        "mesh": mesh["dp"],
        "mp_policy": case.policy,
        "reshard_after_forward": case.reshard_after_forward,
    }
    for module in parts:
        engine.fully_shard(module[0], **options)
        engine.fully_shard(module, **options)
    count, group = stages_of(schedule), mesh.get_group("pp")
    stages: list[Any] = [
        PipelineStage(module, index, count, torch.device("cpu"), group=group)
        for module, index in zip(parts, indices, strict=True)
    ]
    make: Any = schedules.get_schedule_class(schedule)
    runner = make(
        stages[0] if len(stages) == 1 else stages,
        MICRO_BATCHES,
        loss_fn=F.mse_loss,
        scale_grads=case.scale_grads,
    )
    params = [param for module in parts for param in module.parameters()]
    optim = optimizer(params)
    found: Tensors = {}
    for step in range(STEPS):
        x, target = batch(step, replica)
        losses: list[Tensor] = []
        has_last = any(stage.is_last for stage in stages)
        runner.step(
            *((x,) if any(stage.is_first for stage in stages) else ()),
            **({"target": target, "losses": losses} if has_last else {}),
        )
        for i, loss in enumerate(losses):
            found[f"loss {step}.{replica}.{i}"] = loss.detach()
        if case.max_norm is not None:
            found[f"norm {step}"] = clip(params, case.max_norm)
        for index, module in zip(indices, parts, strict=True):
            for name, param in module.named_parameters():
                if param.grad is not None:
                    found[f"{index}.{name}.grad {step}"] = param.grad.full_tensor()
        optim.step()
        optim.zero_grad()
    for index, module in zip(indices, parts, strict=True):
        found |= {
            f"{index}.{name}": param.full_tensor() for name, param in module.named_parameters()
        }
    return found


EVERYTHING = Case(scale_grads=False, reshard_after_forward=True, in_32_bits=True, max_norm=0.5)
BOTH = (True, False)
COMBINATIONS = [Case(*settings) for settings in itertools.product(BOTH, BOTH, BOTH, (None, 0.5))]


@pytest.mark.parametrize(
    "case",
    [Case(), EVERYTHING, *(pytest.param(case, marks=pytest.mark.long) for case in COMBINATIONS)],
    ids=str,
)
@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(4)
def test_a_schedule_trains_the_unsharded_model(schedule: str, case: Case) -> None:
    with float64():
        ours, whole = train(SHARDGRAD, schedule, case), train_unsharded(schedule, case)
    rank, replica = grid().get_local_rank("pp"), grid().get_local_rank("dp")
    mine = [f"{index}." for index in indices_of(schedule, rank)]
    if f"{stages_of(schedule) - 1}." in mine:
        mine += [f"loss {step}.{replica}." for step in range(STEPS)]
    theirs = {name: whole[name] for name in whole if name.startswith(("norm", *mine))}
    tolerance = TOLERANCE_IN_32_BITS if case.in_32_bits else TOLERANCE
    assert_close({name: ours[name] for name in theirs}, theirs, tolerance=tolerance)
    assert len(ours) == len(theirs)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
@on_ranks(4)
def test_a_schedule_trains_like_under_fsdp2(schedule: str) -> None:
    with float64():
        ours, theirs = train(SHARDGRAD, schedule, Case()), train(FSDP2, schedule, Case())
    assert any(".grad" in name for name in ours)
    assert_same_bits(ours, theirs)


@on_ranks(2)
def test_torch_finds_its_names_on_our_modules() -> None:
    model = stack(5, 7, 3)
    shardgrad.fully_shard(model[0])
    shardgrad.fully_shard(model)
    state = fsdp.fully_shard.state(model)
    assert [view._modules for view in state._state_ctx.all_states] == [(model,), (model[0],)]
    (group,) = model._get_fsdp_state()._fsdp_param_groups
    assert [view.sharded_param for view in group.fsdp_params] == [model[2].weight, model[2].bias]
    with pytest.raises(AssertionError):
        fsdp.fully_shard(model)  # torch sees that somebody has been here
