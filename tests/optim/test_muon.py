"""`shardgrad.optim.Muon` trains as an unsharded `torch.optim.Muon`, whichever parameters have
gradients.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardgrad
from tests.support.muon import (
    TIGHT,
    cut_like,
    exactly,
    muon,
    train,
)
from tests.support.parity import (
    GATHERED,
    UNSHARDED,
    Engine,
    Tensors,
    assert_close,
    stack,
)
from tests.support.ranks import Ranks, on_ranks


def trains_as_torch_does_unsharded(**options: Any) -> None:
    with exactly():
        assert_close(train(GATHERED, **options), train(UNSHARDED, **options), tolerance=TIGHT)


OTHER_ITERATION = {
    "ns_steps": 3,
    "ns_coefficients": (1.875, -1.25, 0.375),
    "eps": 0.5,
    "adjust_lr_fn": "original",
}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (2, {}),
        (2, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}),
        (2, OTHER_ITERATION),
        (4, {}),  # with short pieces
        (4, {"mesh": (2, 2)}),
    ],
    ids=["one", "defaults", "match_rms", "other_iteration", "four", "hybrid"],
)
def test_ten_steps_follow_torch_unsharded_with_schedules(
    worlds: dict[int, Ranks], ranks: int, options: dict[str, Any]
) -> None:
    worlds[ranks].renewed().run(trains_as_torch_does_unsharded, **options)


@on_ranks(2)
def test_a_scale_of_the_loss_is_taken_out_before_momentum_adds_up() -> None:
    with exactly():
        assert_close(train(GATHERED, scaled=True), train(UNSHARDED), tolerance=TIGHT)


def train_narrow(engine: Engine) -> Tensors:
    model = engine.fully_shard(stack(5, 3, 2, 5))
    optim = muon(engine, [p for p in model.parameters() if p.ndim == 2], lr=0.02)
    for step in range(10):
        engine.loss(model, step, 5, dtype=model[0].weight.dtype).backward()
        optim.step()
        optim.zero_grad()
    return engine.snapshot(model)


@on_ranks(4)
def test_ranks_that_hold_no_row_of_a_matrix_take_part() -> None:
    with exactly():
        assert_close(train_narrow(GATHERED), train_narrow(UNSHARDED), tolerance=TIGHT)


# -- bfloat16, as by default


@on_ranks(2)
def test_the_same_gradients_give_torchs_weights_with_the_iteration_in_bfloat16() -> None:
    """Gradients are small integers, exact in any order of summation: only the optimizer is
    compared.
    """
    found = []
    for engine in (GATHERED, UNSHARDED):
        model = engine.fully_shard(stack(24, 40, 16, 24))
        matrices = [p for p in model.parameters() if p.ndim == 2]
        optim = muon(engine, matrices, lr=0.02)
        generator = torch.Generator().manual_seed(0)
        for _ in range(10):
            for param in matrices:
                whole = torch.randint(-8, 9, param.shape, generator=generator).float()
                param.grad = whole if engine is UNSHARDED else cut_like(param, whole)
            optim.step()
            optim.zero_grad()
        found.append(engine.snapshot(model))
    # One rounding of the weight more or less in each of ten steps: torch's addition may be fused.
    assert_close(*found, tolerance=10 * 2**-24)


# -- experts and heads

STACKS = {"experts": (3, 5, 4), "attention": (12, 6), "plain": (5, 7)}
HEADS = 3  # of attention; on two ranks the second is cut
GRADIENTS = 5


def matrices_of(name: str, value: Tensor) -> list[Tensor]:
    if name == "attention":
        return list(value.chunk(HEADS))
    return list(value) if name == "experts" else [value]


def matrices_inside_parameters_are_torchs() -> None:
    """The oracle is torch's optimizer over a parameter for each matrix."""
    with exactly():
        model = nn.ParameterDict({name: torch.randn(shape) for name, shape in STACKS.items()})
        pieces = {
            name: [nn.Parameter(m.detach().clone()) for m in matrices_of(name, param)]
            for name, param in model.items()
        }
        shardgrad.fully_shard(model)
        attention = {"params": [model["attention"]], "num_heads": 1}
        others = {"params": [model["experts"], model["plain"]], "nesterov": False}
        ours = shardgrad.optim.Muon([attention, others], lr=0.02)
        torchs = torch.optim.Muon([p for each in pieces.values() for p in each], lr=0.02)
        for number in range(GRADIENTS):
            # The gradients of the first two steps are zero, whatever the options.
            if number == 1:
                ours.param_groups[0]["num_heads"] = HEADS
            elif number == 2:
                ours.param_groups[1] = {**ours.param_groups[1], "nesterov": True}
            for name, param in model.items():
                gradient = (number > 1) * torch.randn(STACKS[name])
                param.grad = cut_like(param, gradient)
                for piece, part in zip(pieces[name], matrices_of(name, gradient), strict=True):
                    piece.grad = part
            ours.step()
            torchs.step()
        for name, param in model.items():
            for i, matrix in enumerate(matrices_of(name, param.detach().full_tensor())):
                assert (matrix - pieces[name][i]).abs().max() < TIGHT, name


def test_experts_and_heads_are_matrices_of_their_own(
    worlds: dict[int, Ranks], two_ranks: Ranks, four_ranks: Ranks
) -> None:
    for ranks in (worlds[1], two_ranks, four_ranks):
        ranks.run(matrices_inside_parameters_are_torchs)


@on_ranks(4)
def test_experts_of_other_ranks_are_left_to_them() -> None:
    """Expert parallelism cuts the first dim, and data parallelism what is left of it."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    generator = torch.Generator().manual_seed(0)
    start, gradient = torch.randn(2, 6, 5, 4, generator=generator, dtype=torch.float64)
    with exactly():
        experts = nn.Module()
        experts.weight = nn.Parameter(distribute_tensor(start, grid["expert"], [Shard(0)]))
        shardgrad.fully_shard(experts, mesh=grid["data"])
        ours = shardgrad.optim.Muon([experts.weight], lr=0.02)
        weight = experts.weight
        own = gradient.chunk(2)[grid["expert"].get_local_rank()]
        own = own.chunk(2)[grid["data"].get_local_rank()]
        weight.grad = DTensor.from_local(
            own, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride()
        )
        with mock.patch.object(dist, "all_to_all_single", side_effect=RuntimeError("sent")):
            ours.step()
        whole = [nn.Parameter(matrix.clone()) for matrix in start]
        for param, part in zip(whole, gradient, strict=True):
            param.grad = part
        torch.optim.Muon(whole, lr=0.02).step()
        difference = weight.detach().full_tensor() - torch.stack(whole)
    assert difference.abs().max() < TIGHT
