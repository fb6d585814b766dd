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

from shardgrad.engine.grad_group import GradGroup
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
    enrolment = context.scheduler.enrolment = _Enrolment(context) if torch.is_grad_enabled() else None
    try:
        yield
    except BaseException:
        context.recover()
        raise
    _join_rest(context, enrolment)


class _Enrolment:
    """Makes the one backward inside a `participate` reduce every group.

    Args:
        context: of the root.
    """

    def __init__(self, context: RootContext) -> None:
        self._groups = context.grad_groups
        self._is_used = False

    @property
    def is_open(self) -> bool:
        """True if its backward is still to come."""
        return bool(self._groups) and not self._is_used

    def __call__(self) -> list[GradGroup]:
        if self._is_used:
            raise ParticipationError(
                "a second backward inside one participate()",
                expected="at most one forward and one backward",
                got="another backward, which the other ranks would not join",
                fix="one `with shardgrad.participate(model):` for each micro-batch",
            )
        self._is_used = True
        return [grads for grads in self._groups if grads.params]


def _join_rest(context: RootContext, enrolment: _Enrolment | None) -> None:
    """Joins what this rank has not run: the rest of the all-gathers, then the reductions."""
    context.gather_rest()
    scheduler = context.scheduler
    # Not if the iteration was cleared.
    if enrolment is not None and scheduler.enrolment is enrolment and enrolment.is_open:
        scheduler.begin_backward(in_autograd=False)
        scheduler.reduce_ready()
        context.end_backward()
    context.keep_unsharded = False
    scheduler.enrolment = None
    for unit in context.units:
        unit.reshard()
