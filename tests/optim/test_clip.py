"""Clipping measures like torch, whatever is clipped, on whatever meshes."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardgrad
from shardgrad.errors import GradientError, OptionError
from shardgrad.optim.norms import _table_of_one
from tests.support.parity import (
    GATHERED,
    SHARDGRAD,
    UNSHARDED,
    Engine,
    Tensors,
    assert_close,
    float64,
    hsdp_mesh,
    stack,
    token_loss,
    tower,
    unchanged,
)
from tests.support.ranks import Ranks, on_ranks

NORMS = [2.0, 1.0, math.inf, 3.5, -math.inf]


def clip(engine: Engine, params: Any, *args: Any, **kwargs: Any) -> Tensor:
    if engine is UNSHARDED:
        norm: Tensor = nn.utils.clip_grad_norm_(params.parameters(), *args, **kwargs)
    else:
        norm = shardgrad.clip_grad_norm_(params, *args, **kwargs)
    assert norm.dtype == torch.float64
    return norm


def clipped(engine: Engine, norm_type: float, mesh: tuple[int, int] | None) -> Tensors:
    options = {} if mesh is None else {"mesh": hsdp_mesh(*mesh)}
    model = engine.shard_tower(tower(), **options)
    token_loss(model, engine.tokens(0)).backward()
    norm = clip(engine, model, 1e-3, norm_type=norm_type)
    return {"norm": norm, **engine.snapshot(model)}


@pytest.mark.parametrize(("ranks", "mesh"), [(2, None), (4, (2, 2))], ids=["shards", "replicas"])
def test_every_norm_is_torchs_and_counts_replicas_once(
    worlds: dict[int, Ranks], ranks: int, mesh: tuple[int, int] | None
) -> None:
    worlds[ranks].renewed().run(norms_are_torchs, mesh)


def norms_are_torchs(mesh: tuple[int, int] | None) -> None:
    with float64():
        for norm_type in NORMS:
            ours, theirs = clipped(GATHERED, norm_type, mesh), clipped(UNSHARDED, norm_type, mesh)
            assert_close(ours, theirs, tolerance=1e-12)


@on_ranks(2)
def test_the_norm_of_order_zero_counts_elements() -> None:
    model = SHARDGRAD.fully_shard(stack(5, 3))
    model(SHARDGRAD.inputs(0, 5)).sum().backward()
    model[0].bias.grad.zero_()
    assert shardgrad.clip_grad_norm_(model, math.inf, norm_type=0.0) == 15


def test_a_table_that_is_kept_is_for_training_even_if_an_evaluation_makes_it() -> None:
    with torch.inference_mode():
        rows, _ = _table_of_one(12_345, torch.device("cpu"))
    assert not rows.is_inference()


@on_ranks(2)
def test_a_norm_is_float64_if_a_gradient_is_sharded_or_not() -> None:
    for dtypes in product((torch.float32, torch.float64), repeat=2):
        sharded, plain = (nn.Linear(3, 3, dtype=dtype) for dtype in dtypes)
        shardgrad.fully_shard(sharded)
        for layer, dtype in zip((sharded, plain), dtypes, strict=True):
            layer(torch.ones(2, 3, dtype=dtype)).sum().backward()
        norm = shardgrad.clip_grad_norm_([*sharded.parameters(), *plain.parameters()], 1.0)
        assert norm.dtype == max(dtypes, key=lambda dtype: dtype.itemsize)
        assert norm == pytest.approx(96**0.5)  # of 24 elements that are 2
    plain.weight.grad.fill_(1e200)  # whose squares are infinite
    with pytest.raises(GradientError, match="non-finite"):
        shardgrad.clip_grad_norm_(plain, 1.0, error_if_nonfinite=True)


@on_ranks(4)
def test_units_on_other_meshes_and_plain_parameters_share_a_norm() -> None:
    """A unit over two ranks, one over hybrid shards, and parameters nobody shards, in one norm."""
    norms = []
    for engine in (SHARDGRAD, UNSHARDED):
        model = stack(5, 6, 7, 3).double()
        if engine is SHARDGRAD:
            shardgrad.fully_shard(model[0], ignored_params={*model[4].parameters()})
            shardgrad.fully_shard(model[2], mesh=hsdp_mesh(2, 2))
        # The same on each rank.
        UNSHARDED.loss(model, 0, 5, dtype=torch.float64).backward()
        norms.append(clip(engine, model, 0.1))
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0)


@on_ranks(2)
def test_bad_arguments_are_refused() -> None:
    model = SHARDGRAD.fully_shard(stack(5, 3))
    model(SHARDGRAD.inputs(0, 5)).sum().backward()
    model[0].bias.grad.fill_(math.nan)
    with unchanged([model[0].weight.grad]):
        for limit, order, words in (
            (-1.0, 2.0, "max_norm"),
            (1.0, -2.0, "norm_type is not supported"),
            (1.0, "two", "must be numbers"),
            *((limit, 2.0, "must be numbers") for limit in (None, 1j, model)),
        ):
            with pytest.raises(OptionError, match=words):
                shardgrad.clip_grad_norm_(model, limit, norm_type=order)
        with pytest.raises(GradientError, match="non-finite"):
            shardgrad.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        shardgrad.clip_grad_norm_(model, math.inf)  # scales nothing
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(GradientError, match="dense"):
        shardgrad.clip_grad_norm_(table, 1.0)
    assert shardgrad.clip_grad_norm_([], 1.0) == 0
