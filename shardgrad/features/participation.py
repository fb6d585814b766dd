"""Joining every collective, whatever this rank runs: for ranks without a batch and data-dependent
models.

[Note: Participation]
Under `participate` the sequence of collectives is fixed and does not depend on what a rank runs:
every unit's all-gather once, in construction order, then every group's reduction once, in the
reverse order. A unit is gathered when this rank enters it or a later one; what is left is gathered
when backward begins, or at the end. Nothing is resharded in between, so the peak is the unsharded
model in the gather dtype, as in ZeRO-2. Groups without gradients send zeros, and the average is
over all ranks, including those without a batch.

Reentrant checkpointing runs a nested backward for each checkpoint, and a parameter that several
checkpoints use gets a gradient from each. Outside of `participate`, a gradient that arrives late is
reduced in another reduction; here, other ranks would not join that. So a group whose gradients come
from a nested backward, or whose unit ran without gradients and may be recomputed, is reduced at the
end of the whole backward, and so are the groups that follow in the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from shardgrad.engine.grad_group import GradGroup
from shardgrad.engine.param_group import graph_task
from shardgrad.engine.unit import RootContext, Unit, require_awake
from shardgrad.errors import ParticipationError
from shardgrad.features.root_of import root_of


@contextmanager
def participate(model: nn.Module) -> Iterator[None]:
    """Makes this rank join every collective of one iteration: at most one forward, one backward.

    Every rank must enter it in the same iteration, with or without a batch:

        with shardgrad.participate(model):
            if batch is not None:
                model(batch).sum().backward()

    Gradients are then the mean over all ranks; a rank without a batch contributes zeros, and so
    does one whose forward raises if the program catches that inside.

    Args:
        model: the root module.

    Streams: as forward and backward.
    Capture: not safe, because Python decides which units run.

    Raises:
        RootError: not the root.
        ParticipationError: contexts are nested, or more than one backward runs inside.
    """
    context = root_of(model, "participate")
    if context.participation is not None:
        raise ParticipationError(
            "participate() cannot be nested",
            expected="one participate() per iteration",
            got="participate() inside participate()",
            fix="exit the first one before entering the next",
        )
    if context.backward_running:
        # here, on every rank: one without a batch has no forward that would do it
        context.recover()
    here = context.participation = _Participation(context)
    try:
        yield
        _join_rest(context, here)
    except BaseException:
        context.participation = None  # what stages keep is dropped, as by the end on other ranks
        context.recover()
        raise


class _Participation:
    """Unshards units in construction order, the only order that ranks share, and makes the one
    backward reduce every group, unless gradients are disabled.

    Attributes:
        count: of units that are gathered so far; before a unit runs, all units before it.
        is_used: its backward has begun.
    """

    def __init__(self, context: RootContext) -> None:
        self._context = context
        self.reduces = torch.is_grad_enabled()
        self.count = 0
        self.is_used = False
        self._task = -1  # autograd's number of the backward
        self._in_parts: set[GradGroup] = set()

    def gather_through(self, unit: Unit | None) -> None:
        """Unshards every unit up to and including `unit`; None: all."""
        units, comm_ctx = self._context.units, self._context.comm_ctx
        last = len(units) if unit is None else units.index(unit) + 1
        for each in units[self.count : last]:
            each.unshard(comm_ctx)
            each.wait_for_unshard(comm_ctx)
        self.count = max(self.count, last)

    def note(self, grads: GradGroup) -> None:
        """Called for each forward, with or without gradients, and for each gradient that
        arrives.
        """
        comes_in_parts = graph_task() != self._task if self.is_used else not torch.is_grad_enabled()
        if comes_in_parts:
            self._in_parts.add(grads)

    def is_complete(self, grads: GradGroup) -> bool:
        """Returns whether gradients are final; False if a checkpoint may add to them later."""
        return grads not in self._in_parts

    def refuse_late(self, grads: GradGroup) -> None:
        """Refuses gradients that arrive after their group was reduced, from a checkpoint."""
        if grads.is_reduced:
            raise ParticipationError(
                f"{grads.group.where} got more gradients after its reduction: a "
                "reentrant checkpoint contains modules that the same forward also runs outside of "
                "it",
                expected="one reduction, since other ranks do not join a second one",
                got=f"{len(grads.gradients)} late gradients",
                where=f"rank {dist.get_rank()}",
                fix="checkpoint(..., use_reentrant=False)",
            )

    def begin(self) -> list[GradGroup]:
        """Returns every group.

        Raises:
            ParticipationError: this is the second backward.
        """
        if self.is_used:
            raise ParticipationError(
                "backward ran twice inside one participate()",
                expected="at most one forward and one backward",
                got="a second backward, which the other ranks would not join",
                fix="one `with shardgrad.participate(model):` for each micro-batch",
            )
        self.is_used = True
        self._task = graph_task()
        return [grads for grads in self._context.grad_groups if grads.takes_part]


def _join_rest(context: RootContext, here: _Participation) -> None:
    """Joins the collectives that this rank has not run: all-gathers first, then reductions."""
    if here.count == 0:
        require_awake(context.units)
        context.take_over_changes()
        context.parameters_written()
    context.participation = here  # which a forward that has failed has cleared
    here.gather_through(None)
    if here.reduces and not here.is_used:
        context.begin_backward(in_autograd=False)
        context.end_backward()
    context.participation = None
    # Ranks with a batch have noted an evaluation. From here on all ranks decide alike what is
    # gathered again.
    context.ran_forward = False
    for unit in context.units:
        unit.reshard(drop_kept=not here.reduces)
