"""Joining every collective, whatever this rank runs: for ranks without a batch and data-dependent models.

[Note: Participation]
Under `participate` the sequence of collectives is fixed and does not depend on what a rank runs: every
unit's all-gather once, in construction order, then every group's reduction once, in the reverse order. A
unit is gathered when this rank enters it or a later one; what is left is gathered when backward begins, or
at the end. Nothing is resharded in between, so the peak is the unsharded model in the gather dtype, as in
ZeRO-2. Groups without gradients send zeros, and the average is over all ranks, including those without a
batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shardgrad.engine.root import RootContext, lazy_init
from shardgrad.engine.unit import unit_of
from shardgrad.errors import ParticipationError

__all__ = ["participate"]


@contextmanager
def participate(model: nn.Module) -> Iterator[None]:
    """Makes this rank join every collective of one iteration: at most one forward, one backward.

    Every rank must enter it in the same iteration, with or without a batch:

        with shardgrad.participate(model):
            if batch is not None:
                model(batch).sum().backward()

    Gradients afterwards are the mean over all ranks; a rank without a batch counts as zero.

    Args:
        model: the root module.

    Streams: as forward and backward.
    Capture: not safe; which units run is decided by Python.

    Raises:
        ParticipationError: not the root, nested, or more than one backward inside.
    """
    unit = unit_of(model)
    if unit is None or (unit.context is not None and not unit.is_root):
        raise ParticipationError(
            "participate() needs the root",
            expected="the outermost module that fully_shard was called on",
            got=type(model).__name__,
            fix="with shardgrad.participate(root):",
        )
    context = lazy_init(unit)
    if context.keep_unsharded:
        raise ParticipationError(
            "participate() cannot be nested",
            expected="one participate() per iteration",
            got="a second one inside the first",
            fix="leave the first one before entering the next",
        )
    context.gather_in_order()
    for grads in context.grad_groups:
        grads.refresh_trainable()  # a rank without a batch runs no forward that would do it
    context.scheduler.enroll(context.grad_groups if torch.is_grad_enabled() else [])
    try:
        yield
    except BaseException:
        context.recover()
        raise
    _join_rest(context)


def _join_rest(context: RootContext) -> None:
    """Joins what this rank has not run: the rest of the all-gathers, then the reductions."""
    context.gather_rest()
    scheduler = context.scheduler
    if scheduler.has_enrolled:
        scheduler.begin_backward(in_autograd=False)
        scheduler.reduce_ready()
        context.end_backward()
    context.keep_unsharded = False
    scheduler.enroll(None)
    for unit in context.units:
        unit.reshard()
