"""One bucket of a step of Muon: segments whose matrices are exchanged together.

[Note: Two steps of SGD]
Muon's elementwise work is done by two calls of `sgd_`, each one pass over a segment:

- momentum: a step with learning rate -1 from zero weights writes the direction. With momentum m,
  gradients scaled by 1 - m give `m buffer + (1 - m) grad`, and with Nesterov momentum
  `m buffer' + (1 - m) grad`, as in `torch.optim.Muon`;
- weights: the gradient is the orthogonal matrix, read from the buffer in which it arrives and
  multiplied by the factor of `adjust_lr_fn`. Matrices of a segment with the same factor are one
  launch.

So that kernel also handles parameters without a gradient, skipped steps, schedules and master
copies.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch

from shardgrad.engine.param_group import managed_by
from shardgrad.engine.transports import MessageTag, Work, transport_for
from shardgrad.ops.segments import segment_rows
from shardgrad.ops.update import sgd_
from shardgrad.optim.flat import Update
from shardgrad.optim.newton_schulz import newton_schulz_
from shardgrad.optim.ownership import Exchange, Matrix
from shardgrad.optim.precision import Precision
from shardgrad.optim.segment import Segment
from shardgrad.sharding.mesh import DataParallelMesh

# Indices into the group's device mirror, in the order of `Muon.hypers`.
MOMENTUM, EPS = 1, 2

# `FlatOptimizer.with_states`
_WithStates = Callable[[Sequence[Update], Collection[str]], Iterable[Update]]
_Piece = tuple[int, int, int, int, int, int]  # see `segment_rows`


def mesh_of(segment: Segment) -> DataParallelMesh | None:
    """Returns the mesh that a segment's matrices are sharded over; None if they are not sharded."""
    managed = managed_by(segment.params[0])
    return None if managed is None else managed.group.mesh


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
class _Table:
    """The table of a launch, with a row for each matrix.

    Attributes:
        rows, tiles: see `Launch`.
        ratio: the factor on the learning rate of these matrices, a float64 device scalar.
    """

    rows: torch.Tensor
    tiles: int
    ratio: torch.Tensor


class Bucket:
    """Segments whose matrices are exchanged together.

    Args:
        updates: the bucket's updates in the step in which it is planned. Their segments have the
            same entry of `param_groups`, shard group, device and dtype.
        owner_of: for each of their matrices, the rank that orthogonalizes it.
        dtype: the dtype in which matrices are exchanged and orthogonalized, unless parameters are
            float64.

    Attributes:
        segments: the segments of the updates.
    """

    def __init__(
        self, updates: Sequence[Update], owner_of: Sequence[int], dtype: torch.dtype
    ) -> None:
        segments = self.segments = [update.segment for update in updates]
        self._options = segments[0].options
        # `sgd_` computes in float64 only if it also writes float64.
        self._dtype = torch.float64 if segments[0].dtype is torch.float64 else dtype
        self._device = segments[0].device
        mesh = mesh_of(segments[0])
        rank, world_size = (0, 1) if mesh is None else (mesh.shard_rank, mesh.shard_size)
        matrices = [matrices_of(update) for update in updates]
        together = list(chain.from_iterable(chain.from_iterable(matrices)))
        self._exchange = Exchange.of(together, owner_of, world_size, rank)
        self._transport = (
            transport_for(mesh.shard_group, self._device)
            if mesh is not None and self._exchange.travels
            else None
        )
        # Kept alive because their ids are the key under which `Muon` caches its buckets.
        self._launch_rows = [update.launch.rows for update in updates]
        # Hyperparameters of the momentum step: lr -1; momentum is copied from the group's mirror.
        rates = torch.tensor([-1.0, 0.0, 0.0, 0.0], dtype=torch.float64, device="cpu")
        self._rates = segments[0].on_device(rates)
        self._momentum_rate = self._rates[MOMENTUM]
        # Step counts for the second call of `sgd_`, unused: the first one counts the steps.
        self._uncounted = segments[0].on_device(torch.zeros(1, dtype=torch.float32, device="cpu"))
        self._momentum: list[_Table] = []
        self._weights: list[list[_Table]] = []
        places = iter(self._exchange.send_slices)
        for update, of_segment in zip(updates, matrices, strict=True):
            into_messages: list[_Piece] = []
            into_weights = defaultdict[float, list[_Piece]](list)
            for row, of_param in zip(update.launch.places, of_segment, strict=True):
                shape = update.segment.params[row.step_index].shape
                alike = into_weights[_lr_factor(self._options, *shape[-2:])]
                begin = 0
                for _ in of_param:
                    place = next(places)
                    param, grad, state = (offset + begin for offset in row[:3])
                    into_messages.append((place.offset, grad, state, place.numel, *row[4:6]))
                    alike.append((param, place.offset, state, place.numel, 0, row.flag_index))
                    begin += place.numel
            self._momentum.append(_table(update.segment, into_messages))
            self._weights.append(
                [_table(update.segment, pieces, ratio) for ratio, pieces in into_weights.items()]
            )

    def run(self, updates: Sequence[Update], with_states: _WithStates) -> Iterator[None]:
        """Updates all segments. Yields twice, when an exchange has been started whose result comes
        next.

        Args:
            updates: the updates of the step, one for each segment.
            with_states: see `FlatOptimizer`.

        Streams: the current stream of the device; it waits for the exchanges.
        Capture: safe once the process group has been used; nothing is read back.

        Raises:
            CollectiveError: an exchange failed. The momentum of this bucket, and of others that are
                under way, has changed; their parameters have not.
        """
        exchange = self._exchange
        sent = self._step_momentum(updates, with_states)
        work = self._start(sent, exchange.sent, exchange.received)
        yield
        (received,) = work.wait()
        del sent
        self._orthogonalize(received, updates[0].hyper[EPS])
        work = self._start(received, exchange.received, exchange.sent)
        yield
        (orthogonal,) = work.wait()
        del received
        self._step_weights(with_states(updates, ("master", "remainder")), orthogonal)

    # -- arithmetic; see [Note: Two steps of SGD]

    def _step_momentum(self, updates: Sequence[Update], with_states: _WithStates) -> torch.Tensor:
        """Updates momentum and step counts; returns the directions in the send buffer's layout."""
        first = updates[0]
        momentum = first.hyper[MOMENTUM]
        self._momentum_rate.copy_(momentum)
        gain = 1 - momentum
        if first.scale is not None:
            gain = gain * first.scale.view(())
        direction = torch.zeros(sum(self._exchange.sent), dtype=self._dtype, device=self._device)
        momenta = with_states(updates, ("momentum_buffer",))
        for update, table in zip(momenta, self._momentum, strict=True):
            segment = update.segment
            sgd_(
                direction,
                update.launch.grad,
                update.state["momentum_buffer"],
                master=None,
                steps=segment.steps,
                ticket=segment.ticket,
                touched=update.launch.touched,
                rows=table.rows,
                tiles=table.tiles,
                hyper=self._rates,
                scale=gain,
                found_inf=update.skip,
                nesterov=self._options["nesterov"],
            )
        return direction

    def _step_weights(self, updates: Iterable[Update], orthogonal: torch.Tensor) -> None:
        """Applies weight decay and the orthogonal matrices."""
        for update, tables in zip(updates, self._weights, strict=True):
            master = Precision.exact(update.state)
            for table in tables:
                sgd_(
                    update.launch.param,
                    orthogonal,
                    momentum_buffer=None,
                    master=master,
                    steps=self._uncounted,
                    ticket=update.segment.ticket,
                    touched=update.launch.touched,
                    rows=table.rows,
                    tiles=table.tiles,
                    hyper=update.hyper,
                    scale=table.ratio,
                    found_inf=update.skip,
                    decoupled=True,
                )

    def _orthogonalize(self, received: torch.Tensor, eps: torch.Tensor) -> None:
        """Assembles the owned matrices from pieces, orthogonalizes them, and writes the pieces
        back.
        """
        exchange = self._exchange
        matrices, places = received, exchange.received_pieces
        if exchange.travels:
            matrices = received.new_empty(exchange.matrices_numel)
            pieces = [received.narrow(0, place.receive_offset, place.numel) for place in places]
            rows = [matrices.narrow(0, place.matrix_offset, place.numel) for place in places]
            _copy(rows, pieces)
        for batch in exchange.batches:
            whole = matrices.narrow(0, batch.offset, batch.numel)
            newton_schulz_(
                whole.view(len(batch.matrices), *batch.shape),
                eps=eps,
                coefficients=self._options["ns_coefficients"],
                steps=self._options["ns_steps"],
            )
        if exchange.travels:
            _copy(pieces, rows)

    def _start(self, out: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Work:
        """Starts an exchange of pieces, whose work returns what is received."""
        if self._transport is None:
            return Work([out])
        # The sizes agree if step() is called, and gradients are None, on all ranks or on none.
        what = f"exchange of matrices that have gradients: {self.segments[0].names[0]} ..."
        return self._transport.all_to_all(
            out.new_empty(sum(received)), out, received, sent, MessageTag(what)
        )


def in_turn(runs: Iterable[Iterator[None]]) -> None:
    """Runs buckets so that each is one exchange ahead of the next; see [Note: Owned matrices].

    The newest takes its turn first: the pieces that it sends travel while the one before it is
    orthogonalized.
    """
    coming, under_way = iter(runs), list[Iterator[None]]()
    while True:
        under_way = [*islice(coming, 1), *under_way]
        if not under_way:
            return
        under_way = [run for run in under_way if next(run, run) is None]


def _table(segment: Segment, pieces: Sequence[_Piece], ratio: float = 1.0) -> _Table:
    rows, tiles = segment_rows(pieces)
    on_device = segment.on_device
    return _Table(
        on_device(rows),
        tiles,
        on_device(torch.tensor(ratio, dtype=torch.float64, device="cpu")),
    )


def _shape_in_memory(param: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of the sharded parameter; for a plain one whose columns are contiguous,
    that of its transpose.

    Newton-Schulz commutes with transposition, so no data has to be transposed.
    """
    managed = managed_by(param)
    if managed is not None:
        return managed.sharding.shape
    return tuple(param.shape if param.is_contiguous() else reversed(param.shape))


def _lr_factor(options: Mapping[str, Any], rows: int, columns: int) -> float:
    """Returns the factor on the learning rate of a matrix; see `adjust_lr_fn` of `Muon`."""
    rows //= options["num_heads"]
    if options["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns)) if columns else 1.0


def _copy(into: list[torch.Tensor], out: list[torch.Tensor]) -> None:
    """Copies pieces with one foreach call."""
    if into:
        torch._foreach_copy_(into, out)
