"""A step whose gradients are not finite is skipped by all ranks, whoever finds it out."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

import shardgrad
from tests.support.muon import everything
from tests.support.parity import SHARDGRAD, stack
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf])
@pytest.mark.parametrize("finder", ["clip", "clip by the maximum", "check_finite", "found_inf"])
@pytest.mark.parametrize("kind", [shardgrad.optim.AdamW, shardgrad.optim.Muon])
@on_ranks(2)
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing_not_even_counts(
    kind: type[torch.optim.Optimizer], finder: str, value: float
) -> None:
    """One element on one rank; every rank skips, and the next step counts again."""
    model = SHARDGRAD.fully_shard(stack(6, 5, 4))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optim = kind(matrices, lr=0.1, check_finite=finder == "check_finite")
    for step in range(3):
        before = everything(model, optim)
        is_broken = step == 1
        model(SHARDGRAD.inputs(step, 6)).square().mean().backward()
        if is_broken and dist.get_rank() == 1:
            model[0].weight.grad.to_local()[0, 0] = value
        if finder.startswith("clip"):
            norm_type = 2.0 if finder == "clip" else math.inf
            norm = shardgrad.clip_grad_norm_(model, 1.0, norm_type=norm_type)
            assert torch.isfinite(norm) == (not is_broken)
        if finder == "found_inf":
            optim.found_inf = torch.tensor(float(is_broken))
        optim.step()
        model.zero_grad()
        after = everything(model, optim)
        moved = [n for n, old in before.items() if not torch.equal(after[n], old)]
        if is_broken:
            assert moved == []
        elif step:
            assert moved == [name for name in before if "bias" not in name]
        assert all(values.isfinite().all() for values in after.values())
    assert optim.skipped_steps.item() == 1
    assert [optim.state[p]["step"].item() for p in matrices] == [2, 2]
