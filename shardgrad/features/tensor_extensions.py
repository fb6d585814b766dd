"""Parameters that say themselves what travels: `fsdp_pre_all_gather` and `fsdp_post_all_gather`.

A tensor subclass with these two methods decides what its shard sends (a narrower dtype, quantized data and
their scales) and how the unsharded parameter is made from what everybody sent. Such parameters form groups of
their own, because their shards are whatever the subclass keeps, and not pieces of a flat one:

    sharded subclass --pre--> inputs --copy--> bytes --all-gather--> outputs --post--> unsharded tensor

The first `post` makes the unsharded tensor; later ones are given it as `out` and fill it again. Outputs, and
what `post` says it has allocated, lose their storage on resharding and get it back before the next `post`, so
that the unsharded tensor stays one object. Gradients are ordinary tensors and are reduced like any others.

Source: the protocol is torch's, see `FSDPParam` in torch/distributed/fsdp/_fully_shard/_fsdp_param.py.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardgrad.engine.all_gather import Source
from shardgrad.engine.all_gather_input import Departure
from shardgrad.engine.buffers import RecurringBuffer
from shardgrad.engine.comm_context import Runtime
from shardgrad.engine.message_tag import LABEL_NUMEL
from shardgrad.engine.param import ManagedParam, is_extension, local_of, mark_sharded, mark_whole
from shardgrad.engine.param_group import ParamGroup
from shardgrad.errors import ExtensionError, unsupported
from shardgrad.sharding.layout import ALIGNMENT_NBYTES, ShardLayout
from shardgrad.sharding.offload import Home

__all__ = ["ExtensionGroup", "apart", "newly_extended", "require_extension"]

# Of a chunk of bytes. int8 and not uint8: an exchange marks labels that have not arrived with -1.
_BYTE = torch.int8


def require_extension(param: torch.Tensor, name: str, reshard_after_forward: Any, home: Home) -> None:
    """Refuses an extension that is not complete, or asked for what the protocol does not have.

    Raises:
        ExtensionError: one of the two methods is missing.
        UnsupportedError: an int reshard, as what to gather from between forward and backward is not defined;
            or a home away from the mesh's device, where the subclass would have to compute what it sends.
    """
    local = local_of(param) if isinstance(param, DTensor) else param
    if not (hasattr(local, "fsdp_pre_all_gather") and hasattr(local, "fsdp_post_all_gather")):
        raise ExtensionError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined "
            "if using all-gather extensions",
            expected="both methods, or none",
            got=type(local).__name__,
            where=f"parameter {name}",
        )
    if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        raise unsupported(
            f"reshard_after_forward as an int for {name}, which has fsdp_pre_all_gather",
            instead="reshard_after_forward=True or False",
        )
    if home.is_away:
        raise unsupported(
            f"CPUOffloadPolicy for {name}, which has fsdp_pre_all_gather",
            instead="a unit of its own without offload_policy",
        )


def newly_extended(group: ParamGroup) -> list[ManagedParam]:
    """Returns the parameters of a flat group that have become extensions since `fully_shard`.

    A program may have put the two methods on a local tensor, or loaded one that has them. None of a group
    that is in use: `engine/replaced_params.py` refuses those.

    Raises:
        ExtensionError, UnsupportedError: as `fully_shard` does.
    """
    if not group.is_flat or group.is_in_use:
        return []
    faces = {p: face for p in group.params for face in p.registered() if is_extension(face)}
    reshard = True if group.post_forward_mesh is None else group.post_forward_mesh.shard_size
    for p, face in faces.items():
        require_extension(face, p.name, reshard, group.home)
        if group.mesh.levels is not None:
            raise unsupported(
                f'zero_stage="hfsdp" for {p.name}, which has fsdp_pre_all_gather,', instead="zero_stage=3"
            )
    return list(faces)


def apart(group: ParamGroup, leaving: Collection[ManagedParam]) -> list[ParamGroup]:
    """Returns a group without some of its parameters, if any are left, and an extension group of those."""
    if not leaving:
        return [group]
    staying = group.without(leaving)
    extended = ExtensionGroup.out_of(group, list(leaving))
    return [extended] if staying is None else [staying, extended]


@dataclass
class _Input:
    """One tensor that a shard sends; the same on every rank but for its values.

    Attributes:
        offset: first byte in a chunk.
        nbytes: of this rank's, which is everybody's.
        shape: of this rank's.
        output: where those of all ranks are brought together, in rank order along dim 0.
    """

    offset: int
    nbytes: int
    shape: torch.Size
    output: RecurringBuffer

    @property
    def gathered(self) -> torch.Tensor:
        """The tensor that `fsdp_post_all_gather` is given."""
        return self.output.tensor.view(-1, *self.shape[1:])


class _Recurring:
    """Everything an unsharded group allocates, to be freed and brought back as one."""

    def __init__(self) -> None:
        self.buffers: list[RecurringBuffer] = []

    def allocate(self) -> None:
        for buffer in self.buffers:
            buffer.allocate()

    def free(self) -> None:
        for buffer in self.buffers:
            buffer.free()

    def storages(self) -> Sequence[torch.UntypedStorage]:
        return [buffer.tensor.untyped_storage() for buffer in self.buffers]


class ExtensionGroup(ParamGroup):
    """A group whose parameters follow the protocol; see the module's docstring.

    `shard` is the chunk of bytes that travels; the parameters' values are in the sharded faces.
    """

    is_flat = False

    @property
    def wire_dtype(self) -> torch.dtype:
        """Bytes."""
        return _BYTE

    # -- building ---------------------------------------------------------------------------------------

    @classmethod
    def out_of(cls, group: ParamGroup, params: Sequence[ManagedParam]) -> ExtensionGroup:
        """Returns a group of parameters that were cut for a flat one; see `apart`.

        Their local tensors stay the objects they are, which may carry the methods, in memory of their own.
        """
        self = cls.__new__(cls)
        self.__dict__.update(group.__dict__)
        self.comms = copy.copy(group.comms)
        self.registration = None
        self.params = list(params)
        self.holds_dtensors = any(p.cut.came_as_dtensor for p in params)
        self._set_dtypes(group.dtype)
        for p in params:
            p.group = self
            if p.expected_local is not None:
                p.expected_local.data = p.expected_local.clone()
        self._allocate(on_meta=group.shard.device.type == "meta")
        return self

    def _build(self, wholes: Sequence[torch.Tensor]) -> None:
        self._allocate(on_meta=wholes[0].device.type == "meta")
        rank = self.mesh.shard_rank
        for p, whole, piece in zip(self.params, wholes, self.layout.pieces, strict=True):
            # As FSDP2 cuts it, so that a subclass needs no other operations: a full piece first, then a view.
            full = whole.new_zeros(piece.local_shape(0)).to(self.shard.device)
            part = full.narrow(piece.dim, 0, piece.local_shape(rank)[piece.dim])
            if part.numel() and whole.device.type != "meta":
                part.copy_(piece.of(whole, rank))
            attributes = p.sharded.__dict__
            p.sharded = nn.Parameter(p.cut.face(part), requires_grad=p.sharded.requires_grad)
            p.sharded.__dict__.update({k: v for k, v in attributes.items() if k not in part.__dict__})
            p.expected_local = local_of(p.sharded)

    def _allocate(self, *, on_meta: bool = False) -> None:
        self.layout = self._layout_of(self.params, with_flags=False)
        self.shard = torch.empty(0, dtype=_BYTE, device="meta" if on_meta else self.mesh.device)
        self._forget_derived()

    def _forget_derived(self) -> None:
        super()._forget_derived()
        self._inputs: list[list[_Input]] = []
        self._metadata: list[Any] = []
        self._recurring = _Recurring()
        self._filled = False

    def local_views(self) -> list[torch.Tensor]:
        """Returns this rank's piece of each parameter, which is memory of the subclass's own."""
        return [local_of(p.sharded) for p in self.params]

    def refill(self, shown: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        """Takes replacements over as they are; see `engine/replaced_params.py`."""
        self.generation += 1
        if dtype != self.dtype or self.shard.device != self.mesh.device:
            self._set_dtypes(dtype)
            for p in self.params:
                p.unsharded = None
            self._allocate()
        for p, new in zip(self.params, shown, strict=True):
            p.sharded = new
            p.expected_local = local_of(new)
            p.register(new)
            mark_sharded(p)
        self._gradient_shard = None

    def without(self, leaving: Collection[ManagedParam]) -> ParamGroup | None:
        """See `ParamGroup.without`."""
        staying = [p for p in self.params if p not in leaving]
        if not staying:
            return None
        self.params = staying
        self._allocate(on_meta=self.shard.device.type == "meta")
        return self

    # -- gathering --------------------------------------------------------------------------------------

    def _source(self, runtime: Runtime) -> Source:
        """Asks the parameters what they send, and copies it into the chunk, on the gather stream."""
        stream = runtime.streams.gather
        with runtime.streams.on(stream), torch.inference_mode(mode=False), torch.no_grad():
            runtime.parameters_ready.wait(stream)
            answers = [self._ask(p) for p in self.params]
            self._metadata = [metadata for _, metadata in answers]
            if not self._inputs:
                self._lay_out([tensors for tensors, _ in answers], runtime)
            for inputs, (tensors, _) in zip(self._inputs, answers, strict=True):
                for place, tensor in zip(inputs, tensors, strict=True):
                    into = self.shard.narrow(0, place.offset, place.nbytes)
                    into.view(tensor.dtype).copy_(tensor.reshape(-1))
        if self._departure is None:
            self._departure = Departure(self.shard, self.mesh, self.home, _BYTE, self._gather_label, runtime)
        return self._departure.source(self.comms, self.name, self._version)

    def _ask(self, p: ManagedParam) -> tuple[Sequence[torch.Tensor], Any]:
        local: Any = local_of(p.sharded)
        pre = local.fsdp_pre_all_gather
        count = len(inspect.signature(pre).parameters)
        if count == 1:
            answer = pre(self._shard_mesh)
        elif count == 5:
            shape = torch.Size(p.cut.shape)
            stride = torch.empty(tuple(shape), device="meta").stride()
            answer = pre(self._shard_mesh, shape, stride, p.owners[0][0], self.mp_policy)
        else:
            raise ExtensionError(
                f"Invalid fsdp_pre_all_gather: {inspect.signature(pre)}",
                expected="fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy)",
                got=f"{count} parameters",
                where=f"parameter {p.name}",
            )
        full = torch.Size(self._full_shape(p))
        if count == 5 and local.size() != full and any(tensor.size() != full for tensor in answer[0]):
            raise ExtensionError(
                "fsdp_pre_all_gather must return all-gather inputs with the padded sharded size",
                expected=str(tuple(full)),
                got=", ".join(str(tuple(tensor.size())) for tensor in answer[0]),
                where=f"parameter {p.name} of shape {p.shape} on {self.mesh.shard_size} ranks",
                fix="pad with rows of zeros: all ranks have to send as much as the first one",
            )
        return tuple(answer[0]), answer[1]

    def _full_shape(self, p: ManagedParam) -> tuple[int, ...]:
        return self.layout.pieces[self.params.index(p)].local_shape(0)

    @property
    def _shard_mesh(self) -> DeviceMesh:
        mesh = self.mesh.mesh
        return mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[-1]]

    def _lay_out(self, answers: Sequence[Sequence[torch.Tensor]], runtime: Runtime) -> None:
        """Fixes the places in the chunk by the first answers; every later one has to be alike."""
        offset = 0
        for tensors in answers:
            inputs = []
            for tensor in tensors:
                nbytes = tensor.numel() * tensor.itemsize
                numel = tensor.numel() * self.mesh.shard_size
                output = RecurringBuffer(numel, tensor.dtype, self.mesh.device, runtime.streams)
                output.free()
                self._recurring.buffers.append(output)
                inputs.append(_Input(offset, nbytes, tensor.size(), output))
                offset += -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
            self._inputs.append(inputs)
        offset += -(-LABEL_NUMEL // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
        self.shard = torch.zeros(offset, dtype=_BYTE, device=self.mesh.device)

    def _unpack(self, chunks: Sequence[torch.Tensor], layout: ShardLayout) -> None:
        with torch.inference_mode(mode=False), torch.no_grad():
            self._unsharded = self._recurring
            self._recurring.allocate()
            into: list[torch.Tensor] = []
            pieces: list[torch.Tensor] = []
            for place in (place for inputs in self._inputs for place in inputs):
                if place.nbytes:
                    # `.data` has a version counter of its own: a refill is not a change to autograd.
                    into += place.output.tensor.data.view(_BYTE).split(place.nbytes)
                    pieces += [chunk.narrow(0, place.offset, place.nbytes) for chunk in chunks]
            if into:
                torch._foreach_copy_(into, pieces)
            is_first = not self._filled
            for p, inputs, metadata in zip(self.params, self._inputs, self._metadata, strict=True):
                self._finish(p, tuple(place.gathered for place in inputs), metadata)
            self._metadata = []
            self._filled = True
        if is_first:
            self.on_new_unsharded()

    def _finish(self, p: ManagedParam, outputs: tuple[torch.Tensor, ...], metadata: Any) -> None:
        """Makes the unsharded face, or fills it again."""
        local: Any = local_of(p.sharded)
        if p.unsharded is not None:
            face = local_of(p.unsharded) if isinstance(p.unsharded, DTensor) else p.unsharded
            local.fsdp_post_all_gather(outputs, metadata, self.gather_dtype, out=face)
            return
        tensor, allocated = local.fsdp_post_all_gather(outputs, metadata, self.gather_dtype)
        streams = self._runtime.streams
        self._recurring.buffers += [RecurringBuffer.around(each, streams) for each in allocated]
        shape = p.cut.shape
        stride = torch.empty(shape, device="meta").stride()
        packed = torch.as_strided(tensor, shape, stride, storage_offset=0)
        p.unsharded = nn.Parameter(p.cut.unsharded_face(packed), requires_grad=p.sharded.requires_grad)
        mark_whole(p)
