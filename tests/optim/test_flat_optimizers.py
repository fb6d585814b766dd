"""The optimizers of `shardgrad.optim` train as torch's do, in one launch for each segment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

import shardgrad
from shardgrad import ops
from shardgrad.errors import ForeignParameterError, OptimizerParameterError
from shardgrad.optim import SGD, Adam, AdamW, Muon
from shardgrad.policies import GradientPolicy
from tests.support.parity import (
    FSDP2,
    SHARDGRAD,
    hsdp_mesh,
    stack,
    unchanged,
)
from tests.support.ranks import Ranks, on_ranks

# -- one launch


# Parameters, gradients, and how the optimizer keeps the rest.
KEPT: dict[str, tuple[torch.dtype, torch.dtype, Any, dict[str, Any]]] = {
    "all float32": (torch.float32, torch.float32, AdamW, {}),
    "bf16 gradients": (torch.float32, torch.bfloat16, AdamW, {}),
    "float32 gradients, a master": (torch.bfloat16, torch.float32, AdamW, {"master": "float32"}),
    "bf16 moments, a remainder": (
        torch.bfloat16,
        torch.bfloat16,
        Adam,
        {"master": "remainder", "moment_dtype": torch.bfloat16},
    ),
    "momentum": (torch.float32, torch.bfloat16, SGD, {"momentum": 0.9}),
    "looks for itself": (torch.float32, torch.float32, AdamW, {"check_finite": True}),
}


@pytest.mark.parametrize("name", KEPT)
@on_ranks(2)
def test_no_megabyte_is_allocated_after_the_first_step(name: str) -> None:
    """A copy of this rank's gradients, in whatever dtype, is at least 2 MiB here."""
    param_dtype, grad_dtype, kind, options = KEPT[name]
    model = stack(1024, 1024, 1024).to(param_dtype)
    shardgrad.fully_shard(model, gradient_policy=GradientPolicy(dtype=grad_dtype))
    optim = kind(model.parameters(), lr=1e-3, **options)
    for step in range(2):
        SHARDGRAD.loss(model, step, 1024, dtype=param_dtype).backward()
        with torch.profiler.profile(profile_memory=True) as profile:
            if name != "looks for itself":
                shardgrad.clip_grad_norm_(model, 1e-3)
            optim.step()
        optim.zero_grad()
    assert {p.grad_dtype for p in model.parameters()} <= {grad_dtype, None}
    total = sum(max(event.cpu_memory_usage, 0) for event in profile.events())
    assert total < 1 << 20, f"{total} bytes were allocated"


# -- dtypes


@pytest.mark.parametrize(
    ("kind", "options", "survives"),
    [
        (AdamW, {}, False),
        (AdamW, {"master": "float32"}, True),
        (AdamW, {"master": "remainder"}, True),
        (AdamW, {"stochastic_rounding": True}, True),
        (Muon, {}, False),
        (Muon, {"master": "float32"}, True),
        (Muon, {"master": "remainder"}, True),
    ],
)
@pytest.mark.filterwarnings("ignore::shardgrad.UntrainedParameterWarning")
@on_ranks(2)
def test_small_steps_survive_in_16_bits_if_something_keeps_them(
    kind: Any, options: dict[str, Any], survives: bool
) -> None:
    """Steps of about 1e-4 on bf16 weights around 1: each alone rounds away."""
    model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    shardgrad.fully_shard(model)
    lr = 1e-4 if kind is AdamW else 64e-4
    optim = kind(model.parameters(), lr=lr, weight_decay=0.0, **options)
    for _ in range(100):
        model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
        optim.step()
        optim.zero_grad()
    mean = model.weight.full_tensor().float().mean().item()
    if survives:
        assert abs(mean - 0.99) < 3e-3, mean
    else:
        assert mean == 1.0


def rounded(replicas: int) -> list[Tensor]:
    """One step, the same for every element, that lies between two bf16 values; returns this rank's
    pieces.
    """
    ranks = dist.get_world_size()
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(3)))
    for layer in model:
        nn.init.ones_(layer.weight)
    SHARDGRAD.shard(*model, model, mesh=hsdp_mesh(replicas, ranks // replicas))
    first, second, third = model.parameters()
    groups = [{"params": [first, second]}, {"params": [third]}]
    optim = SGD(groups, lr=2.0**-9, stochastic_rounding=True, seed=3)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    return [param.to_local().detach().float().flatten() for param in model.parameters()]


def test_every_unit_and_every_shard_is_rounded_by_coins_of_its_own(four_ranks: Ranks) -> None:
    """Replicas throw the same ones: they would not stay replicas."""
    sharded = four_ranks.run(rounded, 1)
    thrown = [piece for pieces in sharded for piece in pieces]
    assert all(len(piece.unique()) == 2 for piece in thrown)
    same = [torch.equal(a, b) for i, a in enumerate(thrown) for b in thrown[:i]]
    assert not any(same)
    first, second, third, fourth = four_ranks.run(rounded, 2)
    for a, b in ((first, third), (second, fourth)):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize(
    "policy",
    [
        GradientPolicy(),
        GradientPolicy(dtype=torch.float32),
        GradientPolicy(dtype=torch.float32, decoupled=True),
    ],
)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@on_ranks(2)
def test_gradients_are_read_in_their_own_dtype(policy: GradientPolicy, half: torch.dtype) -> None:
    """fp32 gradients under half-precision parameters are read in fp32, wherever they are bound."""
    model = stack(40, 40).to(half)
    mixed = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    shardgrad.fully_shard(model, gradient_policy=policy, mp_policy=mixed)
    params = list(model.parameters())
    optim = SGD(params, lr=1.0, master="float32")
    SHARDGRAD.loss(model, 0, 40, dtype=half).backward()
    grads = [getattr(p, policy.attribute).to_local() for p in params]
    assert {grad.dtype for grad in grads} == {policy.dtype or half}
    expected = [p.to_local().float() - g.float() for p, g in zip(params, grads, strict=True)]
    optim.step()
    for param, right in zip(params, expected, strict=True):
        assert torch.equal(optim.state[param]["master"].to_local(), right)
    optim.zero_grad()
    assert all(getattr(p, policy.attribute) is None for p in params)


def test_the_compiled_kernels_are_the_ones_under_test() -> None:
    assert ops.backend() == "compiled"


# -- refusals


@on_ranks(2)
def test_parameters_of_two_engines_in_one_optimizer_are_refused() -> None:
    ours, theirs = SHARDGRAD.fully_shard(stack(5, 3)), FSDP2.fully_shard(stack(5, 3))
    both = [*ours.parameters(), *theirs.parameters()]
    with pytest.raises(OptimizerParameterError, match="another engine"):
        AdamW(both)
    optim = AdamW(ours.parameters())
    with pytest.raises(OptimizerParameterError, match="another engine"):
        optim.add_param_group({"params": list(theirs.parameters())})
    assert len(optim.param_groups) == 1


@on_ranks(2)
def test_an_optimizer_over_a_shard_that_an_outer_unit_takes_from_is_refused() -> None:
    model = stack(4, 4, 4)
    model[2].weight = model[0].weight
    optim = AdamW(SHARDGRAD.fully_shard(model[0]).parameters())
    SHARDGRAD.shard(model[2], model)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(OptimizerParameterError, match=r"0\.bias shared a flat shard"):
        optim.step()


def replace_object(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def replace_local(model: nn.Module) -> None:
    weight = model[2].weight
    weight._local_tensor = torch.zeros_like(weight._local_tensor)


def assign_data(model: nn.Module) -> None:
    """Torch leaves the local tensor of a DTensor as it is, so nothing would be changed."""
    model[2].weight.data = torch.zeros_like(model[2].weight)


def assign_a_replicated_gradient(model: nn.Module) -> None:
    weight = model[2].weight
    weight.grad = distribute_tensor(torch.ones(3, 4), weight.device_mesh, [Replicate()])


NAMED = r"2\.weight|0\.weight"


@pytest.mark.parametrize("kind", [SGD, Muon])
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (replace_object, OptimizerParameterError, NAMED),
        (replace_local, OptimizerParameterError, NAMED),
        (assign_data, OptimizerParameterError, NAMED),
        (assign_a_replicated_gradient, ForeignParameterError, "sharded as its parameter"),
    ],
)
@on_ranks(2)
def test_what_is_no_longer_as_it_was_sharded_is_refused_before_anything_changes(
    kind: Any, change: Callable[[nn.Module], None], error: type[Exception], words: str
) -> None:
    model = SHARDGRAD.shard_stack(stack(5, 4, 3))
    optim = kind([p for p in model.parameters() if p.ndim == 2], lr=0.1)
    SHARDGRAD.loss(model, 0, 5).backward()
    states = [value for state in optim.state.values() for value in state.values()]
    change(model)
    with unchanged([*model.parameters(), *states]), pytest.raises(error, match=words):
        optim.step()


@on_ranks(2)
def test_a_partial_sum_that_another_library_leaves_is_completed_first() -> None:
    mesh = init_device_mesh("cpu", (2,))
    ends = []
    for kind in (SGD, torch.optim.SGD):
        weight = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))
        weight.grad = DTensor.from_local(torch.ones(3) + dist.get_rank(), mesh, [Partial()])
        kind([weight], lr=0.1).step()
        ends.append(weight.to_local())
    assert torch.equal(*ends)
