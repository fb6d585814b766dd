"""What travels together in a step of Muon: staging, arithmetic on pieces, exchanges.

[Note: Blocks]
A segment's state is one flat buffer, where each parameter's piece begins on a multiple of some number of
elements. Seen as rows of that many elements, *blocks*, every row belongs to one parameter, so a number per
parameter (live or not, its learning rate) becomes a number per row, and one launch treats all parameters.
Gradients and weights lie among those of other optimizers' parameters; they are copied into the same form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardgrad.engine.grad_group import grads_of
from shardgrad.engine.grad_shard import GradShard
from shardgrad.engine.param import managed_by
from shardgrad.engine.param_group import group_of
from shardgrad.errors import CollectiveError
from shardgrad.optim.flat import Update
from shardgrad.optim.newton_schulz import newton_schulz
from shardgrad.optim.ownership import Exchange
from shardgrad.optim.segment import Launch

__all__ = ["EPS", "LR", "MOMENTUM", "WEIGHT_DECAY", "Member", "Staging", "Wave"]

# Where the group's mirror has what; the order of `Muon.hypers`.
LR, MOMENTUM, WEIGHT_DECAY, EPS = range(4)

# What a buffer of the staging is for, its dtype, and on which device.
_Place = tuple[str, torch.dtype, torch.device]


class Staging:
    """Buffers that all waves use one after the other, each as large as the largest need."""

    def __init__(self) -> None:
        self._buffers: dict[_Place, torch.Tensor] = {}

    def reserve(self, needs: Sequence[tuple[_Place, int]]) -> bool:
        """Makes room; True if a buffer was replaced by a larger one."""
        most: dict[_Place, int] = {}
        for place, numel in needs:
            most[place] = max(numel, most.get(place, 0))
        grew = False
        for place, numel in most.items():
            old = self._buffers.get(place)
            if old is None or old.numel() < numel:
                _, dtype, device = place
                self._buffers[place] = torch.zeros(numel, dtype=dtype, device=device)
                grew |= old is not None
        return grew

    def take(self, place: _Place, numel: int) -> torch.Tensor:
        """Returns the beginning of a buffer."""
        return self._buffers[place].narrow(0, 0, numel)


class Member:
    """One segment in a wave: its matrices, and the arithmetic on this rank's pieces of them.

    Args:
        update: of the step in which the plan is made.

    Attributes:
        segment: with its state.
        options: the entry of `param_groups`.
        rows: the table of its launches.
        transport: the shard group; None if matrices are whole on every rank.
        world_size: ranks of it.
        rank: this one.
        shapes: of the matrices that can have a gradient, as they lie in memory.
    """

    def __init__(self, update: Update) -> None:
        segment = self.segment = update.segment
        self.options = update.group
        self.rows = update.launch.rows
        managed = [managed_by(param) for param in segment.params]
        first = managed[0]
        self.transport = None if first is None else group_of(first).mesh.shard_group
        self.world_size = 1 if first is None else group_of(first).mesh.shard_size
        self.rank = 0 if first is None else group_of(first).mesh.shard_rank
        self._shard: GradShard | None = None if first is None else grads_of(group_of(first)).require_shard()
        places = [0 if self._shard is None else self._shard.place_of(param) for param in segment.params]
        # Frozen parameters have no place among the gradients, and none here.
        self._chosen = [i for i, place in enumerate(places) if place is not None]
        self.shapes = [_shape_in_memory(segment.params[i]) for i in self._chosen]
        self._lay_out_blocks()
        self._tabulate(places)
        self._found: tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]] | None = None
        self.compute = torch.float64 if segment.dtype is torch.float64 else torch.float32

    def _lay_out_blocks(self) -> None:
        """See [Note: Blocks]. A state's padding is part of some parameter's blocks."""
        segment, flat = self.segment, self.segment.state["momentum_buffer"]
        views = segment.local_views(flat)
        self._offsets = [view.storage_offset() - flat.storage_offset() for view in views]
        self._numels = [view.numel() for view in views]
        ends = [*self._offsets[1:], segment.numel]
        spans = [end - begin for begin, end in zip(self._offsets, ends, strict=True)]
        self._block = math.gcd(*spans) or 1
        owner = [torch.full((span // self._block,), i, device="cpu") for i, span in enumerate(spans)]
        self._param_of_block = torch.cat(owner).to(segment.device)

    def _tabulate(self, places: Sequence[int | None]) -> None:
        """Puts what does not change into device memory, per parameter."""
        device, params = self.segment.device, self.segment.params
        self._flag_index = torch.tensor([place or 0 for place in places], device="cpu").to(device)
        self._present = torch.tensor([place is not None for place in places], device="cpu").to(device)
        ratios = [_adjusted(self.options["adjust_lr_fn"], *param.shape) for param in params]
        self._ratios = torch.tensor(ratios, dtype=torch.float64, device="cpu").to(device)

    # -- memory -----------------------------------------------------------------------------------------

    def needs(self) -> list[tuple[_Place, int]]:
        """Returns the staging of one segment; another segment's may be the same."""
        return [(self._place(what), self.segment.numel) for what in ("direction", "weight")]

    def _place(self, what: str) -> _Place:
        return what, self.compute, self.segment.device

    def settle_in(self, staging: Staging, departures: Sequence[torch.Tensor]) -> None:
        """Takes staging, and the places from which this rank's pieces leave, one for each of `shapes`."""
        # Pieces of trailing ranks may be empty, and a list of nothing else is no list for foreach.
        self._held = [i for i in self._chosen if self._numels[i]]
        self._departures = [piece for piece in departures if piece.numel()]
        self._direction, self._directions = self._rows_and_pieces(staging, "direction")
        self._weight, self._weights = self._rows_and_pieces(staging, "weight")

    def _rows_and_pieces(self, staging: Staging, what: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
        flat = staging.take(self._place(what), self.segment.numel)
        pieces = [flat.narrow(0, self._offsets[i], self._numels[i]) for i in self._held]
        return self._blocks(flat), pieces

    def _blocks(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(-1, self._block)

    def _per_block(self, per_param: torch.Tensor) -> torch.Tensor:
        return per_param.index_select(0, self._param_of_block).unsqueeze(1)

    def _find(self, launch: Launch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns this rank's pieces of the parameters and of their gradients, as they lie in memory."""
        if self._shard is None:
            # Not kept: the gradient is the program's, and may be gone after `zero_grad`.
            return [launch.param][: len(self._held)], [launch.grad][: len(self._held)]
        if self._found is None or self._found[0] is not launch.param:
            params, grads = [], []
            for i in self._held:
                param = self.segment.params[i]
                managed, place = managed_by(param), self._shard.place_of(param)
                if managed is None or place is None:
                    raise RuntimeError(f"{self.segment.names[i]} is no longer part of its unit")
                group = group_of(managed)
                piece = group.layout.pieces[group.params.index(managed)]
                params.append(launch.param.narrow(0, piece.shard_offset, self._numels[i]))
                grads.append(self._shard.view(place).view(-1))
            self._found = launch.param, params, grads
        return self._found[1:]

    # -- arithmetic -------------------------------------------------------------------------------------

    def depart(self, update: Update) -> None:
        """Advances the momentum, and leaves the direction where it departs from."""
        _, grads = self._find(update.launch)
        live = self._live(update)
        self.segment.steps.add_(live)
        self._live_blocks = self._per_block(live)
        direction, buffer = self._direction, self._blocks(self.segment.state["momentum_buffer"])
        _copy(self._directions, grads)
        if update.scale is not None:
            direction.mul_(update.scale.to(self.compute))
        momentum = update.hyper[MOMENTUM]
        fresh = (1 - momentum).to(self.compute)
        moved = torch.lerp(buffer.to(self.compute), direction, fresh).to(buffer.dtype)
        torch.where(self._live_blocks, moved, buffer, out=buffer)
        if update.group["nesterov"]:
            direction.lerp_(buffer.to(self.compute), momentum.to(self.compute))
        else:
            direction.copy_(buffer)
        _copy(self._departures, self._directions)

    def arrive(self, update: Update) -> None:
        """Applies weight decay and what has come back."""
        hyper, state = update.hyper, self.segment.state
        params, _ = self._find(update.launch)
        _copy(self._directions, self._departures)
        _copy(self._weights, params)
        decay = (1 - hyper[LR] * hyper[WEIGHT_DECAY]).to(self.compute)
        rate = self._per_block(hyper[LR] * self._ratios).to(self.compute)
        weight = exact = self._weight
        if "master" in state:
            # Whoever wrote the weight last wins, as in [Note: Exact weights] of ops/weights.py.
            master = self._blocks(state["master"])
            exact = torch.where(master.to(self.segment.dtype) == weight, master, weight)
        moved = (exact * decay).addcmul_(self._direction, rate, value=-1)
        if "master" in state:
            torch.where(self._live_blocks, moved, master, out=master)
        torch.where(self._live_blocks, moved, weight, out=weight)
        _copy(params, self._weights)

    def _live(self, update: Update) -> torch.Tensor:
        """Returns which parameters change: bool, one for each of the segment's."""
        flags = update.launch.touched.index_select(0, self._flag_index)
        live = (flags > 0) & self._present
        return live if update.skip is None else live & ~(update.skip > 0)


class Wave:
    """Segments whose matrices travel in one exchange.

    Args:
        members: of one entry of `param_groups`, in one shard group.
        dtype: in which matrices travel.
    """

    def __init__(self, members: Sequence[Member], dtype: torch.dtype) -> None:
        self.members = members
        first = members[0]
        self._device = first.segment.device
        self._dtype = dtype
        self._transport = first.transport
        shapes = [shape for member in members for shape in member.shapes]
        self._exchange = Exchange.of(shapes, first.world_size, first.rank)

    def needs(self) -> list[tuple[_Place, int]]:
        """Returns the staging that must be there before `settle_in`."""
        exchange = self._exchange
        sizes = {
            "outgoing": sum(exchange.sent),
            "incoming": sum(exchange.received),
            "whole": exchange.whole_numel,
        }
        of_members = [need for member in self.members for need in member.needs()]
        return [*((self._place(what), numel) for what, numel in sizes.items()), *of_members]

    def _place(self, what: str) -> _Place:
        return what, self._dtype, self._device

    def settle_in(self, staging: Staging) -> None:
        """Takes staging, for good."""
        exchange = self._exchange
        self._outgoing = staging.take(self._place("outgoing"), sum(exchange.sent))
        self._incoming = staging.take(self._place("incoming"), sum(exchange.received))
        whole = staging.take(self._place("whole"), exchange.whole_numel)
        departures = [self._outgoing.narrow(0, run.offset, run.numel) for run in exchange.departures]
        for member in self.members:
            member.settle_in(staging, departures[: len(member.shapes)])
            del departures[: len(member.shapes)]
        arrivals = exchange.arrivals
        self._arrived = [self._incoming.narrow(0, arrival.incoming, arrival.numel) for arrival in arrivals]
        self._rows = [whole.narrow(0, arrival.whole, arrival.numel) for arrival in arrivals]
        self._batches = [
            whole.narrow(0, batch.offset, batch.numel).view(len(batch.matrices), *batch.shape)
            for batch in exchange.batches
        ]

    def run(self, updates: Sequence[Update]) -> None:
        """Updates all members.

        Streams: the current stream of the device, which the exchanges are joined to.
        Capture: safe once the process group has been used; nothing is read back.

        Raises:
            CollectiveError: an exchange failed; momentum has moved, parameters of this wave have not.
        """
        for member, update in zip(self.members, updates, strict=True):
            member.depart(update)
        exchange = self._exchange
        self._send(self._incoming, self._outgoing, exchange.received, exchange.sent)
        self._orthogonalise(updates[0])
        self._send(self._outgoing, self._incoming, exchange.sent, exchange.received)
        for member, update in zip(self.members, updates, strict=True):
            member.arrive(update)

    def _orthogonalise(self, update: Update) -> None:
        _copy(self._rows, self._arrived)
        for batch in self._batches:
            batch.copy_(
                newton_schulz(
                    batch,
                    coefficients=update.group["ns_coefficients"],
                    steps=update.group["ns_steps"],
                    eps=update.hyper[EPS],
                )
            )
        _copy(self._arrived, self._rows)

    def _send(
        self, into: torch.Tensor, out: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        group = self._transport
        if group is None or group.size() == 1:
            into.copy_(out)
            return
        try:
            dist.all_to_all_single(into, out, list(received), list(sent), group=group)
        except RuntimeError as error:
            members = dist.get_process_group_ranks(group)
            raise CollectiveError(
                "the exchange of matrices failed: another rank is late, gone, or running something else",
                expected=f"every rank of {members} to call optimizer.step() with the same gradients bound",
                got=str(error).splitlines()[0],
                where=f"rank {dist.get_rank()}, the wave of {self.members[0].segment.names[0]}",
                fix="call step(), and set gradients to None, on all ranks or on none",
            ) from error


def _shape_in_memory(param: torch.Tensor) -> tuple[int, int]:
    """Returns the shape of a matrix, or of its transpose if columns are what lies together.

    Newton-Schulz of the transpose is the transpose of Newton-Schulz, so nothing has to be moved.
    """
    rows, columns = param.shape
    return (rows, columns) if param.is_contiguous() else (columns, rows)


def _adjusted(how: str | None, rows: int, columns: int) -> float:
    """Returns what lr is multiplied by for a matrix; see `Muon`."""
    if how == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns)) if columns else 1.0


def _copy(into: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
    """Copies pieces, casting, in as few launches as the device has for it."""
    if into:
        torch._foreach_copy_(list(into), list(out))
