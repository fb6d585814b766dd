"""What one root and its units share in time: which forward is running, what ran in which order, and how a
backward ends.

Life of an iteration, as this file sees it:

    enter_forward(outermost unit) -> leave_forward -> first gradient or pre-backward -> end_backward

A *stale* iteration is one that an exception cut short; the next outermost forward notices and clears it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.utils import _to_kwargs

from shardgrad.engine.comm_context import Runtime
from shardgrad.engine.scheduler import GroupReducer, ReductionScheduler
from shardgrad.engine.trace import span

if TYPE_CHECKING:
    from shardgrad.engine.unit import Unit

__all__ = ["RootContext", "inside_backward"]


def inside_backward() -> bool:
    """Returns True if autograd is running a backward on this thread (recomputation, hooks)."""
    return bool(torch._C._current_graph_task_id() != -1)


class RootContext:
    """Shared by every unit under one root.

    Args:
        units: in construction order, the root first; the same on every rank.
        runtime: streams, rings and transports.

    Attributes:
        is_last_backward: False leaves reductions in flight at the end of a backward.
        keep_gathered: True while ranks may run different units (`features/participation.py`): nothing is
        resharded
            before the backward is over.
        post_optim_event: what the next forward's all-gathers wait for, if the program said so.
    """

    def __init__(self, units: Sequence[Unit], runtime: Runtime) -> None:
        self.units = list(units)
        self.runtime = runtime
        self.scheduler = ReductionScheduler(runtime, self.end_backward)
        self.keep_gathered = False
        self.post_optim_event: torch.Event | None = None
        self._written = runtime.parameters_ready
        self._forward_root: Unit | None = None
        self._order: list[Unit] = []
        self._order_frozen = False
        self._position = 0
        self._gathered = 0
        self._backward_order: list[Unit] = []

    @property
    def root(self) -> Unit:
        """The outermost unit."""
        return self.units[0]

    @property
    def is_last_backward(self) -> bool:
        """See the class."""
        return self.scheduler.is_last_backward

    @is_last_backward.setter
    def is_last_backward(self, is_last_backward: bool) -> None:
        self.scheduler.is_last_backward = is_last_backward

    @property
    def reducers(self) -> list[GroupReducer]:
        """Every group's reducer, in construction order."""
        return [reducer for unit in self.units for reducer in unit.reducers]

    # -- forward ----------------------------------------------------------------------------------------

    def enter_forward(
        self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Opens a forward if `unit` is the outermost one running, or runs inside a method of its own.

        Streams: later all-gathers start after what the current stream has been given, which is where the
        optimizer wrote the parameters. Inputs are moved to the device if it is not the CPU.
        """
        nested = self._forward_root is unit and unit.may_nest
        if self.scheduler.backward_running or (self._forward_root is unit and not nested):
            self.recover()
        if self._forward_root is not None and not nested:
            return args, kwargs
        self._forward_root = unit
        self._position = 0
        if not self._order_frozen:
            self._order.clear()
        replaced = [each.refresh() for each in self.units]
        event, self.post_optim_event = self.post_optim_event, None
        self.parameters_written(None if any(replaced) else event)
        device = self.runtime.device
        if device.type != "cpu":
            with span("inputs_to_device", unit.name):
                moved_args, moved_kwargs = _to_kwargs(args, kwargs, device, False)
                args, kwargs = moved_args[0], moved_kwargs[0]
        return args, kwargs

    def parameters_written(self, event: torch.Event | None = None) -> None:
        """Says that the current stream may have written parameters; later all-gathers start after that.

        Args:
            event: what they start after instead, if the program knows better.
        """
        streams = self.runtime.streams
        if event is None:
            self._written.record(streams.current())
        self.runtime.parameters_ready = self._written if event is None else streams.mark_of(event)

    def size_reduce_ring(self) -> None:
        """Lets as many reductions be in flight as one of the units asked for."""
        asked = [unit.max_reductions for unit in self.units if unit.max_reductions is not None]
        if asked:
            self.runtime.reduce_ring.resize(max(asked))

    def use(self, lead: Runtime) -> None:
        """Shares another root's streams and staging from now on; what is in flight is completed."""
        if self.runtime.streams is not lead.streams:
            self.rest()
            self.runtime = self.scheduler.runtime = Runtime(lead.device, like=lead)
            self._written = self.runtime.parameters_ready

    def upcoming(self, unit: Unit) -> Unit | None:
        """Returns the unit to prefetch: the one that followed `unit` in the recorded forward.

        The root's first forward is recorded and followed afterwards. A forward that departs from it gets no
        prefetch from there on and does not change the record, so evaluation cannot spoil training's order.
        """
        if not self._order_frozen:
            self._order.append(unit)
            return None
        order, position = self._order, self._position
        if position >= len(order) or order[position] is not unit:
            self._position = len(order)
            return None
        self._position = position + 1
        return order[position + 1] if position + 1 < len(order) else None

    def is_needed_next(self, unit: Unit) -> bool:
        """Returns whether backward will begin with `unit`, so that resharding it would be for nothing.

        That is the last one of the recorded forward. Backward gathers it while the loss and the head still
        hold their memory, so keeping it whole does not raise the peak.
        """
        return self._order_frozen and torch.is_grad_enabled() and unit is self._order[-1]

    def leave_forward(self, unit: Unit) -> None:
        """Closes the forward that `unit` opened; what was prefetched and not used is dropped."""
        if self._forward_root is not unit:
            return
        self._forward_root = None
        self._order_frozen = self._order_frozen or unit is self.root
        for each in self.units:
            each.finish_forward()
        for each in self.units:
            each.let_host_write()

    def ran_forward(self, unit: Unit) -> int:
        """Notes a forward that will have a backward; returns its place in the order."""
        self._backward_order.append(unit)
        return len(self._backward_order) - 1

    # -- backward ---------------------------------------------------------------------------------------

    def before(self, place: int) -> Unit | None:
        """Returns the unit whose backward is expected after the one at `place`."""
        return self._backward_order[place - 1] if 0 < place <= len(self._backward_order) else None

    def end_backward(self) -> None:
        """Ends a backward: frees what is still whole, reduces what is left, waits for the gradients.

        Streams: the stream that called backward waits for every reduction.
        """
        with span("root_post_backward_callback", self.root.name), torch.no_grad():
            for unit in self.units:
                unit.finish_backward()
            self.scheduler.drain(self.reducers, wait=self.is_last_backward)
            if self.is_last_backward:
                self._backward_order.clear()
            for unit in self.units:
                unit.let_host_write()

    # -- participation ----------------------------------------------------------------------------------

    def start_participation(self, *, with_gradients: bool) -> None:
        """Fixes this iteration's collectives. See [Note: Participation]."""
        self.keep_gathered = True
        self._gathered = 0
        self.scheduler.enroll(self.reducers if with_gradients else [])

    def gather_through(self, unit: Unit | None) -> None:
        """Under participation, gathers every unit up to and including `unit` (None: all), in order."""
        if not self.keep_gathered:
            return
        last = len(self.units) if unit is None else self.units.index(unit) + 1
        for each in self.units[self._gathered : last]:
            each.unshard(self)
            each.wait_for_unshard(self)
        self._gathered = max(self._gathered, last)

    def finish_participation(self) -> None:
        """Joins what this rank has not run: the rest of the gathers, then the reductions."""
        self._forward_root = None
        if self._gathered == 0:
            for unit in self.units:
                unit.refresh()
            self.parameters_written()
        self.gather_through(None)
        if self.scheduler.has_enrolled:
            self.scheduler.begin_backward(in_autograd=False)
            self.scheduler.reduce_ready()
            self.end_backward()
        self.keep_gathered = False
        self.scheduler.enroll(None)
        for unit in self.units:
            unit.reshard()

    def recover(self) -> None:
        """Clears an iteration that an exception cut short.

        What is in flight is waited for and dropped, every parameter is resharded, and gradients that the
        failed backward had already written become None: the iteration, including earlier micro-batches of
        its accumulation, is lost as a whole, on every rank.
        """
        self._forward_root = None
        self.keep_gathered = False
        self._backward_order.clear()
        for unit in self.units:
            unit.abandon()
        self.scheduler.abandon(self.reducers)

    def rest(self) -> None:
        """Brings everything under this root to rest: nothing in flight, no parameter whole.

        An iteration that an exception cut short is cleared.

        Streams: the current stream waits for what was in flight. Capture: safe.
        """
        if self._forward_root is not None or self.scheduler.backward_running:
            self.recover()
        self.scheduler.join()
        for unit in self.units:
            unit.reshard(for_good=True)
            unit.let_host_write()

    def inherit(self, other: RootContext) -> None:
        """Takes over what an inner unit's own context had noted before this root first ran."""
        for unit in other._backward_order:
            self._backward_order.append(unit)
        self.scheduler.inherit(other.scheduler)
