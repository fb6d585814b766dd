"""Segments: the parameters that one launch of an optimizer's kernel updates.

[Note: Segments]
A *segment* is the parameters that one entry of `param_groups` has in one parameter group of the
engine. They lie in one flat shard, their gradients in another, and their moments in flat buffers of
the segment. A table in device memory maps the ranges of one to those of the others. A launch gets
the flat buffers and the table, whatever the number of parameters. It does not read `param.grad`,
since the engine knows where the gradients are.

A parameter that no unit shards is a segment of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import is_
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgrad.engine.grad_shard import GradShard
from shardgrad.engine.param_group import FSDPParam, ParamGroup, is_claimed
from shardgrad.engine.streams import is_capturing
from shardgrad.errors import CaptureError, GradientError, OptimizerParameterError
from shardgrad.ops.segments import Row, segment_rows
from shardgrad.optim.host_states import host_zeros
from shardgrad.optim.hyper import OptimGroup
from shardgrad.optim.selection import gradients_of, plain_gradient
from shardgrad.optim.state import local_tensor
from shardgrad.sharding.dtensor import dtensor_like, in_own_storage, local_of, storages_of
from shardgrad.sharding.layout import Piece


class Launch(NamedTuple):
    """The tensors of one launch that are not the optimizer's own.

    Attributes:
        param: 1-D, this rank's part of the parameters.
        grad: 1-D gradients, in any dtype of gradients.
        touched: the live flags, indexed by `flag_index` of a row. A parameter is updated if its
            flag is above zero.
        rows: int64 table on the device; see `segment_rows`.
        tiles: the number of tiles that `segment_rows` returned.
        places: the rows of the table on the host.
        verdicts: device scalars, each above zero if some of these gradients are not finite; none if
            they were not checked.
    """

    param: torch.Tensor
    grad: torch.Tensor
    touched: torch.Tensor
    rows: torch.Tensor
    tiles: int
    places: Sequence[Row]
    verdicts: Sequence[torch.Tensor]


class _Segment(ABC):
    """Parameters that are updated by one launch, and their state.

    Args:
        params: the parameters that the optimizer was given, in the order of their state.
        numel: number of elements of each flat state buffer.
        rank: this rank in the shard group.

    Attributes:
        params: as given.
        numel: as given.
        rank: as given.
        number: the index of the segment among all that the optimizer has made.
        options: the entry of `param_groups` that it belongs to.
        state: flat buffers by name, each of `numel` elements; none before they are allocated.
        is_allocated: True once the state exists. The next two attributes are set then.
        steps: the number of updates of each parameter, float32.
        ticket: int32 scratch memory of the kernels.
    """

    steps: torch.Tensor
    ticket: torch.Tensor

    def __init__(self, params: Sequence[nn.Parameter], numel: int, *, rank: int = 0) -> None:
        self.params = list(params)
        self.numel = numel
        self.rank = rank
        self.number = 0
        self.options: OptimGroup
        self.state: dict[str, torch.Tensor] = {}
        self.is_allocated = False

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Names of the parameters, for messages."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of parameters and gradients, where updates run."""

    def on_device(self, rows: torch.Tensor) -> torch.Tensor:
        """Copies the table of a launch to the device, which the first step does.

        Raises:
            CaptureError: a graph is being captured; its replays would copy host memory that is
                gone.
        """
        if is_capturing(self.device):
            raise CaptureError(
                "the first step of an optimizer runs in a capture",
                expected="an earlier eager step, which creates tables and state",
                got="parameters that no step has updated yet, or gradients at new addresses",
                where=f"parameters {', '.join(self.names)}",
                fix="pass the step a boolean that says whether it updates, since each value runs "
                "eagerly once; or use a larger warmup=",
            )
        return rows.to(self.device)

    def seed(self, base: int) -> int:
        """Returns the seed of stochastic rounding. It differs between segments and shards, and is
        the same on all replicas of a shard.
        """
        return base + (self.number << 40) + (self.rank << 16)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocates a zeroed state buffer."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def allocate(self, dtypes: Mapping[str, torch.dtype], *, on_host: bool) -> None:
        """Allocates zeroed state buffers, whose addresses never change."""
        zeros = partial(host_zeros, device=self.device) if on_host else self.zeros
        self.steps = torch.zeros(len(self.params), dtype=torch.float32, device=self.device)
        self.ticket = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.state = {name: zeros(self.numel, dtype) for name, dtype in dtypes.items()}
        self.is_allocated = True


@dataclass(frozen=True)
class _Table:
    """The table of a launch for one gradient shard.

    Attributes:
        shard: the gradient shard.
        rows, tiles, places: see `Launch`; without frozen parameters.
    """

    shard: GradShard
    rows: torch.Tensor
    tiles: int
    places: Sequence[Row]


class ShardedSegment(_Segment):
    """Parameters of one group that `fully_shard` made.

    Args:
        group: the group.
        members: the parameters of the group that the optimizer updates.

    Attributes:
        table: of the latest launch. A later launch may use another one.
    """

    def __init__(self, group: ParamGroup, members: Iterable[FSDPParam]) -> None:
        self._group = group
        chosen = set(members)
        self._places = [i for i, managed in enumerate(group.params) if managed in chosen]
        self._members = [group.params[i] for i in self._places]
        spans = [piece.span for piece in self._pieces()]
        self._offsets = [0, *accumulate(spans)][: len(spans)]
        super().__init__(
            [managed.sharded for managed in self._members], sum(spans), rank=group.mesh.shard_rank
        )
        self._generation = group.generation
        self._memory = self._memory_now()
        self.table: _Table | None = None

    def _pieces(self) -> list[Piece]:
        return [self._group.layout.pieces[i] for i in self._places]

    @property
    def names(self) -> list[str]:
        """Fully qualified once a forward has run."""
        return [managed.name for managed in self._members]

    @property
    def device(self) -> torch.device:
        """The device of the group's shards, even while the parameters are on the meta device."""
        return self._group.shard_memory.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the group's shard."""
        return self._group.dtype

    @property
    def has_data(self) -> bool:
        """False while parameters are on the meta device."""
        return self._group.shard.device.type != "meta"

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `_Segment.zeros`. Uses virtual memory if the parameters do, for `shardgrad.sleep`."""
        memory = self._group.shard_memory
        return memory.zeros(numel, dtype) if memory.is_virtual else super().zeros(numel, dtype)

    def settle(self) -> Launch | None:
        """Updates the live flags on the device to the gradients that are bound, and returns the
        launch.

        Returns:
            None if no parameter has a gradient.

        Raises:
            OptimizerParameterError: a parameter was replaced.
            ForeignParameterError, GradientError: a gradient that cannot be used.
        """
        self._require_same_params()
        shard = gradients_of(self._group, self.params)
        if shard is None:
            return None
        table = self.table
        if table is None or table.shard is not shard:
            table = self.table = self._table_for(shard)
        live = shard.settle()
        if not any(live[row.flag_index] for row in table.places):
            return None
        return Launch(
            self._group.shard,
            shard.flat,
            shard.flags,
            table.rows,
            table.tiles,
            table.places,
            shard.verdicts(self.params),
        )

    def _memory_now(self) -> list[torch.UntypedStorage]:
        """Returns the storages of the local tensors, and the DTensors' own. `param.data = x`
        replaces them; a `model.to(...)` that changes nothing does not.
        """
        return storages_of([*map(local_of, self.params), *self.params])

    def _require_same_params(self) -> None:
        """Refuses parameters that the program replaced, or whose data it replaced."""
        if self._generation != self._group.generation:
            for param, managed in zip(self.params, self._members, strict=True):
                if managed.sharded is not param:
                    raise OptimizerParameterError(
                        f"parameter {managed.name} was replaced after the optimizer was built",
                        expected="the parameter the optimizer was given",
                        got="another parameter, from load_state_dict(assign=True) or "
                        "model.to(dtype)",
                        where=self._group.where,
                        fix="build the optimizer after the last such change",
                    )
            self._memory = self._memory_now()
            self._generation = self._group.generation
        if all(map(is_, self._memory_now(), self._memory)):
            return
        if any(managed.group is not self._group for managed in self._members):
            raise OptimizerParameterError(
                f"{', '.join(self.names)} shared a flat shard with parameters that have left it "
                "since the optimizer was built",
                expected="the shard that the optimizer was built over",
                got="parameters that moved to an outer unit",
                where=f"unit {self._members[0].group.name}",
                fix="build the optimizer after the last fully_shard call",
            )
        raise OptimizerParameterError(
            f"the data of one of the parameters {', '.join(self.names)} was replaced",
            expected="a view of the shard that the engine gathers",
            got="another tensor, which the next forward would not use",
            where=self._group.where,
            fix="change parameters in place: param.copy_(new) under torch.no_grad()",
        )

    def _table_for(self, shard: GradShard) -> _Table:
        """Builds the table for a gradient shard. A frozen parameter has no gradient and no row."""
        pieces = []
        for i, (piece, offset) in enumerate(zip(self._pieces(), self._offsets, strict=True)):
            place = shard.place_of(self._members[i].sharded)
            if place is None:
                continue
            numel = piece.local_numel(self.rank)
            gradient = shard.layout.pieces[place].shard_offset
            pieces.append((piece.shard_offset, gradient, offset, numel, i, place))
        rows, tiles = segment_rows(pieces)
        return _Table(shard, self.on_device(rows), tiles, _on_host(rows))

    def local_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Cuts a state buffer into the local tensor of each parameter, in order."""
        return [
            flat.narrow(0, offset, piece.local_numel(self.rank)).view(piece.local_shape(self.rank))
            for piece, offset in zip(self._pieces(), self._offsets, strict=True)
        ]

    def face(self, index: int, local: torch.Tensor) -> torch.Tensor:
        """Returns a parameter's piece of state for the public `state`: a DTensor sharded like the
        parameter.
        """
        return dtensor_like(in_own_storage(local), cast(DTensor, self.params[index]))

    def forget_gradients(self, *, set_to_none: bool) -> None:
        """Does `zero_grad` for the segment's parameters."""
        if set_to_none:
            attribute = self._group.gradient_policy.attribute
            for param in self.params:
                setattr(param, attribute, None)
            return
        shard = gradients_of(self._group, self.params)
        if shard is not None:
            shard.zero(
                [place for param in self.params if (place := shard.place_of(param)) is not None]
            )


class PlainSegment(_Segment):
    """One parameter that no unit shards: an ordinary tensor, or another library's DTensor.

    Args:
        param: the parameter.
        name: for messages.
    """

    def __init__(self, param: nn.Parameter, name: str) -> None:
        local = local_tensor(param)
        if not _is_dense(local):
            raise OptimizerParameterError(
                f"parameter {name} has gaps or overlaps in memory",
                expected="a dense tensor",
                got=f"shape {tuple(local.shape)} with strides {local.stride()}",
                fix="param.data = param.data.contiguous()",
            )
        super().__init__([param], local.numel())
        self._names = [name]
        self.dtype = param.dtype
        self._form = _form_of(local)
        self._host_rows, self._tiles = segment_rows([(0, 0, 0, self.numel, 0, 0)])
        self._places = _on_host(self._host_rows)
        self._rows_and_flag: tuple[torch.Tensor, torch.Tensor] | None = None  # on the device

    @property
    def names(self) -> list[str]:
        """See `_Segment.names`."""
        return self._names

    @property
    def device(self) -> torch.device:
        """Of the parameter, which may have been on the meta device when the optimizer was built."""
        return local_tensor(self.params[0]).device

    @property
    def has_data(self) -> bool:
        """See `ShardedSegment.has_data`."""
        return local_tensor(self.params[0]).device.type != "meta"

    def settle(self) -> Launch | None:
        """See `ShardedSegment.settle`."""
        param = self.params[0]
        self._require_in_use()
        grad = plain_gradient(param)
        if grad is None:
            return None
        local, grad = local_tensor(param).detach(), local_tensor(grad).detach()
        self._check(local, grad)
        if grad.stride() != local.stride():
            # The kernel needs one memory order: copy the gradient only if its order differs.
            grad = torch.empty_like(local, dtype=grad.dtype).copy_(grad)
        if self._rows_and_flag is None:
            rows = self.on_device(self._host_rows)
            self._rows_and_flag = rows, torch.ones(1, dtype=torch.float32, device=local.device)
        rows, flag = self._rows_and_flag
        return Launch(
            _in_memory_order(local),
            _in_memory_order(grad),
            flag,
            rows,
            self._tiles,
            self._places,
            (),
        )

    def _require_in_use(self) -> None:
        """Refuses a parameter that is no longer part of the model: it would not be trained."""
        param, got = self.params[0], ""
        if is_claimed(param):
            got = "the parameter from before fully_shard, which has replaced it"
        elif not self.has_data:
            got = "a parameter on the meta device, which model.to_empty() has replaced"
        if got:
            raise OptimizerParameterError(
                f"parameter {self.names[0]} is no longer part of the model",
                expected="a parameter that the model uses",
                got=got,
                fix="build the optimizer after fully_shard and after to_empty",
            )

    def _check(self, local: torch.Tensor, grad: torch.Tensor) -> None:
        # The state has the memory order and device that the parameter had when it was allocated.
        device = self.steps.device if self.is_allocated else local.device
        if _form_of(local) != self._form or local.device != device:
            shape, strides, dtype = self._form
            raise OptimizerParameterError(
                f"the data of parameter {self.names[0]} was replaced by a different tensor",
                expected=f"{dtype} of shape {shape} with strides {strides} on {device}",
                got=f"{local.dtype} of shape {tuple(local.shape)} with strides {local.stride()} on "
                f"{local.device}",
                fix="build the optimizer after the last such change",
            )
        if grad.layout is not torch.strided or grad.shape != local.shape:
            raise GradientError(
                f"the gradient of parameter {self.names[0]} cannot be used",
                expected=f"a dense tensor of shape {tuple(local.shape)}",
                got=f"layout {grad.layout}, shape {tuple(grad.shape)}",
                fix="sparse=False in the embedding, or torch.optim.SparseAdam for this parameter",
            )

    def local_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """See `ShardedSegment.local_views`."""
        local = local_tensor(self.params[0])
        return [flat.as_strided(local.shape, local.stride())]

    def face(self, index: int, local: torch.Tensor) -> torch.Tensor:
        """See `ShardedSegment.face`."""
        param = self.params[0]
        return dtensor_like(local, param) if isinstance(param, DTensor) else local

    def forget_gradients(self, *, set_to_none: bool) -> None:
        """See `ShardedSegment.forget_gradients`."""
        param = self.params[0]
        for attribute in ("grad", "decoupled_grad"):
            grad = getattr(param, attribute, None)
            if grad is not None and set_to_none:
                setattr(param, attribute, None)
            elif grad is not None:
                grad.detach().zero_()


Segment = ShardedSegment | PlainSegment


def _on_host(rows: torch.Tensor) -> list[Row]:
    return [Row(*values) for values in rows.tolist()]


def _form_of(local: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Returns shape, strides and dtype. Dimensions of size 1 have an arbitrary stride, returned as
    0.
    """
    strides = zip(local.shape, local.stride(), strict=True)
    return (
        tuple(local.shape),
        tuple(stride if size > 1 else 0 for size, stride in strides),
        local.dtype,
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a dense tensor's memory as one dimension, without copying."""
    return tensor.as_strided((tensor.numel(),), (1,))
