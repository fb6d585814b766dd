"""Ranks that use different parameters, run different units, or have no batch."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from copy import deepcopy
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import shardgrad
from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.engine.unit import units_under
from shardgrad.errors import ParticipationError
from tests.support.parity import SHARDGRAD
from tests.support.ranks import on_ranks


def batch_of(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


class Routed(nn.Module):
    """A trunk and two units, of which each rank runs one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, x: Tensor, experts: list[str]) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        return sum((getattr(self, name)(hidden).square().sum() for name in experts), hidden.sum())


def routed() -> Routed:
    torch.manual_seed(0)
    return Routed()


def sharded_routed(stage: object = "auto") -> Routed:
    model = routed()
    # Stage "auto" must not decide in a `participate`, where a rank without a batch has no forward.
    return SHARDGRAD.shard(model.left, model.right, model, zero_stage=stage)


# What each of the two ranks runs in successive iterations; None: no batch, or one that fails.
ROUTES: list[list[list[str] | None]] = [
    [["left"], ["right"]],
    [["left"], None],
    [["left", "right"], []],
    [["right", "left"], ["left", "right"]],
    [None, ["right"]],
]


@pytest.mark.parametrize("stage", ["auto", 2, 3])
@on_ranks(2)
def test_ranks_that_run_different_units_get_the_mean_with_zeros_under_participate(
    stage: object,
) -> None:
    whole, model = routed(), sharded_routed(stage)
    if stage == 3:  # an evaluation keeps parameters, also where a forward fails then
        model.set_reshard_after_forward(False)
    optims = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (whole, model)]
    for step, routes in enumerate(ROUTES):
        mine = routes[dist.get_rank()]
        for each in (whole, model):  # what trains is known to a rank without a batch, too
            each.trunk.weight.requires_grad_(step % 3 == 0)
            each.left.requires_grad_(step % 2 == 0)
        # After an evaluation every rank gathers again; of one of them, a rank alone has a batch.
        with torch.no_grad(), shardgrad.participate(model) if step == 2 else nullcontext():
            if step != 2 or mine:
                model(batch_of(0), ["left"])
        with shardgrad.participate(model):
            if mine is not None:
                model(batch_of(dist.get_rank(), step), mine).backward()
            elif step == 1:
                with suppress(AttributeError):
                    model(batch_of(0), ["missing"])
        for rank, way in enumerate(routes):
            if way is not None:
                (whole(batch_of(rank, step), way) / 2).backward()
        for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), (step, name)
            if theirs.grad is not None:
                torch.testing.assert_close(
                    ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-5
                )
        if step == 1:  # stage 2 keeps parameters, also where a forward has failed
            continue
        for optim in optims:
            optim.step()
            optim.zero_grad()


@on_ranks(2)
def test_no_unit_is_gathered_before_a_rank_comes_to_it_or_a_later_one() -> None:
    model, are_sharded = sharded_routed(), []
    model.trunk.register_forward_pre_hook(
        lambda *_: are_sharded.extend(
            isinstance(each.weight, DTensor) for each in (model.left, model.right)
        )
    )
    with shardgrad.participate(model):
        model(batch_of(dist.get_rank()), ["left", "right"]).backward()
    assert are_sharded == [True, True]
    with torch.no_grad(), shardgrad.participate(model):
        model(batch_of(dist.get_rank()), ["left"])
    assert all(isinstance(param, DTensor) for param in model.parameters())


class Box:
    """Hides a tensor from who looks for inputs that need gradients."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def opened(x: Box | Tensor) -> Tensor:
    return x.x if isinstance(x, Box) else x


class Boxes(nn.Linear):
    def forward(self, x: Tensor) -> Box:
        return Box(super().forward(x))


class Repeated(nn.Module):
    """A layer that is called several times, in reentrant checkpoints ("r") or not ("n"), and a
    scale.
    """

    def __init__(self, calls: str) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(5)) if "s" in calls else None
        self.calls = calls

    def forward(self, x: Box | Tensor) -> Tensor:
        x = opened(x)
        for call in self.calls:
            x = torch.tanh(x)
            if call == "s":
                x = x * self.scale
            else:
                x = checkpoint(self.layer, x, use_reentrant=True) if call == "r" else self.layer(x)
        return x


def repeated(calls: str, unit: str) -> tuple[nn.Module, nn.Module]:
    """Returns the oracle, and the same with a unit: the layer, the module around it, which may see
    no inputs ("boxed"), or the root alone.
    """
    torch.manual_seed(0)
    whole = nn.Sequential((Boxes if unit == "boxed" else nn.Linear)(5, 5), Repeated(calls))
    model = deepcopy(whole)
    inner = {"layer": [model[1].layer], "root": []}.get(unit, [model[1]])
    return whole, SHARDGRAD.shard(*inner, model)


def have_mean_gradients(model: nn.Module, whole: nn.Module, *ranks: int) -> None:
    """Requires the gradients that the whole model has of the batches of these ranks, beside those
    that it has had.
    """
    for rank in ranks:
        (whole(batch_of(rank)).square().sum() / dist.get_world_size()).backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("calls", "unit"),
    [
        *product(("r", "rr", "rn", "rnr"), ("layer", "root")),
        *product(("r", "nr", "rn", "nsr"), ("around",)),
        *product(("nr", "rr"), ("boxed",)),
    ],
)
@on_ranks(2)
def test_a_rank_without_a_batch_joins_one_that_recomputes_by_reentry(calls: str, unit: str) -> None:
    whole, model = repeated(calls, unit)
    for step in range(2):
        with shardgrad.participate(model):
            if dist.get_rank() == step:
                model(batch_of(step)).square().sum().backward()
        have_mean_gradients(model, whole, step)


class MayBeBoxed(nn.Linear):
    def forward(self, x: Box | Tensor) -> Tensor:
        return super().forward(opened(x))


class Hidden(nn.Module):
    """Calls its layer with an input that nobody sees: in a checkpoint and then outside of it, or
    before one that everybody sees.
    """

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.layer, self.recomputes = MayBeBoxed(5, 5), recomputes

    def forward(self, x: Tensor) -> Tensor:
        if not self.recomputes:
            return self.layer(torch.tanh(self.layer(Box(x))))
        x = checkpoint(lambda x: self.layer(Box(x)), torch.tanh(x), use_reentrant=True)
        return self.layer(Box(torch.tanh(x)))


@pytest.mark.parametrize("recomputes", [True, False])
@on_ranks(2)
def test_a_unit_that_sees_no_inputs_waits_for_another_call_of_it(*, recomputes: bool) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(5, 5), Hidden(recomputes=recomputes))
    model = deepcopy(whole)
    SHARDGRAD.shard(model[1].layer, model)
    with shardgrad.participate(model):
        if dist.get_rank() == 0:
            model(batch_of(0)).square().sum().backward()
    have_mean_gradients(model, whole, 0)


@on_ranks(2)
def test_gradients_that_come_after_their_reduction_are_refused() -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(Boxes(5, 5), Repeated("rn"))
    model = deepcopy(whole)
    SHARDGRAD.shard(model[1], model)
    refusal = pytest.raises(ParticipationError, match=r"(?s)unit '1.*use_reentrant=False")
    with refusal if dist.get_rank() == 0 else nullcontext(), shardgrad.participate(model):
        if dist.get_rank() == 0:
            model(batch_of(0)).square().sum().backward()
    model.zero_grad()
    model(batch_of(dist.get_rank())).square().sum().backward()  # ranks are where they were
    have_mean_gradients(model, whole, *range(dist.get_world_size()))


@on_ranks(2)
def test_a_rank_without_a_batch_joins_an_evaluation() -> None:
    whole, model = routed(), sharded_routed(stage=2)
    with torch.no_grad(), shardgrad.participate(model):
        if dist.get_rank() == 0:
            x = batch_of(0)
            assert torch.equal(model(x, ["left"]), whole(x, ["left"]))
    groups = [group for unit in units_under(model) for group in unit.groups]
    assert not any(group.is_filled for group in groups), "the program may write the shards now"
    assert recorder.last.name.startswith("all-gather of")  # and nothing was reduced
    model.unshard(async_op=True)
    model(batch_of(0), ["left", "right"])  # for which no rank gathers that again


@pytest.mark.parametrize("inside", [True, False])
@on_ranks(2)
def test_a_rank_without_a_batch_joins_the_iteration_after_one_that_was_interrupted(
    *, inside: bool
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    whole, model = repeated("n", "layer")
    hook = model[1].register_full_backward_hook(interrupt)
    joint = shardgrad.participate(model) if inside else nullcontext()
    with pytest.raises(KeyboardInterrupt), joint:
        model(batch_of(0)).square().sum().backward()
    hook.remove()
    with shardgrad.participate(model):
        if dist.get_rank() == 0:
            model(batch_of(0)).square().sum().backward()
    have_mean_gradients(model, whole, 0)


@on_ranks(2)
def test_misuse_of_participate_is_refused() -> None:
    model = sharded_routed()
    with (
        pytest.raises(ParticipationError, match="nested"),
        shardgrad.participate(model),
        shardgrad.participate(model),
    ):
        pass

    def two_backwards() -> None:
        with shardgrad.participate(model):
            for step in range(2):
                model(batch_of(dist.get_rank(), step), ["left"]).backward()

    with pytest.raises(ParticipationError, match="second backward"):
        two_backwards()
