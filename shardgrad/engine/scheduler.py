"""Reductions: in which order groups are reduced.

[Note: Order of reductions]
The sequence of collectives must not depend on the data, or ranks that use different parameters would pair
up the wrong ones. Groups are therefore reduced in the reverse of the order in which their units entered
forward, each exactly once, whether or not it got gradients: a group that is complete early waits for its
predecessors, one that got nothing sends zeros. Sizes are fixed by the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from shardgrad.engine.comm_context import CommContext
from shardgrad.engine.grad_group import GradGroup
from shardgrad.engine.reduction import Reduction
from shardgrad.errors import ParticipationError

__all__ = ["ReductionScheduler"]


class ReductionScheduler:
    """Decides the order of reductions under one root. See [Note: Order of reductions].

    Args:
        runtime: shared with the units.
        end_backward: called once when autograd has finished a backward that this scheduler saw begin.

    Attributes:
        backward_running: between the first gradient of a backward and its end.
        is_last_backward: False for a micro-batch that others follow.
    """

    def __init__(self, runtime: CommContext, end_backward: Callable[[], None]) -> None:
        self.runtime = runtime
        self._end_backward = end_backward
        self.backward_running = False
        self.is_last_backward = True
        self._entered: dict[GradGroup, None] = {}
        self._queue: list[GradGroup] = []
        self._expected: set[GradGroup] = set()
        self._closed: set[GradGroup] = set()
        self._tickets: list[Reduction] = []
        self._enrolled: list[GradGroup] | None = None
        self._enrolment_used = False

    def enter(self, grads: GradGroup) -> None:
        """Notes that a unit entered forward with gradients on; its group will be reduced in this backward."""
        if self.backward_running:
            self.expect(grads)
        else:
            self._entered[grads] = None

    def expect(self, grads: GradGroup) -> None:
        """Adds a group that backward has come to although it was not queued: it is the next to finish.

        Reentrant checkpointing runs a unit's forward inside backward; a second backward through a kept
        graph comes without a forward.
        """
        if grads not in self._expected:
            self._expected.add(grads)
            self._queue.append(grads)

    def enroll(self, everyone: Iterable[GradGroup] | None) -> None:
        """Makes the next backward, and no further one, reduce exactly these groups, entered or not.

        None ends the enrolment. See [Note: Participation].
        """
        self._enrolled = None if everyone is None else [g for g in everyone if g.params]
        self._enrolment_used = False

    @property
    def has_enrolled(self) -> bool:
        """True if an enrolled backward is still to come."""
        return bool(self._enrolled) and not self._enrolment_used

    def begin_backward(self, *, in_autograd: bool) -> None:
        """Fixes the order of this backward's reductions; does nothing if it has begun already.

        Args:
            in_autograd: called from a hook, so that autograd can be asked to call back at its end.
        """
        if self.backward_running:
            return
        self.backward_running = True
        if in_autograd:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._queue = list(self._entered)
        self._closed.clear()
        if self._enrolled is not None:
            if self._enrolment_used:
                raise ParticipationError(
                    "a second backward inside one participate()",
                    expected="at most one forward and one backward",
                    got="another backward, which the other ranks would not join",
                    fix="one `with shardgrad.participate(model):` for each micro-batch",
                )
            self._enrolment_used = True
            self._queue = list(self._enrolled)
            self._closed.update(g for g in self._queue if g not in self._entered)
        self._entered.clear()
        self._expected = set(self._queue)
        for grads in self._queue:
            grads.bound_in_this_backward = False

    def arrived(self, grads: GradGroup) -> None:
        """A gradient came in; reduces what has become possible."""
        if not self.backward_running:
            self.begin_backward(in_autograd=True)
        if grads.collector.complete:
            self.close(grads)

    def close(self, grads: GradGroup) -> None:
        """Says that no more gradients are expected for this group; reduces what has become possible."""
        self._closed.add(grads)
        self.reduce_ready()

    def reduce_ready(self) -> None:
        """Reduces, in order, the groups at the head of the queue that expect no more gradients."""
        while self._queue and self._queue[-1] in self._closed:
            self._reduce(self._queue.pop())

    def _reduce(self, grads: GradGroup) -> None:
        self._closed.discard(grads)
        if grads.reduces_now:
            self._tickets.append(grads.launch())
        else:
            grads.accumulate()

    def drain(self, everyone: Iterable[GradGroup], *, wait: bool) -> None:
        """Ends a backward: reduces all that is left, then makes the current stream wait for the gradients.

        Args:
            everyone: all grad_groups under the root, in construction order.
            wait: False leaves reductions in flight, for a backward that is not the last one.
        """
        while self._queue:
            self._reduce(self._queue.pop())
        # Gradients that came without the unit entering forward, for example through unshard() by hand.
        for grads in everyone:
            if grads.due:
                self._reduce(grads)
        self._closed.clear()
        self.backward_running = False
        if wait:
            self.join()

    def join(self) -> None:
        """Completes every reduction in flight; the current stream waits for the gradients."""
        for ticket in self._tickets:
            ticket.land()
        stream = self.runtime.streams.current()
        for ticket in self._tickets:
            ticket.join(stream)
        self._tickets.clear()
        self.runtime.rewind()

    def inherit(self, other: ReductionScheduler) -> None:
        """Takes over the groups that entered under an inner unit before its root first ran."""
        for grads in other._entered:
            grads.scheduler = self
            self._entered[grads] = None
        self._tickets.extend(other._tickets)

    def abandon(self, everyone: Iterable[GradGroup]) -> None:
        """Forgets a failed iteration; waits for what is in flight, drops what it brought."""
        self._queue.clear()
        self._entered.clear()
        self._closed.clear()
        self._enrolled = None
        self.backward_running = False
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.abandon()
        for grads in everyone:
            grads.abandon()
