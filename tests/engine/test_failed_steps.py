"""Steps that raise on every rank leave nothing behind; models that differ are found before
training.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardgrad import version
from shardgrad.engine.grad_group import GradState
from shardgrad.engine.unit import unit_of
from shardgrad.errors import DesyncError, GradientError, RankDisagreementError
from tests.support.parity import (
    SHARDGRAD,
    WIDTH,
    Block,
    Tower,
    assert_same_bits,
    hsdp_mesh,
    token_loss,
    tower,
    watching_collectives,
)
from tests.support.ranks import Ranks, on_ranks
from tests.support.traps import Trap, TrapInBackward


class TrappedBlock(Block):
    """Raises where `armed` says."""

    armed: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.armed == "backward":
            x = TrapInBackward.apply(x)
        x = super().forward(x)
        if self.armed == "forward":
            raise Trap("forward")
        return x


def trapped_tower(at: int, reshard_after_forward: bool | None, **options: Any) -> Tower:
    model = tower()
    torch.manual_seed(5)
    model.layers[at] = TrappedBlock()
    return SHARDGRAD.shard_tower(model, reshard_after_forward=reshard_after_forward, **options)


@on_ranks(2)
def test_a_failed_backward_drops_sums_of_its_replicas_and_is_refused_to_an_optimizer() -> None:
    runs = []
    for fails in (True, False):
        model = trapped_tower(0, None, mesh=hsdp_mesh(2, 1))
        if fails:
            model.set_requires_all_reduce(False)  # what it has reduced waits for the replicas
            model.layers[0].armed = "backward"
            with pytest.raises(Trap):
                token_loss(model, SHARDGRAD.tokens(77)).backward()
            with pytest.raises(GradientError, match="cut short"):  # other units have gradients
                torch.optim.SGD(model.parameters()).step()
            model.layers[0].armed = None
            model.set_requires_all_reduce(True)
        token_loss(model, SHARDGRAD.tokens(0)).backward()
        runs.append(SHARDGRAD.snapshot(model))
    assert_same_bits(*runs)


@pytest.mark.parametrize("whole", [True, False], ids=["of_the_model", "of_a_unit_by_itself"])
@pytest.mark.parametrize("where", ["nowhere", "forward", "backward", "backward that is kept"])
@on_ranks(2)
def test_the_step_after_a_failed_one_communicates_like_any_other(where: str, whole: bool) -> None:
    """All that the failed step has unsharded is gathered again, and nothing ahead that only it
    would need.

    They begin in the same order, as no reduction waits for a call that has failed; but a unit that
    has run by itself has entered first, which makes its reduction the last.
    """
    model = trapped_tower(1, None)
    seen: list[list[tuple[str, int]]] = []
    hidden = torch.ones(2, WIDTH, requires_grad=True)

    def loss_of(step: int) -> Tensor:
        is_of_unit = step == 2 and not whole
        return (
            model.layers[1](hidden).sum()
            if is_of_unit
            else token_loss(model, SHARDGRAD.tokens(step))
        )

    for step in range(4):
        fails = step == 2 and where != "nowhere"
        model.layers[1].armed = where.split()[0] if fails else None
        begun: list[tuple[str, int]] = []
        with (
            watching_collectives(
                lambda name, given, begun=begun: begun.append((name, given.numel()))
            ),
            pytest.raises(Trap) if fails else nullcontext(),
        ):
            loss_of(step).backward(create_graph=fails and where.endswith("kept"))
        seen.append(begun)
    assert seen[1]
    assert sorted(seen[3]) == sorted(seen[1])
    assert seen[3] == seen[1] or not whole


@on_ranks(2)
def test_a_forward_goes_on_after_a_backward_inside_it_has_failed() -> None:
    torch.manual_seed(0)
    model, inner = nn.Linear(3, 3), nn.Linear(3, 3)
    model.inner, x = inner, torch.ones(1, 3, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        with pytest.raises(Trap):
            inner(TrapInBackward.apply(x)).sum().backward()
        return inner(x) * model.bias

    model.forward = forward
    expected = inner(x)[0].detach()
    SHARDGRAD.shard(inner, model)(x).sum().backward()
    assert torch.equal(model.bias.grad.full_tensor(), expected)


# -- disagreement


def ordinary(model: Tower) -> Tower:
    return SHARDGRAD.shard_tower(model)


def wider(model: Tower) -> Tower:
    model.layers[1].up = nn.Linear(7, 17)
    model.layers[1].down = nn.Linear(17, 7)
    return SHARDGRAD.shard_tower(model)


def another_dtype(model: Tower) -> Tower:
    model.layers[1].norm.bfloat16()
    return SHARDGRAD.shard_tower(model)


def another_order(model: Tower) -> Tower:
    up = model.layers[1]._modules.pop("up")
    model.layers[1].up = up
    return SHARDGRAD.shard_tower(model)


def fewer_units(model: Tower) -> Tower:
    return SHARDGRAD.shard(model.layers[0], model)


DIFFERENCES: dict[Callable[[Tower], Tower], tuple[str, str]] = {
    wider: ("parameter layers.1.up.weight", "(17, 7)"),
    another_dtype: ("layers.1.norm.weight", "torch.bfloat16"),
    another_order: ("layers.1.up.weight", "layers.1.down.weight"),
    fewer_units: ("parameter", "embedding.weight"),
}


def disagreement(difference: Callable[[Tower], Tower], reference: int) -> str:
    """Returns the error of this rank; all but the reference rank build another model."""
    model = (ordinary if dist.get_rank() == reference else difference)(tower())
    with pytest.raises(RankDisagreementError) as caught, warnings.catch_warnings(action="error"):
        model(SHARDGRAD.tokens(0)[0])
    return str(caught.value)


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_ranks_that_built_different_models_all_name_the_first_difference(
    two_ranks: Ranks, difference: Callable[[Tower], Tower]
) -> None:
    ordinary_part, other_part = DIFFERENCES[difference]
    texts = two_ranks.run(disagreement, difference, 0)
    for rank, text in enumerate(texts):
        assert f"where:    rank {rank}" in text, text
        assert ordinary_part in text, text
        assert other_part in text, text


@on_ranks(2)
def test_ranks_in_models_that_are_alike_are_told_where_the_other_is() -> None:
    models = [ordinary(tower()) for _ in range(2)]
    for model in models:
        token_loss(model, SHARDGRAD.tokens(0)).backward()
    with pytest.raises(DesyncError, match=f"rank {1 - dist.get_rank()} is out of sync"):
        models[dist.get_rank()](SHARDGRAD.tokens(0)[0])


def other_sources_on_rank_1() -> str:
    of_rank = {1: lambda: "0123456789ab"}.get(dist.get_rank(), version.digest_of_sources)
    with patch.object(version, "digest_of_sources", of_rank):
        return disagreement(ordinary, 0)


def test_ranks_that_run_another_version_are_all_told_so(two_ranks: Ranks) -> None:
    for rank, text in enumerate(two_ranks.run(other_sources_on_rank_1)):
        assert text.startswith("ranks built different models"), text
        assert f"where:    rank {rank}" in text, text
        assert re.search(r"rank 1: shardgrad \S+, digest of sources 0123456789ab\n", text), text
        assert "with the same version of shardgrad" in text, text


@on_ranks(2)
def test_gradients_that_a_backward_has_left_half_way_stop_the_next_one() -> None:
    model = SHARDGRAD.shard_tower(tower())
    loss = token_loss(model, SHARDGRAD.tokens(0))
    unit_of(model.layers[0]).grad_groups[0].state = GradState.READY
    with pytest.raises(RuntimeError, match=r"invalid transition .*READY to GradState\.COLLECTING"):
        loss.backward()
