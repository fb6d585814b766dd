"""A step whose gradients are not finite is skipped by all ranks, whoever finds it out."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

import shardgrad
from tests.support.parity import SHARDGRAD, stack
from tests.support.ranks import on_ranks
from tests.support.two_engines import whole


@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf])
@pytest.mark.parametrize(
    "finder",
    [
        "clip",
        "clip by the maximum",
        "found_inf",
        "clip and found_inf",
        "check_finite",
        "check_finite, others clipped",
    ],
)
@pytest.mark.parametrize("kind", [shardgrad.optim.AdamW, shardgrad.optim.Muon])
@on_ranks(2)
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing_not_even_counts(
    kind: type[torch.optim.Optimizer], finder: str, value: float
) -> None:
    """One element on one rank; every rank skips, and the next step counts again."""
    model = stack(6, 5, 4)
    # The one that is broken is in another unit, or others of its unit are clipped.
    SHARDGRAD.shard(*([] if "others" in finder else [model[0]]), model)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optim = kind(matrices, lr=0.1, check_finite="check_finite" in finder)
    for step in range(3):
        before = whole(model, optim)
        is_broken = step == 1
        SHARDGRAD.loss(model, step, 6).backward()
        if is_broken and dist.get_rank() == 1:
            model[2].weight.grad.to_local()[0, 0] = value
        if finder.startswith("clip"):
            norm_type = math.inf if finder == "clip by the maximum" else 2.0
            norm = shardgrad.clip_grad_norm_(model, 1.0, norm_type=norm_type)
            assert torch.isfinite(norm) == (not is_broken)
        if "others" in finder:
            kept, model[2].weight.grad = model[2].weight.grad, None
            shardgrad.clip_grad_norm_(model, 1.0)
            model[2].weight.grad = kept
        if finder.endswith("found_inf"):
            optim.found_inf = torch.tensor(float(is_broken))
        optim.step()
        model.zero_grad()
        after = whole(model, optim)
        moved = [n for n, old in before.items() if not torch.equal(after[n], old)]
        if is_broken:
            assert moved == []
        elif step:
            assert moved == [name for name in before if "bias" not in name]
        assert all(values.isfinite().all() for values in after.values())
    assert optim.skipped_steps.item() == 1
    assert [optim.state[p]["step"].item() for p in matrices] == [2, 2]


@on_ranks(2)
def test_a_step_in_inference_mode_may_be_the_first() -> None:
    model = SHARDGRAD.fully_shard(stack(4, 4))
    optim = shardgrad.optim.SGD(model.parameters(), lr=0.1)
    with torch.inference_mode():
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        shardgrad.clip_grad_norm_(model, 1.0)
        optim.step()
    SHARDGRAD.loss(model, 0, 4).backward()
    shardgrad.clip_grad_norm_(model, 1.0)
    optim.step()
    assert optim.skipped_steps.item() == 0
