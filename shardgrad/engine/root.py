"""The root: the context that the first outermost unit to run shares with all units under it (lazy
init).

An iteration: enter_forward(outermost unit) -> leave_forward -> pre-backward -> end_backward. One
that an exception cut short is cleared by the next outermost forward. If an inner unit ran first, it
was a root of its units; the real root takes over what it had noted.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.utils import _to_kwargs

from shardgrad.engine.comm_context import CommContext
from shardgrad.engine.grad_group import ReductionScheduler
from shardgrad.engine.param_group import ParamState
from shardgrad.engine.same_model import require_same_model
from shardgrad.engine.spans import span
from shardgrad.engine.streams import is_capturing, wait_for_device
from shardgrad.engine.unit import Unit, units_under
from shardgrad.errors import AsleepError, RootError

__all__ = ["RootContext", "context_of", "lazy_init"]


class RootContext:
    """Shared by every unit under one root: `units`, in construction order, the root first, and
    their `grad_groups`.

    Attributes:
        keep_unsharded: True while ranks may run different units (`features/participation.py`):
            nothing is resharded before the backward is over, and units are gathered in order, see
            `gather_through`.
        forward_root: the outermost unit whose forward runs; None between forwards.
        is_asleep: True while the shards' memory is given back (`features/sleep.py`).
        post_optim_event: what the next forward's all-gathers wait for, if the program said so.
    """

    def __init__(self, units: Sequence[Unit], comm_ctx: CommContext) -> None:
        self.units = list(units)
        self.root = self.units[0]
        self.grad_groups = [grads for unit in self.units for grads in unit.grad_groups]
        self.comm_ctx = comm_ctx
        self.scheduler = ReductionScheduler(comm_ctx, self.end_backward)
        self.keep_unsharded = False
        self.is_asleep = False
        self.post_optim_event: torch.Event | None = None
        self._written = comm_ctx.parameters_ready
        self._read = comm_ctx.streams.event()  # gradients
        self.forward_root: Unit | None = None
        self._order: list[Unit] = []
        self._order_frozen = False
        self._position = 0
        self._gathered = 0
        self._ran_last: Unit | None = None  # of the forwards that have no backward yet
        # The host has to wait for these before a program may write their shards.
        self._offloaded = [
            g for unit in self.units for g in unit.groups if g.shard_memory.is_offloaded
        ]

    # -- forward

    def enter_forward(
        self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Opens a forward if `unit` is the outermost one running, also where it calls itself, as a
        registered method does that calls forward.

        Streams: later all-gathers start after the current stream, where the optimizer wrote the
        parameters.
        """
        if self.is_asleep:
            self.require_awake()
        # A backward that is still open was cut short: a recomputation does not come here.
        is_cut_short = self.scheduler.backward_running
        if not (self.forward_root in (None, unit) or is_cut_short):
            return args, kwargs
        # A program that captures by `torch.cuda.graph` itself; `graphed_step` has quiesced already.
        if self.crosses_border():
            # No event of outside can be waited for inside of a capture.
            self.comm_ctx.streams.forget_events()
            self.quiesce()
        if is_cut_short:
            self.recover()
        # Between iterations a program may load weights, freeze layers, or step an optimizer: all of
        # it is looked for once, here, and not by each unit.
        is_replaced = False
        for each in self.units:
            is_replaced |= each.refresh()
        if torch.is_grad_enabled():
            unit.before_outermost_forward()
        device = self.comm_ctx.device
        # As FSDP2's root does: what lies on the host comes along.
        if device.type != "cpu":
            with span("inputs_to_device", unit.name):
                (args,), (kwargs,) = _to_kwargs(args, kwargs, device, False)
        self.forward_root, self._position = unit, 0
        if not self._order_frozen:
            self._order.clear()
        # Here, since nobody is told of `zero_grad()`: it sets attributes to None.
        self.free_gradients()
        # FSDP2's `set_post_optim_event`: all-gathers need not wait for what else the current stream
        # has been given. Values that were just adopted were copied on that stream, so then they do.
        event, self.post_optim_event = self.post_optim_event, None
        self.parameters_written(None if is_replaced else event)
        return args, kwargs

    def crosses_border(self) -> bool:
        """Notes whether what follows is captured; returns whether that has changed.

        The one place that decides whether the memory of the root's gradients is known to a graph.
        """
        before = self.comm_ctx.is_captured
        self.comm_ctx.is_captured = is_capturing(self.comm_ctx.device)
        for grads in self.grad_groups:
            if (shard := grads.shard) is not None:
                shard.look(is_captured=self.comm_ctx.is_captured)
        return self.comm_ctx.is_captured != before

    def require_awake(self) -> None:
        """Refuses to use shards whose memory is given back.

        Raises:
            AsleepError: nothing was launched.
        """
        if self.is_asleep:
            raise AsleepError.of(f"the model {type(self.root.modules[0]).__name__}")

    def free_gradients(self) -> None:
        """Frees the memory of gradients that are None: [Note: Memory of gradients] in
        `grad_shard.py`.

        Streams: those that it was allocated on wait for the current one, and for the optimizer's.
        Capture: safe; memory that is there is kept at its address, and none is freed.
        """
        shards = [shard for grads in self.grad_groups if (shard := grads.shard) is not None]
        left = self.scheduler.left
        free = [shard for shard in (*shards, *left) if shard.may_be_freed]
        if not (free or left) or self.scheduler.is_any_in_flight:
            return
        streams, event = self.comm_ctx.streams, self.post_optim_event
        reader = streams.current()
        # Memory on the host has no stream.
        for stream in {shard.stream for shard in (*free, *left)} - {None}:
            if event is not None:
                streams.event_of(event).wait(stream)
            if stream != reader:
                self._read.record(reader)
                self._read.wait(stream)
        for shard in free:
            shard.free(reader)
        left.clear()  # gradients that are bound keep their memory

    def parameters_written(self, event: torch.Event | None = None) -> None:
        """Makes later all-gathers start after `event`, or else after the current stream."""
        streams = self.comm_ctx.streams
        if event is None:
            self._written.record(streams.current())
        self.comm_ctx.parameters_ready = self._written if event is None else streams.event_of(event)

    def size_reduce_ring(self) -> None:
        """Lets as many reductions be in flight as one of the units asked for."""
        if asked := [unit.max_reductions for unit in self.units if unit.max_reductions is not None]:
            self.comm_ctx.reduce_ring.resize(max(asked))

    def use(self, lead: CommContext) -> None:
        """Shares another root's streams and staging from now on; what is in flight is completed."""
        # What is in flight was sent through the streams and slots that are left here.
        if self.comm_ctx.streams is not lead.streams:
            self.quiesce()
            # Roots that take turns, as the stages of a pipeline on one rank do, need one set of
            # staging and one order of collectives.
            self.comm_ctx = self.scheduler.comm_ctx = lead.for_another_root()
            self._written = self.comm_ctx.parameters_ready
            self._read = lead.streams.event()

    def upcoming(self, unit: Unit) -> Sequence[Unit]:
        """Returns the units to prefetch while `unit` runs: what the program has set, or the one
        that followed in the root's first forward.

        A forward that departs from it gets no further prefetch and changes nothing: evaluation
        cannot spoil training's order. Under `participate`, ranks would pair up the wrong
        all-gathers, so there is none.
        """
        if self.keep_unsharded:
            return ()
        order, position = self._order, self._position
        if not self._order_frozen:
            # The root's first forward: nothing is prefetched, and the order is noted.
            order.append(unit)
            following: Sequence[Unit] = ()
        elif position < len(order) and order[position] is unit:
            self._position = position + 1
            following = order[position + 1 : position + 2]
        else:
            self._position = len(order)
            following = ()
        return unit.forward_prefetch or following

    def reshards_after_forward(self, unit: Unit) -> bool:
        """Returns whether to reshard `unit` after its forward.

        Unless the program has said so, not the root, nor the unit that backward begins with.
        """
        if self.keep_unsharded or self.scheduler.reads_again or unit.is_called_around:
            return False
        # The program has called `unshard()` itself, and reads the parameters after forward too.
        if unit.held and torch.is_grad_enabled():
            return False
        if unit.reshard_after_forward is not None:
            return unit.reshard_after_forward
        return unit is not self.root and unit is not self._first_in_backward()

    def _first_in_backward(self) -> Unit | None:
        """Returns the unit that stays gathered for the backward, which begins with it, if one does.

        On the CPU this is the last unit of the recorded forward. On a device the loss is often the
        peak, and the all-gather overlaps with the head's backward.
        """
        keeps = self._order_frozen and self.comm_ctx.gather_ring.keeps and torch.is_grad_enabled()
        if not (keeps and self._order):  # empty if that forward found all units unsharded
            return None
        last = self._order[-1]
        return last if last is not self.root and last.reshard_after_forward is None else None

    def leave_forward(self, unit: Unit) -> None:
        """Closes the forward that `unit` opened; what was prefetched and not used is dropped."""
        if self.forward_root is not unit or unit.running:
            return
        self.forward_root = None
        # The first whole forward of the root decides what is prefetched from now on.
        if unit is self.root and not self.keep_unsharded:
            self._order_frozen = True
        first = self._first_in_backward()
        for each in self.units:
            each.waiting_modules.clear()
            each.running.clear()
            for group in each.groups:
                # Left behind by a branch that was skipped, or prefetched for a unit that did not
                # run.
                if group.is_filled or group.state is ParamState.UNSHARDING:
                    if self.reshards_after_forward(each):
                        group.reshard_after_forward()
                    if not self.keep_unsharded:
                        group.cancel_unshard()
            # What the engine keeps for its own next use does not show: losses, clipping and
            # optimizers find sharded parameters, as if nothing had been kept.
            is_hidden = not torch.is_grad_enabled() or each is first
            if is_hidden and not (each.held or each.is_called_around or self.keep_unsharded):
                each.show_sharded()
        self._wait_until_read()

    def forward_failed(self, unit: Unit) -> None:
        """Clears an iteration whose outermost forward, of `unit`, has raised."""
        if self.forward_root is unit and not unit.running:
            self.recover()

    def ran_forward(self, unit: Unit) -> Unit | None:
        """Notes a forward that will have a backward; returns the unit that ran before it."""
        before, self._ran_last = self._ran_last, unit
        return before

    def gather_through(self, unit: Unit | None) -> None:
        """Unshards every unit up to and including `unit` (None: all), in order, if
        `keep_unsharded`.
        """
        if not self.keep_unsharded:
            return
        # Ranks run different units, so each gathers all that come before, in the order of
        # construction: that is the only one which they share.
        last = len(self.units) if unit is None else self.units.index(unit) + 1
        for each in self.units[self._gathered : last]:
            each.unshard(self.comm_ctx)
            each.wait_for_unshard(self.comm_ctx)
        self._gathered = max(self._gathered, last)

    def gather_in_order(self) -> None:
        """Makes `gather_through` begin with the first unit; nothing is resharded from now on."""
        if self.forward_root is not None or self.scheduler.backward_running:
            # here, on every rank: one without a batch has no forward that would do it
            self.recover()
        self.keep_unsharded = True
        self._gathered = 0

    def gather_rest(self) -> None:
        """Ends any forward, and unshards the units that `gather_through` has not come to."""
        self.forward_root = None
        if self._gathered == 0:
            self.require_awake()
            for unit in self.units:
                unit.refresh()
            self.parameters_written()
        self.gather_through(None)

    def _wait_until_read(self) -> None:
        for group in self._offloaded:
            group.wait_until_read()

    # -- backward

    def end_backward(self, *, wait: bool = True) -> None:
        """Ends a backward: frees what is still unsharded, reduces what is left, waits for the
        gradients.

        Streams: the stream that called backward waits for every reduction.
        """
        with span("root_post_backward_callback", self.root.name), torch.no_grad():
            self.scheduler.finish_reading()
            # Parameters are freed before the last groups are reduced: their memory is what these
            # reductions take.
            for unit in self.units:
                unit.finish_backward(is_read_again=self.scheduler.reads_again)
            self.scheduler.drain(self.grad_groups, wait=wait and self.scheduler.is_last_backward)
            self._ran_last = None
            self._wait_until_read()

    # -- between iterations

    def recover(self) -> None:
        """Clears a forward or a backward that an exception cut short. Every parameter is resharded.

        Gradients that a failed backward left half-written are dropped with a warning; what they
        were added to becomes None. See [Note: States of a group's gradients] in `grad_group.py`.
        """
        self.forward_root = self._ran_last = None
        self.keep_unsharded = False
        self.scheduler.enrolment = None
        if not self.scheduler.backward_running:
            for unit in self.units:
                unit.abandon_forward()
        else:
            device = self.comm_ctx.device
            if device.type not in ("cpu", "meta") and not self.comm_ctx.is_captured:
                wait_for_device(device)  # autograd joins the streams of a backward only at its end
            for unit in self.units:
                unit.abandon_forward()
                unit.finish_backward(is_read_again=self.scheduler.reads_again)
            lost = self.scheduler.abandon_backward(self.grad_groups)
            added = (
                f" In units {', '.join(lost)} they had been added to what was there, which is None "
                "now."
            )
            warnings.warn(
                "a backward failed half-way: the gradients that it has computed are dropped, those "
                f"of earlier backwards are kept.{added if lost else ''} zero_grad() drops all of "
                "them.",
                RuntimeWarning,
                stacklevel=2,
            )

    def abort(self) -> None:
        """Drops all that is under way: a capture failed, and nothing in it has run."""
        self.crosses_border()
        self.forward_root = self._ran_last = None
        self.keep_unsharded = False
        for unit in self.units:
            unit.abandon_forward()
            unit.finish_backward(is_read_again=self.scheduler.reads_again)
        self.scheduler.abort(self.grad_groups)

    def quiesce(self) -> None:
        """Leaves nothing in flight and no parameter unsharded; clears an iteration cut short.

        Streams: the current stream waits for what was in flight. Capture: safe.
        """
        self.crosses_border()
        if self.forward_root is not None or self.scheduler.backward_running:
            self.recover()
        self.scheduler.join()
        for unit in self.units:
            unit.reshard(drop_kept=True)
        self._wait_until_read()

    def inherit(self, other: RootContext) -> None:
        """Takes over what an inner unit's own context had noted before this root first ran."""
        self.scheduler.inherit(other.scheduler)


# -- lazy init


def context_of(unit: Unit) -> RootContext | None:
    """Returns the context of the root that a unit is under; None before lazy init."""
    context = unit.context
    return context if isinstance(context, RootContext) else None


def lazy_init(unit: Unit, comm_ctx: CommContext | None = None) -> RootContext:
    """Returns a unit's context; makes the unit the root of all under it if it has none.

    A collective then: every rank of the mesh must call it. `comm_ctx` is for plans and tests.

    Raises:
        RootError: the unit has several modules, so none is the root.
        UnsupportedError: a parameter can no longer be sent as `fully_shard` found it.
        RankDisagreementError: ranks built different models; and what `Unit.accept` raises.
    """
    known = context_of(unit)
    if known is not None and comm_ctx is None:
        return known
    if len(unit.modules) > 1 and any(units_under(module)[1:] for module in unit.modules):
        raise RootError(
            "fully_shard requires a single root module but got several",
            expected="one module that contains the others",
            got=", ".join(type(module).__name__ for module in unit.modules),
            fix="call fully_shard on their parent as well, and run that",
        )
    root_module = unit.modules[0]
    units = units_under(root_module) if len(unit.modules) == 1 else [unit]
    # Names come first, since the errors of all that follows say them.
    _name_everything(root_module, units)
    _regroup(units)
    require_same_model(units)
    unit.accept(units)
    if comm_ctx is None:
        partner = unit.partner
        comm_ctx = partner.for_another_root() if partner else CommContext(unit.mesh.device)
    context = RootContext(units, comm_ctx)
    context.size_reduce_ring()
    earlier = {known for each in units if (known := context_of(each)) is not None}
    for each in units:
        each.context = context
        for grads in each.grad_groups:
            grads.scheduler = context.scheduler
    # An inner unit that ran before its root was known was a root itself, with forwards and
    # reductions of its own. In the order of names, which is the same on every rank.
    for other in sorted(earlier, key=lambda c: c.root.name):
        context.inherit(other)
    return context


def _name_everything(root_module: nn.Module, units: list[Unit]) -> None:
    """Gives units and parameters their names as seen from the root."""
    names = {module: name for name, module in root_module.named_modules()}
    for unit in units:
        unit.name = ", ".join(names.get(module) or type(module).__name__ for module in unit.modules)
        for group in unit.groups:
            for p in group.params:
                module, attribute = p.owners[0]
                p.name = ".".join(filter(None, (names.get(module), attribute)))


def _regroup(units: list[Unit]) -> None:
    """Splits groups whose parameters can no longer all travel together; see `GroupSpec.regroup`."""
    # All are asked before any is changed.
    splits = [
        (unit, [(group, group.spec.regroup(group)) for group in unit.groups]) for unit in units
    ]
    for unit, groups in splits:
        if any(split is not None for _, split in groups):
            unit.set_groups(
                [part for group, split in groups for part in (split() if split else [group])]
            )
