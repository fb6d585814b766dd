"""One bucket of a step of Muon: segments whose matrices are exchanged together.

[Note: Two steps of SGD]
What Muon does to each element is what `ops.sgd_` does, in one pass and for a segment at a time:

- momentum: a step of rate -1 from zero leaves the direction. With a momentum of m, gradients that
  are multiplied by 1 - m make it `m buffer + (1 - m) grad`, and with Nesterov's look ahead
  `m buffer' + (1 - m) grad`, as in `torch.optim.Muon`;
- weights: the gradient is the orthogonal matrix, read from where it arrives, multiplied by what
  `adjust_lr_fn` says; the matrices of a segment for which that is the same are one launch.

So parameters without a gradient, steps to be skipped, schedules and masters are that kernel's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist

from shardgrad import ops
from shardgrad.engine.param import managed_by
from shardgrad.engine.param_group import group_of
from shardgrad.errors import CollectiveError
from shardgrad.optim.flat import Update
from shardgrad.optim.newton_schulz import newton_schulz
from shardgrad.optim.ownership import Exchange, Matrix
from shardgrad.optim.precision import Precision
from shardgrad.optim.segment import Segment
from shardgrad.sharding.mesh import DataParallelMesh

__all__ = ["EPS", "MOMENTUM", "Bucket", "matrices_of", "mesh_of"]

# Indices into the group's device mirror, in the order of `Muon.hypers`.
MOMENTUM, EPS = 1, 2

_Span = tuple[int, int]  # first element, and how many
_Piece = tuple[int, int, int, int, int, int]  # see `ops.segment_rows`


def mesh_of(segment: Segment) -> DataParallelMesh | None:
    """Returns the mesh that a segment's matrices are sharded over, None if they are not."""
    managed = managed_by(segment.params[0])
    return None if managed is None else group_of(managed).mesh


def matrices_of(update: Update) -> list[list[Matrix]]:
    """Returns the matrices of each of a segment's parameters that can have a gradient."""
    segment, mesh = update.segment, mesh_of(update.segment)
    world_size = 1 if mesh is None else mesh.shard_size
    return [
        Matrix.all_of(
            _shape_in_memory(segment.params[row.step_index]),
            segment.options["num_heads"],
            world_size,
        )
        for row in update.launch.places
    ]


@dataclass(frozen=True)
class _Weights:
    """Matrices of a segment whose learning rate is multiplied by the same number.

    Attributes:
        ratio: this number, float64, on the device.
        rows, tiles: the table of a launch; a row for each matrix that this rank has a part of.
        steps: a count for each row, which nobody reads.
    """

    ratio: torch.Tensor
    rows: torch.Tensor
    tiles: int
    steps: torch.Tensor


class Bucket:
    """Segments whose matrices are exchanged together.

    Args:
        updates: of the step in which it is planned: segments of one entry of `param_groups`, shard
            group, device and dtype.
        dtype: in which matrices are exchanged and orthogonalised.

    Attributes:
        segments: of the updates.
    """

    def __init__(self, updates: Sequence[Update], dtype: torch.dtype) -> None:
        segments = self.segments = [update.segment for update in updates]
        self._dtype = dtype
        self._options, self._device = segments[0].options, segments[0].device
        # Arithmetic is as wide as what a launch writes.
        is_double = segments[0].dtype is torch.float64
        self._direction_dtype = torch.float64 if is_double else dtype
        mesh = mesh_of(segments[0])
        self._process_group = None if mesh is None else mesh.shard_group
        rank = 0 if mesh is None else mesh.shard_rank
        matrices = [matrices_of(update) for update in updates]
        together = list(chain.from_iterable(chain.from_iterable(matrices)))
        exchange = self._exchange = Exchange.of(
            together, 1 if mesh is None else mesh.shard_size, rank
        )
        self._numel = sum(segment.numel for segment in segments)
        self._tables = [update.launch.rows for update in updates]  # whose identities are a key
        # A step of rate -1; the momentum comes from the group's mirror.
        rates = torch.tensor([-1.0, 0.0, 0.0, 0.0], dtype=torch.float64, device="cpu")
        self._rates = segments[0].on_device(rates)
        self._momentum: list[tuple[torch.Tensor, int]] = []
        self._weights: list[list[_Weights]] = []
        self._parts: list[_Span] = []  # of the direction
        self._sent = [each for each in exchange.send_slices if each.numel]
        places = iter(exchange.send_slices)
        bases = accumulate((segment.numel for segment in segments), initial=0)
        for base, update, of_segment in zip(bases, updates, matrices, strict=False):
            into_direction = []
            by_ratio = defaultdict[float, list[_Piece]](list)
            for row, of_param in zip(update.launch.places, of_segment, strict=True):
                direction = base + row.state_offset
                into_direction.append((direction, *row[1:6]))
                shape = update.segment.params[row.step_index].shape
                pieces = by_ratio[_lr_factor(self._options, *shape[-2:])]
                begin = 0
                for _ in of_param:
                    offset, numel = next(places)
                    if numel:
                        self._parts.append((direction + begin, numel))
                        memory = row.param_offset + begin, offset, row.state_offset + begin
                        pieces.append((*memory, numel, len(pieces), row.flag_index))
                        begin += numel
            rows, tiles = ops.segment_rows(into_direction)
            self._momentum.append((update.segment.on_device(rows), tiles))
            self._weights.append(
                [_weights(update.segment, ratio, pieces) for ratio, pieces in by_ratio.items()]
            )

    def run(self, updates: Sequence[Update]) -> None:
        """Updates all segments.

        Streams: the current stream of the device; it waits for the exchanges.
        Capture: safe once the process group has been used; nothing is read back.

        Raises:
            CollectiveError: an exchange failed; the momentum has changed, the parameters of this
                bucket have not.
        """
        exchange = self._exchange
        direction = self._step_momentum(updates)
        send = torch.empty(sum(exchange.sent), dtype=self._dtype, device=self._device)
        _copy(_views(send, self._sent), _views(direction, self._parts))
        del direction
        received = self._all_to_all(send, exchange.sent, exchange.received)
        self._orthogonalise(received, updates[0].hyper[EPS])
        orthogonal = self._all_to_all(received, exchange.received, exchange.sent)
        self._step_weights(updates, orthogonal)

    # -- arithmetic; see [Note: Two steps of SGD]

    def _step_momentum(self, updates: Sequence[Update]) -> torch.Tensor:
        """Advances momentum and step counts; returns the direction, in the form of the states."""
        first = updates[0]
        momentum = first.hyper[MOMENTUM]
        self._rates[MOMENTUM].copy_(momentum)
        gain = 1 - momentum
        if first.scale is not None:
            gain = gain * first.scale.view(())
        direction = torch.zeros(self._numel, dtype=self._direction_dtype, device=self._device)
        for update, (rows, tiles) in zip(updates, self._momentum, strict=True):
            segment = update.segment
            ops.sgd_(
                direction,
                update.launch.grad,
                segment.state["momentum_buffer"],
                master=None,
                steps=segment.steps,
                ticket=segment.ticket,
                touched=update.launch.touched,
                rows=rows,
                tiles=tiles,
                hyper=self._rates,
                scale=gain,
                found_inf=update.skip,
                nesterov=self._options["nesterov"],
            )
        return direction

    def _step_weights(self, updates: Sequence[Update], orthogonal: torch.Tensor) -> None:
        """Applies weight decay and the orthogonal matrices."""
        for update, tables in zip(updates, self._weights, strict=True):
            for table in tables:
                ops.sgd_(
                    update.launch.param,
                    orthogonal,
                    momentum_buffer=None,
                    master=Precision.exact(update.segment.state),
                    steps=table.steps,
                    ticket=update.segment.ticket,
                    touched=update.launch.touched,
                    rows=table.rows,
                    tiles=table.tiles,
                    hyper=update.hyper,
                    scale=table.ratio,
                    found_inf=update.skip,
                    decoupled=True,
                )

    def _orthogonalise(self, received: torch.Tensor, eps: torch.Tensor) -> None:
        """Puts the pieces of owned matrices together, orthogonalises these, and cuts them again."""
        exchange = self._exchange
        places = exchange.received_pieces
        matrices = received.new_empty(exchange.matrices_numel)
        pieces = _views(received, [(place.receive_offset, place.numel) for place in places])
        rows = _views(matrices, [(place.matrix_offset, place.numel) for place in places])
        _copy(rows, pieces)
        for batch in exchange.batches:
            whole = matrices.narrow(0, batch.offset, batch.numel)
            whole = whole.view(len(batch.matrices), *batch.shape)
            whole.copy_(
                newton_schulz(
                    whole,
                    coefficients=self._options["ns_coefficients"],
                    steps=self._options["ns_steps"],
                    eps=eps,
                )
            )
        _copy(pieces, rows)

    def _all_to_all(
        self, out: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        if not self._exchange.travels:
            return out
        group = self._process_group
        into = out.new_empty(sum(received))
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
                where=f"rank {dist.get_rank()}, the bucket of {self.segments[0].names[0]}",
                fix="call step(), and set gradients to None, on all ranks or on none",
            ) from error
        return into


def _weights(segment: Segment, ratio: float, pieces: Sequence[_Piece]) -> _Weights:
    rows, tiles = ops.segment_rows(pieces)
    on_device = segment.on_device
    return _Weights(
        on_device(torch.tensor(ratio, dtype=torch.float64, device="cpu")),
        on_device(rows),
        tiles,
        on_device(torch.zeros(len(pieces), dtype=torch.float32, device="cpu")),
    )


def _views(flat: torch.Tensor, spans: Iterable[_Span]) -> list[torch.Tensor]:
    return [flat.narrow(0, begin, numel) for begin, numel in spans]


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
