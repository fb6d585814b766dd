"""Weights from a sharded trainer straight into a tensor-parallel receiver's memory.

`plan_weights` computes which ranges of the trainers' shards each receiver needs, without any
communication. A plan is plain data: one rank makes it and sends it to the receivers in any way.
Every message goes directly from the shard with the rows to the receiver that needs them; no rank
holds more of a parameter than its own piece. Rows are sent from the shard. Columns, which are not
contiguous, are packed first, at most `BATCH_NBYTES` at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version

from shardgrad.errors import CollectiveError, OptionError, OptionTypeError
from shardgrad.features.export_table import ExportedParameter, export_table

# Limit of the bytes in flight from or to a rank, unless a single message is larger.
BATCH_NBYTES = 1 << 26

_Places = tuple[int, ...]  # one for each dim


class Cut(NamedTuple):
    """The part of a receiver's tensor that comes from one parameter.

    Attributes:
        name: name of the parameter.
        dim: the dim along which it is cut, one piece per receiver; None to send all of it to every
            receiver.
        pieces: number of pieces, if smaller than the number of receivers: neighbors then receive
            the same piece, as for a model with fewer key and value heads than receivers.
    """

    name: str
    dim: int | None = 0
    pieces: int | None = None


class Message(NamedTuple):
    """A box (a range in each dim) of a parameter, sent from one rank to another.

    Attributes:
        sender, receiver: ranks.
        name, sent: name of the parameter, and the box's offset in the sender's rows.
        target, placed: name of the receiver's tensor, and the box's offset in it.
        shape: shape of the box.
        dtype: dtype on the wire.
        batch: index of the batch of messages that are in flight together.
    """

    sender: int
    receiver: int
    name: str
    sent: _Places
    target: str
    placed: _Places
    shape: _Places
    dtype: torch.dtype
    batch: int = 0

    @property
    def nbytes(self) -> int:
        """The message's bytes on the wire."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WeightPlan:
    """The messages between trainers and receivers. See `plan_weights`.

    Attributes:
        messages: the messages, in the order of sending.
        shapes: shapes of every receiver's tensors, by name.
        pieces: parameter -> its shape, and the ranks that have each range of rows.
    """

    messages: tuple[Message, ...]
    shapes: Mapping[str, tuple[int, ...]]
    pieces: Mapping[str, tuple[object, ...]]

    @property
    def nbytes(self) -> int:
        """The bytes of all messages on the wire."""
        return sum(message.nbytes for message in self.messages)


def plan_weights(
    table: Mapping[str, ExportedParameter],
    layout: Mapping[str, Sequence[Cut | tuple[object, ...]]],
    receivers: Sequence[int],
    dtype: torch.dtype | None = None,
) -> WeightPlan:
    """Returns a plan of which rank sends what to which receiver, without communication.

    For example, a fused weight for two receivers, each of which gets its rows of both parts:

        layout = {"qk.weight": [("q.weight", 0), ("k.weight", 0)]}
        plan = shardgrad.plan_weights(shardgrad.export_table(model), layout, receivers=[8, 9])

    Args:
        table: the result of `export_table` on any trainer.
        layout: name of a receiver's tensor -> its `Cut`s, or tuples like them, concatenated along
            dim 0: `{"qkv": [("q", 0), ("k", 0), ("v", 0)], "out": [("o", 1)]}`.
        receivers: ranks of the receivers, in the order of their pieces.
        dtype: dtype on the wire; the sender casts. None for the dtype of the trainer's memory.

    Raises:
        OptionError: a parameter is unknown or cannot be cut like this, or a rank occurs twice.
        OptionTypeError: an argument is of another type.
    """
    is_dtype = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    are_mappings = isinstance(table, Mapping) and isinstance(layout, Mapping)
    if not (
        (are_mappings and is_dtype and isinstance(receivers, Sequence))
        and all(isinstance(row, ExportedParameter) for row in table.values())
        and all(isinstance(cuts, Sequence) for cuts in layout.values())
    ):
        raise OptionTypeError(
            "plan_weights needs a table, a layout, receivers and a dtype",
            expected="export_table(model), a dictionary of lists, a list, and a floating dtype or "
            "None, for that of the trainer's memory",
            got=f"{type(table).__name__}, {layout!r}, {receivers!r}, {dtype!r}",
            fix="plan_weights(shardgrad.export_table(model), layout, ..., dtype=torch.bfloat16)",
        )
    trainers = {
        rank for row in table.values() for having in row.holders.values() for rank in having
    }
    ranks = {each for each in receivers if isinstance(each, int) and each >= 0} - trainers
    if not receivers or len(ranks) < len(receivers):
        raise OptionError(
            "receivers must be distinct ranks that are not trainers",
            expected=f"each rank once, and none of the trainers {sorted(trainers)}",
            got=f"{list(receivers)}",
            fix="on the same device, read the memory at export_table()'s addresses instead",
        )
    messages: list[Message] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for target, cuts in layout.items():
        offset, widths = 0, set()
        for each in cuts:
            cut, row = _cut_of(table, each)
            for place, receiver in enumerate(receivers):
                begin, shape = _wanted(row, cut, place, len(receivers))
                for (low, high), having in row.holders.items():
                    first = max(low, begin[row.dim])
                    last = min(high, begin[row.dim] + shape[row.dim])
                    if first >= last or not prod(shape):
                        continue
                    sent = _replaced(begin, row.dim, first - low)
                    inside = _replaced([0] * len(begin), row.dim, first - begin[row.dim])
                    placed = _replaced(inside, 0, inside[0] + offset)
                    box = _replaced(shape, row.dim, last - first)
                    # If several trainers have the same rows, distribute the receivers over them.
                    sender = having[place % len(having)]
                    which = (sender, receiver, cut.name, sent, target, placed, box)
                    messages.append(Message(*which, dtype or row.dtype))
            offset += shape[0]
            widths.add(tuple(shape[1:]))
        if len(widths) != 1:
            raise OptionError(
                f"the pieces of {target} cannot be concatenated along dim 0",
                expected="pieces of equal size in all other dims",
                got=f"{sorted(widths)}",
                fix="cut all pieces along the same dim",
            )
        shapes[target] = (offset, *widths.pop()) if row.shape or len(cuts) > 1 else ()
    pieces = {name: _pieces(row) for name, row in table.items()}
    return WeightPlan(tuple(_in_batches(messages)), shapes, pieces)


def _in_batches(messages: Iterable[Message]) -> Iterator[Message]:
    """Yields messages with their batch indices. A batch has at most `BATCH_NBYTES` from or to a
    rank, unless a single message is larger.
    """
    batch, in_flight = 0, Counter[int]()
    for message in messages:
        ranks = (message.sender, message.receiver)
        busiest = max(in_flight[rank] for rank in ranks)
        if busiest + message.nbytes > BATCH_NBYTES:
            batch += 1
            in_flight.clear()
        in_flight.update(dict.fromkeys(ranks, message.nbytes))
        yield message._replace(batch=batch)


def send_weights(
    model: nn.Module,
    plan: WeightPlan,
    group: dist.ProcessGroup | None = None,
    *,
    timeout_s: float = 60.0,
) -> None:
    """Sends this rank's messages of a plan, and returns when its receivers have them.

    For example, on every trainer, after a step:

        shardgrad.send_weights(model, plan)

    Args:
        model: the root that `plan` was made for.
        plan: the same plan on all ranks.
        group: a process group of trainers and receivers; None for all ranks.
        timeout_s: timeout for a batch of messages, in seconds.

    Streams: sends after the current stream's work; the host waits for the messages.
    Capture: not safe.

    Raises:
        CollectiveError: a receiver is gone or late. `group` cannot be used afterwards; the process
            groups that train the model are not affected.
        OptionError: the plan is for another model or another number of ranks, or the group lacks a
            rank.
        OptionTypeError: `plan` is no plan, or `timeout_s` no time.
    """
    _require_plan(plan, timeout_s)
    table = export_table(model)
    if {name: _pieces(row) for name, row in table.items()} != dict(plan.pieces):
        raise OptionError(
            "the plan does not match the model, or the number of ranks",
            expected="plan_weights(shardgrad.export_table(model), ...) for this model",
            got="different names, shapes or rows of parameters",
            fix="make the plan after fully_shard, for this model",
        )
    mine = _own_messages(plan, "sender", group)
    transfer = partial(_transfer, group, timeout_s)
    for batch in _batches(mine):
        parts = (_part(table[each.name].local, each.sent, each.shape) for each in batch)
        # Neither call copies a tensor that already has the dtype and is contiguous.
        ready = [
            part.to(message.dtype).contiguous() for part, message in zip(parts, batch, strict=True)
        ]
        transfer(dist.isend, ready, [message.receiver for message in batch])
    # A small send completes before it is received, so each receiver confirms that it has
    # everything.
    receivers = sorted({message.receiver for message in mine})
    transfer(dist.irecv, _receipts(receivers, [row.local for row in table.values()]), receivers)


@torch.no_grad()
def receive_weights(
    tensors: Mapping[str, torch.Tensor],
    plan: WeightPlan,
    group: dist.ProcessGroup | None = None,
    *,
    timeout_s: float = 60.0,
) -> None:
    """Receives this rank's tensors of a plan, in place. Call it on every receiver while the
    trainers call `send_weights`.

    For example:

        tensors = {"qk.weight": generator.qk.weight}
        shardgrad.receive_weights(tensors, plan)

    Args:
        tensors: the tensors to write, by their names in the plan's layout.
        plan: the same plan on all ranks.
        group: a process group of trainers and receivers; None for all ranks.
        timeout_s: timeout for a batch of messages, in seconds.

    Streams: receives and copies on the current stream, for which the host waits.
    Capture: not safe.

    Raises:
        CollectiveError: a trainer is gone or late.
        OptionError: a tensor is missing or has another shape, or the group lacks a rank; nothing
            was received.
        OptionTypeError: `plan` is no plan, or `timeout_s` no time.
    """
    _require_plan(plan, timeout_s)
    for name, shape in plan.shapes.items():
        found = tensors.get(name) if isinstance(tensors, Mapping) else None
        got = "no tensor"
        if isinstance(found, torch.Tensor):
            if found.is_floating_point() and found.shape == shape:
                continue
            got = f"{found.dtype}, shape {tuple(found.shape)}"  # whole numbers would be truncated
        raise OptionError(
            f"the receiver's tensor {name} is missing, or has the wrong shape or dtype",
            expected=f"a floating-point tensor of shape {shape}",
            got=got,
            fix="plan_weights() with this rank's layout and the right number of receivers",
        )
    mine = _own_messages(plan, "receiver", group)
    transfer = partial(_transfer, group, timeout_s)
    for batch in _batches(mine):
        places = [_part(tensors[each.target], each.placed, each.shape) for each in batch]
        arriving = [
            place
            if place.is_contiguous() and place.dtype is message.dtype
            else torch.empty(place.shape, dtype=message.dtype, device=place.device)
            for place, message in zip(places, batch, strict=True)
        ]
        transfer(dist.irecv, arriving, [message.sender for message in batch])
        for place, arrived in zip(places, arriving, strict=True):
            if arrived is not place:
                place.copy_(arrived)
    # Collectives do not count as writes: autograd and the engine would use the former values.
    increment_version(list(tensors.values()))
    senders = sorted({message.sender for message in mine})
    transfer(dist.isend, _receipts(senders, tensors.values()), senders)


# -- overlaps of pieces


def _cut_of(table: Mapping[str, ExportedParameter], given: Any) -> tuple[Cut, ExportedParameter]:
    is_cut = isinstance(given, tuple | list) and 0 < len(given) < 4
    cut = Cut(*given) if is_cut else Cut(repr(given))
    row = table.get(cut.name)
    are_numbers = all(isinstance(each, int | None) for each in cut[1:])
    if row is None or not are_numbers or cut.dim not in (None, *range(len(row.shape))):
        raise OptionError(
            f"there is no parameter {cut.name} to cut along dim {cut.dim}",
            expected="(name, dim) or (name, dim, pieces): a name in export_table(model), one of "
            "the parameter's dims or None, and a whole number",
            got=f"{given!r}" + (f", shape {row.shape}" if row else ""),
            fix="see list(shardgrad.export_table(model))",
        )
    return cut, row


def _wanted(
    row: ExportedParameter, cut: Cut, place: int, receivers: int
) -> tuple[list[int], list[int]]:
    """Returns the offset and shape of the box of a parameter that the receiver at a place needs."""
    shape = list(row.shape or (1,))
    begin = [0] * len(shape)
    if cut.dim is not None:
        pieces, size = receivers if cut.pieces is None else cut.pieces, row.shape[cut.dim]
        if pieces < 1 or size % pieces or receivers % pieces:
            raise OptionError(
                f"parameter {cut.name} cannot be cut into equal pieces along dim {cut.dim}",
                expected=f"a number of pieces that divides the dim and the {receivers} receivers",
                got=f"{pieces} pieces, shape {row.shape}",
                fix="pass another number of pieces, or dim=None",
            )
        shape[cut.dim] = size // pieces
        begin[cut.dim] = place * pieces // receivers * shape[cut.dim]
    return begin, shape


def _replaced(places: Sequence[int], dim: int, place: int) -> _Places:
    return (*places[:dim], place, *places[dim + 1 :])


def _part(tensor: torch.Tensor, begin: _Places, shape: _Places) -> torch.Tensor:
    """Returns a box of a tensor as a view."""
    part = tensor if tensor.ndim else tensor.view(1)
    for dim, first in enumerate(begin):
        part = part.narrow(dim, first, shape[dim])
    return part


def _pieces(row: ExportedParameter) -> tuple[object, ...]:
    """Returns the layout of a parameter, which must be equal on all ranks and unchanged since the
    plan was made.
    """
    return row.shape, row.dim, tuple(sorted(row.holders.items()))


# -- messages


def _require_plan(plan: Any, timeout_s: Any) -> None:
    # torch counts milliseconds.
    is_time = isinstance(timeout_s, int | float) and 0 < timeout_s < 1e9
    if not (isinstance(plan, WeightPlan) and is_time):
        raise OptionTypeError(
            "a transfer needs a plan and a timeout",
            expected="a plan that plan_weights() returned, and a positive number of seconds",
            got=f"{type(plan).__name__}, timeout_s={timeout_s!r}",
            fix="send_weights(model, shardgrad.plan_weights(...), timeout_s=60.0)",
        )


def _own_messages(plan: WeightPlan, side: str, group: dist.ProcessGroup | None) -> list[Message]:
    """Returns the messages that this rank sends or receives over a process group.

    torch would send nothing, without an error, on a rank outside of the group.
    """
    rank = dist.get_rank()
    mine = [message for message in plan.messages if getattr(message, side) == rank]
    members = dist.get_process_group_ranks(group) if dist.get_rank(group) >= 0 else []
    outside = {end for each in mine for end in (each.sender, each.receiver)}.difference(members)
    if outside:
        raise OptionError(
            f"the process group of the transfer lacks ranks {sorted(outside)}",
            expected="a group of trainers and receivers",
            got=f"a group of ranks {members}, on rank {rank}",
            fix="group = dist.new_group([*trainers, *receivers]), on all ranks",
        )
    return mine


def _batches(messages: Sequence[Message]) -> Iterator[list[Message]]:
    for _, batch in groupby(messages, attrgetter("batch")):
        yield list(batch)


def _receipts(peers: Sequence[int], like: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns a byte for each peer, on the device of the weights."""
    device = next((tensor.device for tensor in like), "cpu")
    return [torch.zeros(1, dtype=torch.uint8, device=device) for _ in peers]


def _transfer(
    group: dist.ProcessGroup | None,
    timeout_s: float,
    operation: Callable[..., object],
    tensors: Sequence[torch.Tensor],
    peers: Sequence[int],
) -> None:
    """Sends or receives tensors, in one batch if the backend supports it; returns when all are
    done.

    Args:
        group: the process group of trainers and receivers.
        timeout_s: timeout in seconds.
        operation: `dist.isend` or `dist.irecv`.
        tensors: the tensors to send or to receive into.
        peers: the peer rank for each tensor.
    """
    waited_for = sorted(set(peers))
    ops = [
        dist.P2POp(operation, tensor, peer, group)
        for tensor, peer in zip(tensors, peers, strict=True)
    ]
    try:
        works = dist.batch_isend_irecv(ops) if ops else []
        for number, work in enumerate(works):
            if len(works) == len(ops):
                waited_for = [peers[number]]
            work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        late = ", ".join(map(str, waited_for))
        raise CollectiveError(
            f"the transfer of weights failed: rank {late} is late or has exited",
            expected=f"send_weights() on trainers and receive_weights() on receivers, within "
            f"{timeout_s:g} s of each other",
            got=str(error).partition("\n")[0],
            where=f"rank {dist.get_rank()}",
            fix="make a process group and a plan for the remaining ranks",
        ) from error
