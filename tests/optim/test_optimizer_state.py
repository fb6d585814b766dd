"""Optimizer state goes to and from torch's optimizers, FSDP2, other world sizes and checkpoints."""

from __future__ import annotations

import copy
from itertools import pairwise, permutations, product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from shardgrad.errors import DeepcopyError, OptimizerStateError, UnsupportedError
from tests.support import under_patch
from tests.support.muon import cut_like, exactly, muon
from tests.support.parity import (
    FSDP2,
    GATHERED,
    SHARDGRAD,
    UNSHARDED,
    Engine,
    assert_close,
    assert_same_bits,
    hsdp_mesh,
    tower,
)
from tests.support.ranks import on_ranks
from tests.support.two_engines import build, take_steps, whole


def adamw(engine: Engine, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return engine.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})


def muon_of(engine: Engine, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return muon(engine, [p for p in model.parameters() if p.ndim == 2], **options)


WAYS = [
    *((adamw, *way) for other in (FSDP2, UNSHARDED) for way in permutations((GATHERED, other))),
    *((muon_of, *way) for way in product((GATHERED, UNSHARDED), repeat=2)),
]


@pytest.mark.parametrize(("make", "source", "target"), WAYS)
@on_ranks(4)
def test_a_state_goes_between_us_and_torch(make: Any, source: Engine, target: Engine) -> None:
    """Two steps under `source`, two under `target`, equal four steps of the unsharded oracle. The
    parameters of the saved state have names, as those of a distributed checkpoint.
    """
    with exactly():
        # Ours is loaded from another mesh, too.
        mesh = {"mesh": hsdp_mesh(2, 2)} if target == GATHERED else {}
        model = source.shard_tower(tower(), **mesh)
        other, oracle = (engine.shard_tower(tower()) for engine in (target, UNSHARDED))
        optim, oracle_optim = make(source, model), make(UNSHARDED, oracle)
        other_optim = make(target, other, lr=1.0)  # the rate is loaded, too
        take_steps(source, model, optim, range(2))
        saved = optim.state_dict()
        if UNSHARDED in (source, target):  # as a checkpoint of a plain run has it
            saved["state"] = tree_map(under_patch.whole, saved["state"])
        numbers = saved["param_groups"][0]["params"]
        saved["state"] = {str(number): saved["state"][number] for number in numbers}
        numbers[:] = map(str, numbers)
        with torch.no_grad():
            for into, value in zip(other.parameters(), model.parameters(), strict=True):
                full = under_patch.whole(value)
                into.copy_(cut_like(into, full) if isinstance(into, DTensor) else full)
        other_optim.load_state_dict(copy.deepcopy(saved))
        take_steps(target, other, other_optim, range(2, 4))
        take_steps(UNSHARDED, oracle, oracle_optim, range(4))
        right, found = whole(oracle, oracle_optim), whole(other, other_optim)
        ours = {name: found[name].double() for name in right}  # of torch's state, which counts so
        assert_close(ours, {name: value.double() for name, value in right.items()})


@on_ranks(2)
def test_state_is_one_dtensor_for_each_parameter_in_flat_memory() -> None:
    model, optim = build(SHARDGRAD)
    take_steps(SHARDGRAD, model, optim, range(1))
    for param in model.parameters():
        state = optim.state[param]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert (state["step"].dtype, state["step"].item()) == (torch.float32, 1.0)
        for key in ("exp_avg", "exp_avg_sq"):
            assert isinstance(state[key], DTensor)
            assert (state[key].shape, state[key].placements) == (param.shape, param.placements)
    for key in ("exp_avg", "exp_avg_sq"):
        pieces = [optim.state[param][key].to_local() for param in model.layers[0].parameters()]
        begins = [piece.data_ptr() for piece in pieces]
        apart = [after - before for before, after in pairwise(begins)]
        # Each piece begins where the one before it ends, at the next multiple of 128 bytes.
        assert apart == [-(-piece.nbytes // 128) * 128 for piece in pieces[:-1]]


@on_ranks(2)
def test_a_loaded_state_says_nothing_about_how_torch_computes() -> None:
    """`capturable=False` of a saved group would make a capture be refused; it is torch's affair."""
    _, optim = build(SHARDGRAD)
    before = {key: value for key, value in optim.param_groups[0].items() if key != "params"}
    other, other_optim = build(FSDP2)
    take_steps(FSDP2, other, other_optim, range(1))
    saved = copy.deepcopy(other_optim.state_dict())
    saved["param_groups"][0].update(capturable=True, foreach=False, lr=torch.tensor(0.5))
    optim.load_state_dict(saved)
    saved["param_groups"][0]["lr"].zero_()  # a rate is copied, as torch does
    after = {key: value for key, value in optim.param_groups[0].items() if key != "params"}
    assert after == before | {"lr": 0.5}


@on_ranks(2)
def test_a_state_that_does_not_fit_is_refused_before_anything_changes() -> None:
    model, optim = build(SHARDGRAD)
    take_steps(SHARDGRAD, model, optim, range(2))
    right, lr = whole(model, optim), optim.param_groups[0]["lr"]

    def refused(change: Any, error: type[Exception] = OptimizerStateError) -> None:
        saved = copy.deepcopy(optim.state_dict())
        saved["param_groups"][0]["lr"] = 0.5
        for state in saved["state"].values():
            state["exp_avg"] = state["exp_avg"] + 1
        change(saved)
        with pytest.raises(error):
            optim.load_state_dict(saved)
        assert optim.param_groups[0]["lr"] == lr
        assert_same_bits(whole(model, optim), right)

    refused(lambda saved: saved["param_groups"].append(saved["param_groups"][0]))
    refused(lambda saved: saved["param_groups"][0]["params"].pop())
    refused(lambda saved: saved["state"][3].update(exp_avg=torch.zeros(2, 2)))
    refused(lambda saved: saved["state"][3].update(exp_avg="a string"))
    refused(lambda saved: saved["state"][3].update(step=torch.zeros(2)))
    refused(lambda saved: saved["state"][3].update(max_exp_avg_sq=torch.zeros(2, 2)))
    refused(lambda saved: saved["param_groups"][0].update(amsgrad=True), UnsupportedError)
    refused(lambda saved: saved["param_groups"][0].update(betas=(2.0, 0.5)), ValueError)
    refused(lambda saved: saved["param_groups"][0].update(weight_decay=float("nan")), ValueError)


@pytest.mark.parametrize("counts", [False, True], ids=["without counts", "counts left at 0"])
@on_ranks(2)
def test_momentum_goes_both_ways_and_is_not_taken_for_a_fresh_start(counts: bool) -> None:
    """torch's SGD saves no counts; a checkpoint of it that is loaded in part leaves ours at 0."""

    def sgd(engine: Engine) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = engine.shard_tower(tower())
        return model, engine.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)

    (model, optim), (other, other_optim) = sgd(SHARDGRAD), sgd(FSDP2)
    take_steps(SHARDGRAD, model, optim, range(2))
    take_steps(FSDP2, other, other_optim, range(2))
    mine, theirs = copy.deepcopy(optim.state_dict()), copy.deepcopy(other_optim.state_dict())
    for state in theirs["state"].values() if counts else ():
        state["step"] = torch.zeros(())
    for state in () if counts else (mine, theirs):  # a momentum may be zero
        state["state"][0]["momentum_buffer"].to_local().zero_()
    optim.load_state_dict(theirs)
    other_optim.load_state_dict(mine)
    # Dampening tells whether the first step is taken for the first one again.
    take_steps(SHARDGRAD, model, optim, range(2, 4))
    take_steps(FSDP2, other, other_optim, range(2, 4))
    for ours, right in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.to_local(), right.to_local(), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_hooks_run_and_copies_are_refused() -> None:
    model, optim = build(SHARDGRAD)
    calls: list[str] = []
    optim.register_load_state_dict_pre_hook(lambda o, s: s.update(seen=calls.append("before")))
    optim.register_load_state_dict_post_hook(lambda o: calls.append("after"))
    optim.register_state_dict_post_hook(lambda o, s: calls.append("saved"))
    optim.register_step_pre_hook(lambda o, a, k: calls.append("step"))
    saved = optim.state_dict()
    optim.load_state_dict(saved)
    assert "seen" not in saved  # a hook changes a copy, as in torch
    take_steps(SHARDGRAD, model, optim, range(1))
    assert calls == ["saved", "before", "after", "step"]
    with pytest.raises(DeepcopyError, match="state_dict"):
        copy.deepcopy(optim)


@on_ranks(2)
def test_an_optimizer_built_over_a_meta_model_allocates_at_its_first_step() -> None:
    with torch.device("meta"):
        model = tower()
    SHARDGRAD.shard_tower(model)
    optim = adamw(SHARDGRAD, model)
    assert not optim.state
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for param in model.parameters():
        torch.nn.init.normal_(param)
    take_steps(SHARDGRAD, model, optim, range(1))
    assert len(optim.state) == len(list(model.parameters()))
