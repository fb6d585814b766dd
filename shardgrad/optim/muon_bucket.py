"""One bucket of a step of Muon: segments whose matrices are exchanged together.

[Note: Blocks]
A segment's state is one flat buffer, in which each parameter's piece begins on a multiple of some
number of elements. Behind each other, and viewed as rows of that many elements, *blocks*, every row
of a bucket's states belongs to one parameter, so a number for each parameter (whether it has a
gradient, its learning rate) becomes a number for each row, and one launch updates all parameters.
Gradients and weights lie among those of other optimizers' parameters; they are copied into buffers
of the same form. These live as long as the bucket's part of a step, in memory that activations have
at other times.
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
from shardgrad.optim.segment import Segment
from shardgrad.sharding.mesh import DataParallelMesh

__all__ = ["EPS", "LR", "MOMENTUM", "WEIGHT_DECAY", "Bucket", "matrices_of", "mesh_of"]

# Indices into the group's device mirror, in the order of `Muon.hypers`.
LR, MOMENTUM, WEIGHT_DECAY, EPS = range(4)

_Span = tuple[int, int]  # first element, and how many


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
        self._compute = torch.promote_types(segments[0].dtype, torch.float32)
        mesh = mesh_of(segments[0])
        self._process_group = None if mesh is None else mesh.shard_group
        rank = 0 if mesh is None else mesh.shard_rank

        # Where this rank's pieces are in the flat buffers, and in these the parts of matrices. The
        # last ranks may have pieces without elements, which foreach refuses.
        self._numels = [segment.numel for segment in segments]
        self._held = [[row for row in update.launch.places if row.numel] for update in updates]
        self._tables = [update.launch.rows for update in updates]  # whose identities are a key
        self._pieces: list[_Span] = []
        self._parts: list[_Span] = []
        matrices: list[Matrix] = []
        params: list[torch.Tensor] = []
        spans: list[int] = []
        flag_index: list[int] = []
        flags_before = 1
        bases = accumulate(self._numels, initial=0)
        for base, update in zip(bases, updates, strict=False):
            segment, rows = update.segment, update.launch.places
            for row, of_param in zip(rows, matrices_of(update), strict=True):
                begin = base + row.state_offset
                numels = [matrix.local_numel(rank) for matrix in of_param]
                self._pieces.append((begin, row.numel))
                self._parts += zip(accumulate(numels, initial=begin), numels, strict=False)
                matrices += of_param
            # See [Note: Blocks]. Padding of the state belongs to the blocks of some parameter.
            flat = segment.state["momentum_buffer"]
            views = segment.local_views(flat)
            begins = [int(view.storage_offset() - flat.storage_offset()) for view in views]
            spans += [end - begin for begin, end in pairwise([*begins, segment.numel])]
            # A frozen parameter has no row: its flag is the first one, which is always zero.
            flags = {row.step_index: flags_before + row.flag_index for row in rows}
            flag_index += [flags.get(i, 0) for i in range(len(segment.params))]
            flags_before += update.launch.touched.numel()
            params += segment.params
        self._pieces = _with_elements(self._pieces)
        self._parts = _with_elements(self._parts)
        self._exchange = Exchange.of(matrices, 1 if mesh is None else mesh.shard_size, rank)

        # Constants of each parameter, in device memory.
        self._block = math.gcd(*spans) or 1
        ratios = [_lr_factor(self._options, *param.shape[-2:]) for param in params]
        numbers, blocks = (
            torch.tensor(values, device="cpu")
            for values in (range(len(spans)), [span // self._block for span in spans])
        )
        on_device = segments[0].on_device
        self._param_of_block = on_device(numbers.repeat_interleave(blocks))
        self._flag_index = on_device(torch.tensor(flag_index, device="cpu"))
        self._no_flag = torch.zeros(1, device=self._device)
        self._ratios = on_device(torch.tensor(ratios, dtype=torch.float64, device="cpu"))

    def run(self, updates: Sequence[Update]) -> None:
        """Updates all segments.

        Streams: the current stream of the device; it waits for the exchanges.
        Capture: safe once the process group has been used; nothing is read back.

        Raises:
            CollectiveError: an exchange failed; the momentum has changed, the parameters of this
                bucket have not.
        """
        live = self._live(updates)
        counts = [len(segment.params) for segment in self.segments]
        steps = [segment.steps for segment in self.segments]
        torch._foreach_add_(steps, list(live.float().split(counts)))
        live_blocks = self._per_block(live)
        direction = self._step_momentum(updates, live_blocks)
        exchange = self._exchange
        parts = _views(direction, self._parts)
        send = torch.empty(sum(exchange.sent), dtype=self._dtype, device=self._device)
        sent_parts = _with_elements(exchange.send_slices)
        _copy(_views(send, sent_parts), parts)
        received = self._all_to_all(send, exchange.sent, exchange.received)
        self._orthogonalise(received, updates[0].hyper[EPS])
        send = self._all_to_all(received, exchange.received, exchange.sent)
        _copy(parts, _views(send, sent_parts))
        self._step_weights(updates, live_blocks, direction)

    # -- arithmetic

    def _live(self, updates: Sequence[Update]) -> torch.Tensor:
        """Returns which parameters change: bool, one for each."""
        flags = torch.cat([self._no_flag, *(update.launch.touched for update in updates)])
        live = flags.index_select(0, self._flag_index) > 0
        skip = updates[0].skip
        return live if skip is None else live & ~(skip > 0)

    def _per_block(self, per_param: torch.Tensor) -> torch.Tensor:
        return per_param.index_select(0, self._param_of_block).unsqueeze(1)

    def _blocks(self, name: str) -> torch.Tensor:
        """Returns a copy of all segments' states of this name."""
        states = [segment.state[name] for segment in self.segments]
        return torch.cat(states).view(-1, self._block)

    def _keep(self, name: str, blocks: torch.Tensor) -> None:
        states = [segment.state[name] for segment in self.segments]
        _copy(states, blocks.view(-1).split(self._numels))

    def _gathered(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns pieces of parameters in a buffer that has the form of a state."""
        flat = torch.zeros(sum(self._numels), dtype=self._compute, device=self._device)
        _copy(_views(flat, self._pieces), pieces)
        return flat

    def _step_momentum(self, updates: Sequence[Update], live_blocks: torch.Tensor) -> torch.Tensor:
        """Advances the momentum, and returns the direction."""
        first = updates[0]
        flat = self._gathered(
            [
                update.launch.grad.narrow(0, row.grad_offset, row.numel)
                for update, rows in zip(updates, self._held, strict=True)
                for row in rows
            ]
        )
        direction = flat.view(-1, self._block)
        if first.scale is not None:
            direction.mul_(first.scale.to(self._compute))
        momentum = first.hyper[MOMENTUM]
        buffer = self._blocks("momentum_buffer")
        fresh = (1 - momentum).to(self._compute)
        moved = torch.lerp(buffer.to(self._compute), direction, fresh).to(buffer.dtype)
        buffer = torch.where(live_blocks, moved, buffer)
        self._keep("momentum_buffer", buffer)
        if self._options["nesterov"]:
            direction.lerp_(buffer.to(self._compute), momentum.to(self._compute))
        else:
            direction.copy_(buffer)
        return flat

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

    def _step_weights(
        self, updates: Sequence[Update], live_blocks: torch.Tensor, direction: torch.Tensor
    ) -> None:
        """Applies weight decay and the orthogonalised direction."""
        params = [
            update.launch.param.narrow(0, row.param_offset, row.numel)
            for update, rows in zip(updates, self._held, strict=True)
            for row in rows
        ]
        hyper = updates[0].hyper
        flat = self._gathered(params)
        weight = exact = flat.view(-1, self._block)
        has_master = "master" in self.segments[0].state
        if has_master:
            # The last write of the weight counts, as in [Note: Exact weights] of ops/weights.py.
            master = self._blocks("master")
            exact = torch.where(master.to(self.segments[0].dtype) == weight, master, weight)
        decay = (1 - hyper[LR] * hyper[WEIGHT_DECAY]).to(self._compute)
        rate = self._per_block(hyper[LR] * self._ratios).to(self._compute)
        moved = (exact * decay).addcmul_(direction.view_as(exact), rate, value=-1)
        if has_master:
            self._keep("master", torch.where(live_blocks, moved, master))
        torch.where(live_blocks, moved, weight, out=weight)
        _copy(params, _views(flat, self._pieces))

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


def _with_elements(spans: Iterable[_Span]) -> list[_Span]:
    return [(begin, numel) for begin, numel in spans if numel]


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
