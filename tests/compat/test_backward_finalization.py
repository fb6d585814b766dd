"""Backwards that the program ends by hand, as in pipeline stages of torch 2.15; whole memory that
stays.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import fsdp

import shardgrad
from shardgrad.errors import BackwardFinalizationError, RootError
from tests.support import parity
from tests.support.parity import (
    SHARDGRAD,
    UNSHARDED,
    Engine,
    Tensors,
    Tower,
    assert_same_bits,
    close_to_unsharded,
    make_optimizer,
    same_bits_as_fsdp2,
    token_loss,
    tower,
    watching_collectives,
)
from tests.support.ranks import Ranks, on_ranks
from tests.support.traps import Trap, TrapInBackward

MICRO_BATCHES = 3

in_torch = pytest.mark.skipif(
    not hasattr(fsdp.FSDPModule, "finalize_backward"), reason="torch has it from 2.15 on"
)


def train(
    engine: Engine, *, async_op: bool = False, stage: int | None = None, sync: bool = False
) -> Tensors:
    """Trains two steps of several backwards each, which are finalized by hand."""
    model: Any = tower()
    engine.shard_tower(model, **({} if stage is None else {"zero_stage": stage}))
    optim = make_optimizer("adamw", model)
    for step in range(2):
        if engine is not UNSHARDED:
            model.set_manual_backward_finalization(True)
            model.set_requires_gradient_sync(sync)
        for micro_batch in range(MICRO_BATCHES):
            token_loss(model, engine.tokens(step * MICRO_BATCHES + micro_batch)).backward()
        if engine is not UNSHARDED:
            model.set_requires_gradient_sync(True)
            handle = model.finalize_backward(async_op=async_op)
            assert (handle is not None) == async_op
            if handle is not None:
                handle.wait()
                handle.wait()
                assert all(param.grad is not None for param in model.parameters())
            model.set_manual_backward_finalization(False)
        optim.step()
        if step == 0:
            optim.zero_grad()
    return engine.snapshot(model)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_op": True},
        {"stage": 1, "sync": True},
        {"stage": 2, "async_op": True},
        {"sync": True},
    ],
    ids=str,
)
def test_backwards_finalized_by_hand_equal_an_unsharded_run(
    two_ranks: Ranks, options: dict[str, Any]
) -> None:
    two_ranks.run(close_to_unsharded, train, **options)


@on_ranks(2)
def test_a_failed_backward_leaves_nothing_to_finalize() -> None:
    model: Any = SHARDGRAD.shard_tower(tower())
    model.set_manual_backward_finalization(True)
    model.layers[1].register_forward_hook(lambda module, args, output: TrapInBackward.apply(output))
    with pytest.raises(Trap):
        token_loss(model, SHARDGRAD.tokens(0)).backward()
    model.reset_iter_state()
    seen: list[str] = []
    with watching_collectives(lambda name, _: seen.append(name)):
        model.finalize_backward()
    assert not seen
    assert all(param.grad is None for param in model.parameters())


@in_torch
@pytest.mark.parametrize("async_op", [False, True])
def test_backwards_finalized_by_hand_train_bit_for_bit_like_fsdp2(
    two_ranks: Ranks, async_op: bool
) -> None:
    two_ranks.run(same_bits_as_fsdp2, train, async_op=async_op)


@on_ranks(2)
def test_a_finalization_in_the_wrong_place_is_refused_by_name() -> None:
    model: Any = SHARDGRAD.shard_tower(tower())
    inner = model.layers[0]
    assert model.finalize_backward() is None  # nothing has run
    model.finalize_backward(async_op=True).wait()
    with pytest.raises(BackwardFinalizationError, match="requires manual backward finalization"):
        _backward(model).finalize_backward()
    with pytest.raises(RootError, match="must be called on the root"):
        inner.set_manual_backward_finalization(True)
    with pytest.raises(RootError, match="must be called on the root"):
        inner.finalize_backward()
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    _backward(model)
    with pytest.raises(BackwardFinalizationError, match="cannot change mode after backward starts"):
        model.set_manual_backward_finalization(False)
    model.set_requires_gradient_sync(True)
    handle = model.finalize_backward(async_op=True)
    assert isinstance(handle, shardgrad.GradientReductionHandle)
    for call in (lambda: _backward(model), model.finalize_backward):
        with pytest.raises(BackwardFinalizationError, match="must be waited on"):
            call()
    model.set_reduce_scatter_max_input_buffers(1)  # completes the second in flight
    handle.wait()
    _backward(model).finalize_backward()
    model.zero_grad()
    model.unshard()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.finalize_backward()  # which finds it, though no forward has run
    assert (model.head.weight.grad.to_local() == 1).all()
    model.set_manual_backward_finalization(False)
    _backward(model)


def _backward(model: Tower) -> Any:
    token_loss(model, SHARDGRAD.tokens(0)).backward()
    return model


@on_ranks(2)
def test_manual_finalization_supersedes_the_last_backward() -> None:
    model: Any = SHARDGRAD.shard_tower(tower())
    model.set_is_last_backward(False)
    context = model._unit.context
    for enabled in (True, False, True):
        model.set_manual_backward_finalization(enabled)
        assert not context.is_last_backward
    model.set_is_last_backward(True)
    model.finalize_backward()
    assert not context.is_last_backward  # superseded
    model.set_manual_backward_finalization(False)
    assert context.is_last_backward


@on_ranks(2)
def test_unsharded_memory_stays_where_it_is_if_asked_to() -> None:
    def addresses(model: Tower) -> list[tuple[int, int]]:
        model.unshard()
        whole = [model.head.weight, model.gain]
        model.reshard()
        return [(p.data_ptr(), p.untyped_storage().nbytes()) for p in whole]

    model: Any = SHARDGRAD.shard_tower(tower())
    assert all(nbytes == 0 for _, nbytes in addresses(model))
    model.set_keep_unsharded_storage(True, recurse=False)
    kept = addresses(model)
    assert all(nbytes > 0 for _, nbytes in kept)
    others = [torch.empty(1000) for _ in range(100)]
    _backward(model)
    assert addresses(model) == kept
    model.set_keep_unsharded_storage(False)
    assert all(nbytes == 0 for _, nbytes in addresses(model))
    del others


def train_with_memory_that_stays(engine: Engine, keep: bool) -> Tensors:
    model: Any = engine.shard_tower(tower())
    model.set_keep_unsharded_storage(keep)
    return parity.train(engine, model)


@on_ranks(2)
def test_memory_that_stays_changes_no_bit() -> None:
    kept, freed = (train_with_memory_that_stays(SHARDGRAD, keep) for keep in (True, False))
    assert_same_bits(kept, freed)


@in_torch
def test_memory_that_stays_trains_like_fsdp2(two_ranks: Ranks) -> None:
    two_ranks.run(same_bits_as_fsdp2, train_with_memory_that_stays, True)
