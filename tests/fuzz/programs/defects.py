"""Defects that the engine once had, put back to see that the generator finds them.

Each is what the engine's code was, as a patch of what it is now, named after what a program saw of
it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partialmethod
from typing import Any
from unittest import mock

from shardgrad.engine import managed_params
from shardgrad.engine.grad_group import GradGroup
from shardgrad.engine.grad_shard import GradShard
from shardgrad.engine.param_group import ParamGroup, managed_by
from shardgrad.engine.unit import RootContext, Unit
from shardgrad.optim import selection

Patch = AbstractContextManager[Any]


def _drop_all_of(grads: GradGroup) -> None:
    grads._drop_collected()
    grads.summed = ()
    grads.is_due = grads.partial.is_live = False


def _self_call_drops_gradients() -> Iterator[Patch]:
    """A root that calls itself was taken for one whose forward had failed, and that dropped all
    gradients.
    """
    recover = RootContext.recover

    def drop_all(self: RootContext) -> None:
        recover(self)
        for grads in self.grad_groups:
            _drop_all_of(grads)
            if grads.shard is not None:
                grads.shard.unbind()

    enter = RootContext.enter_forward

    def enter_anew(self: RootContext, unit: Unit, *inputs: Any) -> Any:
        if self.forward_root is unit:
            self.recover()
        return enter(self, unit, *inputs)

    yield mock.patch.object(RootContext, "enter_forward", enter_anew)
    yield mock.patch.object(RootContext, "recover", drop_all)


def _clipping_misses_unsharded_units() -> Iterator[Patch]:
    """Clipping looked gradients up at the parameters that modules register, unsharded after an
    evaluation.
    """

    yield mock.patch.object(selection, "fsdp_param_of", managed_by)


def _frozen_after_forward_is_trained() -> Iterator[Patch]:
    """What was frozen since the forward was not carried to the parameters that backward sees."""
    carry, take = ParamGroup.carry_requires_grad, GradGroup.take

    def not_in_backward(self: ParamGroup) -> tuple[bool, ...]:
        is_late = getattr(self.grads.scheduler, "backward_running", False)
        return self.trainable if is_late else carry(self)

    yield mock.patch.object(ParamGroup, "carry_requires_grad", not_in_backward)
    yield mock.patch.object(GradGroup, "take", partialmethod(take, is_written=True))


def _order_recorded_under_participate() -> Iterator[Patch]:
    """A forward under `participate`, of other units on each rank, was recorded for prefetching."""
    upcoming, leave = RootContext.upcoming, RootContext.leave_forward

    def record(self: RootContext, unit: Unit) -> Sequence[Unit]:
        held, self.participation = self.participation, None
        try:
            return upcoming(self, unit)
        finally:
            self.participation = held

    def freeze(self: RootContext, unit: Unit) -> None:
        is_over = self.forward_root is unit and not unit.running and unit is self.root
        leave(self, unit)
        self._order_frozen |= is_over

    yield mock.patch.object(RootContext, "upcoming", record)
    yield mock.patch.object(RootContext, "leave_forward", freeze)


def _zeros_are_scaled_by_nan() -> Iterator[Patch]:
    """Gradients that were zeroed were still to be multiplied by what clipping had left."""

    def zero(self: GradShard, places: Sequence[int]) -> None:
        live = self.settle()
        for place in places:
            if live[place]:
                self.views[place].zero_()

    yield mock.patch.object(GradShard, "zero", zero)


def _freezing_drops_what_waits() -> Iterator[Patch]:
    """A parameter that was frozen lost its place at once, and what waited on this rank was
    dropped.
    """
    refresh = GradGroup.refresh_trainable

    def drop(self: GradGroup) -> None:
        self.join()
        _drop_all_of(self)
        refresh(self)

    yield mock.patch.object(GradGroup, "refresh_trainable", drop)


def _ties_in_the_order_of_a_set() -> Iterator[Patch]:
    """Parameters that units share went up to the root in the order of a set, another one on each
    rank.
    """
    tied_under, addresses = managed_params.tied_under, random.SystemRandom()

    def in_any_order(roots: Any) -> Any:
        tied = list(tied_under(roots))
        return addresses.sample(tied, len(tied))

    yield mock.patch.object(managed_params, "tied_under", in_any_order)


def _written_gradients_are_lost() -> Iterator[Patch]:
    """Gradients that the program had put on unsharded parameters were never reduced."""
    yield mock.patch.object(GradGroup, "collect_written")


DEFECTS: dict[str, Callable[[], Iterator[Patch]]] = {
    "a self-call drops gradients": _self_call_drops_gradients,
    "clipping misses unsharded units": _clipping_misses_unsharded_units,
    "frozen after forward is trained": _frozen_after_forward_is_trained,
    "order recorded under participate": _order_recorded_under_participate,
    "zeros are scaled by NaN": _zeros_are_scaled_by_nan,
    "freezing drops what waits": _freezing_drops_what_waits,
    "ties in the order of a set": _ties_in_the_order_of_a_set,
    "written gradients are lost": _written_gradients_are_lost,
}


@contextmanager
def put_back(name: str) -> Iterator[None]:
    """Makes the engine have a defect; "" for none."""
    with ExitStack() as stack:
        for patch in DEFECTS[name]() if name else ():
            stack.enter_context(patch)
        yield
