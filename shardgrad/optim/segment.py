"""What one launch of an optimizer's kernel updates.

[Note: Segments]
The parameters of one group that one entry of `param_groups` updates are a *segment*: they lie in one flat
shard, their gradients in another, their moments in flat buffers of the segment's own, and a table in device
memory says which ranges belong together. A launch takes the flat buffers and the table, whatever the number
of parameters. Nothing is looked up through `param.grad`: the engine knows where gradients lie.

A parameter that no unit shards (left out on purpose, or a model without any unit) is a segment by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgrad import ops
from shardgrad.engine.grad_shard import GradShard
from shardgrad.engine.param import FSDPParam, is_replaced
from shardgrad.engine.param_group import ParamGroup, group_of
from shardgrad.errors import GradientError, OptimizerParameterError
from shardgrad.optim.selection import gradients_of, plain_gradient
from shardgrad.sharding.dtensor import dtensor_like, in_own_storage

__all__ = ["Launch", "PlainSegment", "Segment", "ShardedSegment"]

# What identifies a tensor's storage. A DTensor's holds no data, but it is replaced along with it.
_storage_of: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]
_LOCAL = attrgetter("_local_tensor")


class Snapshot:
    """What a program sees of some parameters, to be compared with later; a comparison is one pass in C.

    Args:
        params: sharded parameters.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = list(params)
        self._locals = list(map(_LOCAL, self._params))
        self._storages = list(map(_storage_of, self._params))

    @property
    def still_holds(self) -> bool:
        """False if a local tensor or a storage was replaced; torch lets `param.data = x` pass in silence."""
        return (
            all(map(is_, map(_LOCAL, self._params), self._locals))
            and list(map(_storage_of, self._params)) == self._storages
        )


@dataclass(frozen=True)
class Launch:
    """The tensors of one launch that are not the optimizer's own.

    Attributes:
        param: 1-D, this rank's part of the parameters.
        grad: 1-D, read in its own dtype.
        touched: flags, one for each row's `flag_index`; the parameter is updated if its flag is above zero.
        rows: int64 table on the device; see `ops.segment_rows`.
        tiles: as `ops.segment_rows` counted them.
        owed: device scalar that gradients are still to be multiplied by, or None.
        nonfinite: device scalar, above zero if somebody found the gradients not finite, or None.
    """

    param: torch.Tensor
    grad: torch.Tensor
    touched: torch.Tensor
    rows: torch.Tensor
    tiles: int
    owed: torch.Tensor | None
    nonfinite: torch.Tensor | None


class Segment(ABC):
    """Parameters that are updated by one launch, and their state.

    Attributes:
        params: the optimizer's own objects, in the order of their state.
        names: of the parameters, for messages.
        device: where everything lies.
        dtype: of the parameters.
        numel: elements of each flat state buffer.
        rank: which of the shards this is.
        number: the optimizer's count of its segments.
        steps: float32, updates per parameter; None before `allocate`.
        ticket: int32 scratch of the kernels; None before `allocate`.
        state: flat buffers by name, each `numel` elements; empty before `allocate`.
    """

    params: list[nn.Parameter]
    names: list[str]
    device: torch.device
    dtype: torch.dtype
    numel: int
    rank = 0

    def __init__(self) -> None:
        self.number = 0
        self.steps: torch.Tensor
        self.ticket: torch.Tensor
        self.state: dict[str, torch.Tensor] = {}
        self.is_allocated = False

    @property
    @abstractmethod
    def has_data(self) -> bool:
        """False while parameters are on the meta device."""

    @property
    def state_device(self) -> torch.device | None:
        """Where the state is; None before `allocate`."""
        return self.steps.device if self.is_allocated else None

    def facts(self) -> Hashable:
        """Returns what decides the launch besides addresses that never change. Called at every replay."""
        return self.is_allocated

    @abstractmethod
    def settle(self) -> Launch | None:
        """Makes the device's picture agree with what the program has bound, and describes the launch.

        Returns:
            None if no parameter has a gradient.

        Raises:
            OptimizerParameterError: a parameter was replaced.
            ForeignParameterError, GradientError: a gradient that cannot be used.
        """

    @abstractmethod
    def flat_param(self) -> torch.Tensor:
        """Returns the parameters as the kernel sees them, 1-D."""

    @abstractmethod
    def local_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Cuts a state buffer into the local tensor of each parameter, in order."""

    @abstractmethod
    def face(self, index: int, local: torch.Tensor) -> torch.Tensor:
        """Returns a parameter's piece of state as a program sees it: a DTensor like the parameter's."""

    @abstractmethod
    def forget_gradients(self, *, set_to_none: bool) -> None:
        """Does `zero_grad` for the segment's parameters."""

    def seed(self, base: int) -> int:
        """Returns the seed of stochastic rounding: another for every segment and shard, one for replicas."""
        return base + (self.number << 40) + (self.rank << 16)

    def allocate(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Makes zeroed state buffers, for good."""
        self.steps = torch.zeros(len(self.params), dtype=torch.float32, device=self.device)
        self.ticket = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.state = {
            name: torch.zeros(self.numel, dtype=dtype, device=self.device) for name, dtype in dtypes.items()
        }
        self.is_allocated = True


class ShardedSegment(Segment):
    """Parameters of one group that `fully_shard` made.

    Args:
        group: the group.
        members: those of its parameters that are updated, in the group's order.
    """

    def __init__(self, group: ParamGroup, members: Sequence[FSDPParam]) -> None:
        super().__init__()
        self._group = group
        self._members = list(members)
        self.params = [managed.sharded for managed in members]
        self._place = {id(managed): i for i, managed in enumerate(group.params)}
        self._offsets = []
        offset = 0
        for managed in members:
            self._offsets.append(offset)
            offset += group.layout.pieces[self._place[id(managed)]].span
        self.numel = offset
        self.rank = group.mesh.shard_rank
        self._shard: GradShard | None = None
        self._generation = group.generation
        self._snapshot = Snapshot(self.params)
        self._places: list[int] = []
        self._rows: torch.Tensor
        self._tiles = 0

    @property
    def names(self) -> list[str]:  # type: ignore[override]
        """Fully qualified once a forward has run."""
        return [managed.name for managed in self._members]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the group's shards live, also while the parameters are on the meta device."""
        return self._group.shard_memory.device

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Of the group's shard."""
        return self._group.dtype

    @property
    def has_data(self) -> bool:
        """See `Segment.has_data`."""
        return self._group.shard.device.type != "meta"

    def flat_param(self) -> torch.Tensor:
        """See `Segment.flat_param`."""
        return self._group.shard

    def settle(self) -> Launch | None:
        """See `Segment.settle`."""
        self._require_same_params()
        shard = gradients_of(self._group, self.params)
        if shard is None:
            return None
        if shard is not self._shard:
            self._tabulate(shard)
        if not any(shard.settle(self._places)):
            return None
        return Launch(
            self._group.shard, shard.flat, shard.flags, self._rows, self._tiles, shard.owed, shard.nonfinite
        )

    def _require_same_params(self) -> None:
        """Refuses parameters that the program replaced, or whose data it replaced."""
        if self._generation != self._group.generation:
            for param, managed in zip(self.params, self._members, strict=True):
                if managed.sharded is not param:
                    raise OptimizerParameterError(
                        f"parameter {managed.name} was replaced after the optimizer was built",
                        expected="the parameter the optimizer was given",
                        got="another one in its place: load_state_dict(assign=True), or model.to(dtype)",
                        where=f"unit {self._group.name}",
                        fix="build the optimizer after the last change of this kind",
                    )
            self._snapshot = Snapshot(self.params)
            self._generation = self._group.generation
        if self._snapshot.still_holds:
            return
        if any(group_of(managed) is not self._group for managed in self._members):
            raise OptimizerParameterError(
                f"{', '.join(self.names)} shared a flat shard with parameters that have left it since the "
                "optimizer was built",
                expected="the shard that the optimizer was built over",
                got="one that got fsdp_pre_all_gather, or that fully_shard gave to an outer unit",
                where=f"unit {group_of(self._members[0]).name}",
                fix="build the optimizer after that, with torch.optim for what has fsdp_pre_all_gather",
            )
        raise OptimizerParameterError(
            f"the data of a parameter among {', '.join(self.names)} was replaced",
            expected="the piece of the shard that the engine gathers from",
            got="a tensor of its own, which the next forward would not see",
            where=f"unit {self._group.name}",
            fix="change parameters in place: param.copy_(new) under torch.no_grad()",
        )

    def _tabulate(self, shard: GradShard) -> None:
        """Builds the table for this gradient shard. A frozen parameter has no gradient and no row."""
        pieces, places = [], []
        for i, (managed, offset) in enumerate(zip(self._members, self._offsets, strict=True)):
            place = shard.place_of(managed.sharded)
            if place is None:
                continue
            piece = self._group.layout.pieces[self._place[id(managed)]]
            numel = piece.local_numel(self._group.mesh.shard_rank)
            gradient = shard.piece(place).shard_offset
            pieces.append((piece.shard_offset, gradient, offset, numel, i, place))
            places.append(place)
        rows, self._tiles = ops.segment_rows(pieces)
        ops.check_rows(
            rows,
            self._tiles,
            param_numel=self._group.shard.numel(),
            grad_numel=shard.values.numel(),
            state_numel=self.numel,
            steps_numel=len(self.params),
            touched_numel=shard.flags.numel(),
        )
        self._rows = rows.to(self.device)
        self._shard, self._places = shard, places

    def local_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """See `Segment.local_views`."""
        rank = self._group.mesh.shard_rank
        views = []
        for managed, offset in zip(self._members, self._offsets, strict=True):
            piece = self._group.layout.pieces[self._place[id(managed)]]
            views.append(flat.narrow(0, offset, piece.local_numel(rank)).view(piece.local_shape(rank)))
        return views

    def face(self, index: int, local: torch.Tensor) -> torch.Tensor:
        """See `Segment.face`."""
        return dtensor_like(in_own_storage(local), cast(DTensor, self.params[index]))

    def forget_gradients(self, *, set_to_none: bool) -> None:
        """See `Segment.forget_gradients`."""
        if set_to_none:
            attribute = self._group.gradient_policy.attribute
            for param in self.params:
                setattr(param, attribute, None)
            return
        shard = gradients_of(self._group, self.params)
        if shard is not None:
            shard.zero([place for param in self.params if (place := shard.place_of(param)) is not None])


class PlainSegment(Segment):
    """One parameter that no unit shards: an ordinary tensor, or another library's DTensor.

    Args:
        param: the parameter.
        name: for messages.
    """

    def __init__(self, param: nn.Parameter, name: str) -> None:
        super().__init__()
        self.params = [param]
        self.names = [name]
        local = _local(param)
        if not _is_dense(local):
            raise OptimizerParameterError(
                f"parameter {name} has gaps or overlaps in memory",
                expected="a dense tensor",
                got=f"shape {tuple(local.shape)} with strides {local.stride()}",
                fix="param.data = param.data.contiguous()",
            )
        self.dtype = param.dtype
        self.numel = local.numel()
        self._form = _form_of(local)
        rows, self._tiles = ops.segment_rows([(0, 0, 0, self.numel, 0, 0)])
        self._table = rows
        self._rows: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Of the parameter, which may have been on the meta device when the optimizer was built."""
        return _local(self.params[0]).device

    def facts(self) -> Hashable:
        """See `Segment.facts`."""
        return self.is_allocated, self.device.type

    @property
    def has_data(self) -> bool:
        """See `Segment.has_data`."""
        return _local(self.params[0]).device.type != "meta"

    def flat_param(self) -> torch.Tensor:
        """See `Segment.flat_param`."""
        return _in_memory_order(_local(self.params[0]).detach())

    def settle(self) -> Launch | None:
        """See `Segment.settle`."""
        param = self.params[0]
        self._require_in_use()
        grad = plain_gradient(param)
        if grad is None:
            return None
        local, grad = _local(param).detach(), _local(grad).detach()
        self._check(local, grad)
        if grad.stride() != local.stride():
            # Memory orders differ: only then is a gradient copied.
            grad = torch.empty_like(local, dtype=grad.dtype).copy_(grad)
        if self._rows is None:
            self._rows = self._table.to(local.device)
            self._touched = torch.ones(1, dtype=torch.float32, device=local.device)
        return Launch(
            _in_memory_order(local),
            _in_memory_order(grad),
            self._touched,
            self._rows,
            self._tiles,
            None,
            None,
        )

    def _require_in_use(self) -> None:
        """Refuses a parameter that nothing computes with any more: its optimizer would train nothing."""
        param, got = self.params[0], ""
        if is_replaced(param):
            got = "the parameter from before fully_shard, which has put a sharded one in its place"
        elif not self.has_data:
            got = "one on the meta device, which model.to_empty() has replaced by another"
        if got:
            raise OptimizerParameterError(
                f"parameter {self.names[0]} is not part of the model any more",
                expected="a parameter that the model computes with",
                got=got,
                fix="build the optimizer after fully_shard and after to_empty",
            )

    def _check(self, local: torch.Tensor, grad: torch.Tensor) -> None:
        # Moments lie in the memory order that the parameter had, on its device.
        device = self.state_device or local.device
        if _form_of(local) != self._form or local.device != device:
            shape, strides, dtype = self._form
            raise OptimizerParameterError(
                f"the data of parameter {self.names[0]} was replaced by something else",
                expected=f"{dtype} of shape {shape} with strides {strides} on {device}",
                got=f"{local.dtype} of shape {tuple(local.shape)} with strides {local.stride()} on "
                f"{local.device}",
                fix="build the optimizer after the last change of this kind",
            )
        if grad.layout is not torch.strided or grad.shape != local.shape:
            raise GradientError(
                f"the gradient of parameter {self.names[0]} cannot be used",
                expected=f"a dense tensor of shape {tuple(local.shape)}",
                got=f"layout {grad.layout}, shape {tuple(grad.shape)}",
                fix="sparse=False in the embedding, or torch.optim.SparseAdam for it",
            )

    def local_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """See `Segment.local_views`."""
        local = _local(self.params[0])
        return [flat.as_strided(local.shape, local.stride())]

    def face(self, index: int, local: torch.Tensor) -> torch.Tensor:
        """See `Segment.face`."""
        param = self.params[0]
        return dtensor_like(local, param) if isinstance(param, DTensor) else local

    def forget_gradients(self, *, set_to_none: bool) -> None:
        """See `Segment.forget_gradients`."""
        param = self.params[0]
        for attribute in ("grad", "decoupled_grad"):
            grad = getattr(param, attribute, None)
            if grad is not None and set_to_none:
                setattr(param, attribute, None)
            elif grad is not None:
                grad.detach().zero_()


def _form_of(local: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Returns shape, strides and dtype; a dimension of one element has any stride, so it counts as none."""
    strides = zip(local.shape, local.stride(), strict=True)
    return tuple(local.shape), tuple(stride if size > 1 else 0 for size, stride in strides), local.dtype


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
