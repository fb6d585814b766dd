"""One bucket of a step of Muon: segments whose matrices are exchanged together.

[Note: Blocks]
A segment's state is one flat buffer, in which each parameter's piece begins on a multiple of some
number of elements. Viewed as rows of that many elements, *blocks*, every row belongs to one
parameter, so a number for each parameter (whether it has a gradient, its learning rate) becomes a
number for each row, and one launch updates all parameters. Gradients and weights lie among those of
other optimizers' parameters; they are copied into buffers of the same form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from shardgrad.engine.param import managed_by
from shardgrad.engine.param_group import group_of
from shardgrad.errors import CollectiveError
from shardgrad.optim.flat import Update
from shardgrad.optim.newton_schulz import newton_schulz
from shardgrad.optim.ownership import Exchange, Matrix
from shardgrad.optim.segment import Launch

__all__ = ["EPS", "LR", "MOMENTUM", "WEIGHT_DECAY", "Bucket", "Member", "Staging"]

# Indices into the group's device mirror, in the order of `Muon.hypers`.
LR, MOMENTUM, WEIGHT_DECAY, EPS = range(4)

# What a staging buffer is for, its dtype and its device.
_BufferKey = tuple[str, torch.dtype, torch.device]


class Staging:
    """Buffers that all buckets use one after the other, each as large as the largest need."""

    def __init__(self) -> None:
        self._buffers: dict[_BufferKey, torch.Tensor] = {}

    def reserve(self, needs: Iterable[tuple[_BufferKey, int]]) -> bool:
        """Allocates what is missing; returns True if a buffer was replaced by a larger one."""
        grew = False
        # The largest need of a buffer comes first, so that it is allocated once.
        for key, numel in sorted(needs, key=lambda need: -need[1]):
            old = self._buffers.get(key)
            if old is None or old.numel() < numel:
                _, dtype, device = key
                self._buffers[key] = torch.zeros(numel, dtype=dtype, device=device)
                grew |= old is not None
        return grew

    def take(self, key: _BufferKey, numel: int) -> torch.Tensor:
        """Returns the first `numel` elements of a reserved buffer."""
        return self._buffers[key].narrow(0, 0, numel)


class Member:
    """One segment of a bucket: its matrices, and the arithmetic on this rank's pieces of them.

    Args:
        update: of the step in which the bucket is planned.

    Attributes:
        segment: with its state.
        options: the entry of `param_groups`.
        rows: the table of its launches.
        process_group: the shard group; None if matrices are not sharded.
        world_size: of the shard group.
        rank: in the shard group.
        matrices: those that can have a gradient, in memory order.
    """

    def __init__(self, update: Update) -> None:
        segment = self.segment = update.segment
        self.options = segment.options
        self.rows = update.launch.rows
        first = managed_by(segment.params[0])
        self.process_group = None if first is None else group_of(first).mesh.shard_group
        self.world_size = 1 if first is None else group_of(first).mesh.shard_size
        self.rank = 0 if first is None else group_of(first).mesh.shard_rank
        # Frozen parameters have no row. The last ranks may have rows without elements, and foreach
        # refuses lists of empty tensors.
        rows = update.launch.places
        self.matrices: list[Matrix] = []
        self._held = [row for row in rows if row.numel]
        self._spans: list[tuple[int, int]] = []  # of this rank's parts of them in the state
        for row in rows:
            shape = _shape_in_memory(segment.params[row.step_index])
            matrices = Matrix.all_of(shape, self.options["num_heads"], self.world_size)
            self.matrices += matrices
            numels = [matrix.local_numel(self.rank) for matrix in matrices]
            places = zip(accumulate(numels, initial=row.state_offset), numels, strict=False)
            self._spans += [(offset, numel) for offset, numel in places if numel]
        self._param: torch.Tensor | None = None
        self.compute = torch.float64 if segment.dtype is torch.float64 else torch.float32

        # See [Note: Blocks]. Padding of the state belongs to the blocks of some parameter.
        flat = segment.state["momentum_buffer"]
        views = segment.local_views(flat)
        begins = [view.storage_offset() - flat.storage_offset() for view in views]
        spans = [end - begin for begin, end in pairwise([*begins, segment.numel])]
        self._block = math.gcd(*spans) or 1
        param_of_block = [
            torch.full((span // self._block,), i, device="cpu") for i, span in enumerate(spans)
        ]
        device, params = segment.device, segment.params
        self._param_of_block = torch.cat(param_of_block).to(device)

        # Constants of each parameter, in device memory.
        flags = {row.step_index: row.flag_index for row in rows}
        flag_index = [flags.get(i, 0) for i in range(len(params))]
        is_trained = [i in flags for i in range(len(params))]
        self._flag_index = torch.tensor(flag_index, device="cpu").to(device)
        self._is_trained = torch.tensor(is_trained, device="cpu").to(device)
        ratios = [_lr_factor(self.options, *param.shape[-2:]) for param in params]
        self._ratios = torch.tensor(ratios, dtype=torch.float64, device="cpu").to(device)

    # -- memory

    def needs(self) -> list[tuple[_BufferKey, int]]:
        """Returns the staging of one segment, which all segments share."""
        return [(self._key(what), self.segment.numel) for what in ("direction", "weight")]

    def _key(self, what: str) -> _BufferKey:
        return what, self.compute, self.segment.device

    def place(self, staging: Staging, send: Sequence[torch.Tensor]) -> None:
        """Takes the segment's buffers.

        Args:
            staging: reserved for at least `needs`.
            send: views of the bucket's send buffer, one for each of `matrices`.
        """
        self._send = [piece for piece in send if piece.numel()]
        self._direction, self._weight = (staging.take(*need) for need in self.needs())
        self._directions, self._weights = self._pieces(self._direction), self._pieces(self._weight)
        self._parts = [self._direction.narrow(0, *span) for span in self._spans]

    def _pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns the pieces of the parameters of which this rank has elements."""
        return [flat.narrow(0, row.state_offset, row.numel) for row in self._held]

    def _blocks(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(-1, self._block)

    def _per_block(self, per_param: torch.Tensor) -> torch.Tensor:
        return per_param.index_select(0, self._param_of_block).unsqueeze(1)

    def _params(self, launch: Launch) -> list[torch.Tensor]:
        """Returns this rank's pieces of the parameters, in memory order."""
        if self._param is not launch.param:
            self._param = launch.param
            self._params_of = [
                launch.param.narrow(0, row.param_offset, row.numel) for row in self._held
            ]
        return self._params_of

    def _grads(self, launch: Launch) -> list[torch.Tensor]:
        """Returns their gradients; made anew, as views would keep memory that is freed between
        steps.
        """
        return [launch.grad.narrow(0, row.grad_offset, row.numel) for row in self._held]

    # -- arithmetic

    def step_momentum(self, update: Update) -> torch.Tensor:
        """Advances the momentum, and writes the direction into the send buffer.

        Returns:
            Which blocks change in this step: bool, one row for each block.
        """
        live = self._live(update)
        self.segment.steps.add_(live)
        live_blocks = self._per_block(live)
        direction = self._blocks(self._direction)
        buffer = self._blocks(self.segment.state["momentum_buffer"])
        _copy(self._directions, self._grads(update.launch))
        if update.scale is not None:
            direction.mul_(update.scale.to(self.compute))
        momentum = update.hyper[MOMENTUM]
        fresh = (1 - momentum).to(self.compute)
        moved = torch.lerp(buffer.to(self.compute), direction, fresh).to(buffer.dtype)
        torch.where(live_blocks, moved, buffer, out=buffer)
        if update.segment.options["nesterov"]:
            direction.lerp_(buffer.to(self.compute), momentum.to(self.compute))
        else:
            direction.copy_(buffer)
        _copy(self._send, self._parts)
        return live_blocks

    def step_weights(self, update: Update, live_blocks: torch.Tensor) -> None:
        """Applies weight decay and the orthogonalised direction, which has come back in the send
        buffer.
        """
        hyper, state = update.hyper, self.segment.state
        params = self._params(update.launch)
        _copy(self._parts, self._send)
        _copy(self._weights, params)
        decay = (1 - hyper[LR] * hyper[WEIGHT_DECAY]).to(self.compute)
        rate = self._per_block(hyper[LR] * self._ratios).to(self.compute)
        weight = exact = self._blocks(self._weight)
        if "master" in state:
            # The last write of the weight counts, as in [Note: Exact weights] of ops/weights.py.
            master = self._blocks(state["master"])
            exact = torch.where(master.to(self.segment.dtype) == weight, master, weight)
        direction = self._blocks(self._direction)
        moved = (exact * decay).addcmul_(direction, rate, value=-1)
        if "master" in state:
            torch.where(live_blocks, moved, master, out=master)
        torch.where(live_blocks, moved, weight, out=weight)
        _copy(params, self._weights)

    def _live(self, update: Update) -> torch.Tensor:
        """Returns which parameters change: bool, one for each of the segment's."""
        flags = update.launch.touched.index_select(0, self._flag_index)
        live = (flags > 0) & self._is_trained
        return live if update.skip is None else live & ~(update.skip > 0)


class Bucket:
    """Segments whose matrices are exchanged together; it runs once `place` has given it buffers.

    Args:
        members: of one entry of `param_groups`, in one shard group.
        dtype: in which matrices are exchanged and orthogonalised.
    """

    def __init__(self, members: Sequence[Member], dtype: torch.dtype) -> None:
        self.members = members
        first = members[0]
        self._process_group = first.process_group
        matrices = [matrix for member in members for matrix in member.matrices]
        exchange = self._exchange = Exchange.of(matrices, first.world_size, first.rank)
        device = first.segment.device
        self._needs: list[tuple[_BufferKey, int]] = [
            (("send", dtype, device), sum(exchange.sent)),
            (("receive", dtype, device), sum(exchange.received)),
            (("matrices", dtype, device), exchange.matrices_numel),
        ]

    def needs(self) -> list[tuple[_BufferKey, int]]:
        """Returns the staging that it takes, which all buckets share."""
        return [*self._needs, *(need for member in self.members for need in member.needs())]

    def place(self, staging: Staging) -> None:
        """Takes its buffers out of `staging`, which is reserved for at least `needs`."""
        exchange = self._exchange
        self._send_buffer, self._receive_buffer, matrices = (
            staging.take(*need) for need in self._needs
        )
        send = iter([self._send_buffer.narrow(0, *part) for part in exchange.send_slices])
        for member in self.members:
            member.place(staging, [next(send) for _ in member.matrices])
        pieces = exchange.received_pieces
        self._received = [self._receive_buffer.narrow(0, p.receive_offset, p.numel) for p in pieces]
        self._rows = [matrices.narrow(0, p.matrix_offset, p.numel) for p in pieces]
        self._batches = [
            matrices.narrow(0, batch.offset, batch.numel).view(len(batch.matrices), *batch.shape)
            for batch in exchange.batches
        ]

    def run(self, updates: Sequence[Update]) -> None:
        """Updates all members.

        Streams: the current stream of the device; it waits for the exchanges.
        Capture: safe once the process group has been used; nothing is read back.

        Raises:
            CollectiveError: an exchange failed; the momentum has changed, the parameters of this
                bucket have not.
        """
        of_members = list(zip(self.members, updates, strict=True))
        live_blocks = [member.step_momentum(update) for member, update in of_members]
        exchange = self._exchange
        self._all_to_all(self._receive_buffer, self._send_buffer, exchange.received, exchange.sent)
        self._orthogonalise(updates[0])
        self._all_to_all(self._send_buffer, self._receive_buffer, exchange.sent, exchange.received)
        for (member, update), live in zip(of_members, live_blocks, strict=True):
            member.step_weights(update, live)

    def _orthogonalise(self, update: Update) -> None:
        _copy(self._rows, self._received)
        for batch in self._batches:
            batch.copy_(
                newton_schulz(
                    batch,
                    coefficients=update.segment.options["ns_coefficients"],
                    steps=update.segment.options["ns_steps"],
                    eps=update.hyper[EPS],
                )
            )
        _copy(self._received, self._rows)

    def _all_to_all(
        self, into: torch.Tensor, out: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        group = self._process_group
        if not self._exchange.travels:
            into.copy_(out)
            return
        try:
            dist.all_to_all_single(into, out, list(received), list(sent), group=group)
        except RuntimeError as error:
            members = dist.get_process_group_ranks(group)
            raise CollectiveError(
                "the exchange of matrices failed: another rank is late, gone, or running something "
                "else",
                expected=f"every rank of {members} to call optimizer.step() with the same "
                "gradients bound",
                got=str(error).splitlines()[0],
                where=f"rank {dist.get_rank()}, the bucket of {self.members[0].segment.names[0]}",
                fix="call step(), and set gradients to None, on all ranks or on none",
            ) from error


def _shape_in_memory(param: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of what this rank's group shards, of the transpose if columns are
    contiguous.

    Newton-Schulz of the transpose is the transpose of Newton-Schulz, so nothing has to be
    transposed.
    """
    managed = managed_by(param)
    if managed is not None:
        return managed.sharding.shape
    return tuple(param.shape if param.is_contiguous() else reversed(param.shape))


def _lr_factor(options: Mapping[str, Any], rows: int, columns: int) -> float:
    """Returns what lr is multiplied by for a matrix; see `Muon`."""
    rows //= options["num_heads"]
    if options["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns)) if columns else 1.0


def _copy(into: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
    """Copies and casts pieces, in as few launches as the device offers."""
    if into:
        torch._foreach_copy_(list(into), list(out))
