"""Reductions: in which order groups are reduced.

[Note: Order of reductions]
The sequence of collectives must not depend on the data, or ranks that use different parameters
would pair up the wrong ones. Groups are therefore reduced in the reverse of the order in which
their units entered forward, each exactly once: a group that is complete early waits for its
predecessors, one that got no gradients sends zeros. A group is complete when its unit's backward is
over; if no input of the unit needs a gradient, when all are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from shardgrad.engine.comm_context import CommContext
from shardgrad.engine.grad_group import TRANSITIONS, GradGroup, GradState, Waiting
from shardgrad.engine.grad_shard import GradShard
from shardgrad.engine.reduction import Reduction

__all__ = ["ReductionScheduler"]

# Whether the backward that runs on this thread was called with `retain_graph=True`.
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


def _move(grads: GradGroup, state: GradState) -> None:
    """Goes on to a state of a group's gradients; a RuntimeError if it is not in `TRANSITIONS`."""
    if state not in TRANSITIONS[grads.state]:
        raise RuntimeError(
            f"{grads.group.name or 'root'!r}: gradients: no way from {grads.state} to {state}"
        )
    if state is GradState.IDLE:  # autograd has joined its streams
        grads.collector.pack_streams.clear()
        grads.waits_for_unit = False
    grads.state = state


class Enrolment(Protocol):
    """Decides what one backward reduces; see [Note: Participation]."""

    def note(self, grads: GradGroup) -> None:
        """Takes note of a forward, also one without gradients, and of a gradient that has come."""

    def begin(self) -> list[GradGroup]:
        """Returns what the backward that begins now reduces, the last one first."""

    def is_complete(self, grads: GradGroup) -> bool:
        """Returns whether no more gradients than are here can come before the end of the
        backward.
        """

    def refuse_late(self, grads: GradGroup) -> None:
        """Raises if gradients have come after their reduction, since other ranks have none."""


class ReductionScheduler:
    """Decides the order of reductions under one root. See [Note: Order of reductions]."""

    def __init__(self, comm_ctx: CommContext, end_backward: Callable[[], None]) -> None:
        self.comm_ctx = comm_ctx
        # Called once when autograd ends a backward that was seen to begin.
        self._end_backward = end_backward
        self.backward_running = False
        self.is_last_backward = True  # False for a micro-batch that others follow
        # True from a backward that makes a graph (`create_graph=True`), which reads parameters
        # again, to the end of one that keeps none: nothing is resharded in between.
        self.reads_again = False
        self._keeps_graph = False
        self._entered: list[GradGroup] = []
        self._queue: list[GradGroup] = []  # the last is reduced first
        self._earlier: list[Reduction] = []  # in flight, of backwards that are complete
        self._launched: list[tuple[GradGroup, Reduction]] = []  # by the backward that is running
        self.left: list[GradShard] = []  # that groups have left for others
        self.enrolment: Enrolment | None = None  # None: a backward reduces the groups that entered

    def enter(self, grads: GradGroup) -> None:
        """Notes that a unit entered forward with gradients on; its group will be reduced in this
        backward.
        """
        if self.enrolment is not None:
            self.enrolment.note(grads)
        if self.backward_running:
            self.expect(grads)
        elif grads.state is GradState.IDLE:
            _move(grads, GradState.ENTERED)
            self._entered.append(grads)

    def expect(self, grads: GradGroup) -> None:
        """Makes a group that is not queued, but backward has come to, the next to finish.

        Reentrant checkpointing runs forward inside backward; a backward of an older graph runs
        none. There, another call of a unit may follow its reduction: all ranks reduce it again,
        whichever have gradients.
        """
        if grads.state is GradState.IDLE or (
            grads.state is GradState.SENT and self.enrolment is None
        ):
            grads.waits_for_unit = True
            _move(grads, GradState.COLLECTING)
            self._queue.append(grads)

    def finish_reading(self) -> None:
        """At the end of a backward: forgets a graph that it has not kept."""
        self.reads_again = self._keeps_graph

    def begin_backward(self, *, in_autograd: bool) -> None:
        """Fixes the order of this backward's reductions, once; `in_autograd` says that a hook
        calls.
        """
        if self.backward_running:
            return
        self.backward_running = True
        # Grad mode is on in hooks if backward makes a graph; one that it was itself made of may be
        # kept.
        self._keeps_graph = in_autograd and (
            torch.is_grad_enabled() or (self.reads_again and _keeps_graph())
        )
        self.reads_again |= self._keeps_graph
        if in_autograd:
            # Called once all of this backward is done, whatever its loss was made of: reductions do
            # not depend on a gradient passing through the root's outputs.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        # Units entered forward in an order that all ranks share, so its reverse is one, too.
        self._queue, self._entered = self._entered, []
        for grads in self._queue:
            _move(grads, GradState.COLLECTING)
        if self.enrolment is not None:
            # Under `participate` every rank reduces the groups that any rank has run, with a batch
            # or without.
            self._queue = self.enrolment.begin()
            for grads in self._queue:
                if grads.state is GradState.IDLE:  # this rank runs no forward of it
                    _move(grads, GradState.READY)

    def arrived(self, grads: GradGroup) -> None:
        """The first gradient of a backward or the last one of a group came in; reduces what can
        be.
        """
        if not self.backward_running:
            self.begin_backward(in_autograd=True)
        if self.enrolment is not None:
            self.enrolment.note(grads)
        # Only a unit whose inputs need no gradients ends so; all others say themselves when no more
        # gradients come.
        if grads.collector.count == len(grads.params) and not grads.waits_for_unit:
            self.close(grads)

    def close(self, grads: GradGroup) -> None:
        """Says that no more gradients are expected for this group; reduces what has become
        possible.
        """
        if self.enrolment is not None and not self.enrolment.is_complete(grads):
            return
        if grads.state is GradState.COLLECTING:
            _move(grads, GradState.READY)
        self.reduce_ready()

    def reduce_ready(self) -> None:
        """Reduces, in order, the groups at the head of the queue that expect no more gradients.

        The last waits for the end of backward, where its parameters are freed and nothing is left
        to overlap.
        """
        # In order, whatever is ready behind the head: the sequence of collectives may not follow
        # the data.
        while len(self._queue) > 1 and self._queue[-1].state is GradState.READY:
            self._reduce(self._queue.pop())

    def _reduces_now(self, grads: GradGroup) -> bool:
        """False if this backward only adds to a sum on this rank."""
        return grads.requires_sync and (
            self.is_last_backward or not grads.group.stage.sums_unsharded
        )

    def _reduce(self, grads: GradGroup) -> None:
        # Not ready by itself, but backward is over: no more gradients come.
        if grads.state is not GradState.READY:
            _move(grads, GradState.READY)
        if self._reduces_now(grads):
            reduction = grads.launch(self.comm_ctx, all_reduces=grads.requires_all_reduce)
            self._launched.append((grads, reduction))
            _move(grads, GradState.SENT)
            # Gradients that are sent from where they are stay in memory until they are sent.
            if len(self._launched) > 1:
                self._return_lent(self._launched[-2][1], reduction)
        else:
            grads.accumulate(self.comm_ctx)
            _move(grads, GradState.SENT)

    def _return_lent(self, earlier: Reduction, latest: Reduction) -> None:
        """Ends a reduction that has whole gradients in flight, so that there are no more of them
        than of two groups: of one that is sent, and of the next.
        """
        if not any(slot.lent for slot in earlier.memory.slots):
            return
        earlier.complete()
        for slot in earlier.memory.slots:
            if slot not in latest.memory.slots:
                slot.return_lent()

    def drain(self, groups: Iterable[GradGroup], *, wait: bool) -> None:
        """Ends a backward: reduces what is left of all groups under the root, given in construction
        order.

        With `wait`, the current stream then waits for the gradients; else reductions stay in
        flight.
        """
        # Groups that got nothing are reduced as well: other ranks may have gradients for them.
        while self._queue:
            self._reduce(self._queue.pop())
        for reduction in self._earlier:
            reduction.start_second_step()  # which leaves a partial sum, or takes it along
        for grads in groups:
            # Gradients that came without the unit entering forward, for example through unshard()
            # by hand, that the program has written, and what earlier backwards have left.
            is_partial = grads.partial.is_live and not grads.is_reduced
            waits = grads.waiting is not Waiting.NOTHING or (
                is_partial and grads.requires_all_reduce
            )
            if grads.has_come or (waits and self._reduces_now(grads)):
                if self.enrolment is not None:
                    self.enrolment.refuse_late(grads)
                self._reduce(grads)
            if grads.state is not GradState.IDLE:
                _move(grads, GradState.IDLE)
        self.backward_running = False
        # Whether they are over is asked by `join`, or by the reduction that needs their slots.
        self._earlier += [reduction for _, reduction in self._launched]
        self._launched = []
        if wait:
            self.join()

    @property
    def is_any_in_flight(self) -> bool:
        """True if reductions of earlier backwards may still write gradients."""
        return bool(self._earlier)

    def join(self) -> None:
        """Completes every reduction in flight; the current stream waits for the gradients."""
        # All second steps are launched before the first is waited for, so that they overlap.
        for reduction in self._earlier:
            reduction.start_second_step()
        stream = self.comm_ctx.streams.current()
        for reduction in self._earlier:
            reduction.join(stream)
        self._earlier = []
        for ring in self.comm_ctx.rings:
            ring.rewind(stream)

    def finish(self, grads: GradGroup) -> None:
        """Reduces what waits in a group, and completes every reduction in flight.

        Called where all ranks change the group's places: what waits was packed for those of before.
        """
        # A forward calls, which may be an evaluation in inference mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            if grads.waiting is not Waiting.NOTHING or grads.partial.is_live:
                self._earlier.append(grads.launch(self.comm_ctx, all_reduces=True))
            self.join()

    def inherit(self, other: ReductionScheduler) -> None:
        """Takes over the groups that entered under another root, and are under this one now."""
        # Units that the new root does not contain keep the root they had.
        self._entered += [grads for grads in other._entered if grads.scheduler is self]
        other._entered = [grads for grads in other._entered if grads.scheduler is not self]
        self._earlier += other._earlier
        self.left += other.left
        # A graph that was made under the other root may read parameters of this one again.
        self.reads_again |= other.reads_again

    def abandon_backward(self, groups: Iterable[GradGroup]) -> list[str]:
        """Takes back a failed backward; returns the units that lose what it has sent or added
        to.
        """
        self.backward_running = self.reads_again = False
        # Reductions of backwards before this one are whole: they stay in flight.
        launched, self._launched = self._launched, []
        lost = [grads for grads, reduction in launched if reduction.abandon()]
        for grads in groups:
            if grads.abandon_backward():
                lost.append(grads)
            if grads.state is not GradState.IDLE:
                _move(grads, GradState.IDLE)
        return list(dict.fromkeys(grads.group.name for grads in lost))

    def abort(self, groups: Iterable[GradGroup]) -> None:
        """Drops everything that is not in a gradient shard, and what has been written there
        since.
        """
        for reduction in [*self._earlier, *(reduction for _, reduction in self._launched)]:
            reduction.abandon()
        self._earlier, self._launched = [], []
        self._entered.clear()
        self.enrolment = None
        self.abandon_backward(groups)
        for ring in self.comm_ctx.rings:
            ring.rewind()
