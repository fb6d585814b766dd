"""All-gather extensions: tensor subclasses with `fsdp_pre_all_gather` and `fsdp_post_all_gather`.

A tensor subclass with these two methods decides what its shard sends (a narrower dtype, or
quantized data and scales) and how the unsharded parameter is built from the data of all ranks. Such
parameters form separate groups, since their shards are tensors of the subclass and not pieces of a
flat shard:

    sharded subclass --pre--> inputs --copy--> bytes --all-gather--> outputs --post--> unsharded
    tensor

The first `post` creates the unsharded tensor; later calls get it as `out` and refill it. Resharding
frees the storage of the outputs and of the tensors that `post` returned as allocated. It is
allocated again before the next `post`, so the unsharded tensor stays one object. Gradients are
ordinary tensors and are reduced like any others.

Source: the protocol is torch's, see `FSDPParam` in
torch/distributed/fsdp/_fully_shard/_fsdp_param.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from shardgrad.engine.buffers import RecurringMemory
from shardgrad.engine.comm_context import CommContext
from shardgrad.engine.param_group import AllGather, FSDPParam, ParamGroup, mark
from shardgrad.engine.streams import Streams, keep_for_current_stream
from shardgrad.errors import ExtensionError, unsupported
from shardgrad.sharding.dtensor import local_of
from shardgrad.sharding.layout import ALIGNMENT_NBYTES, TAG_NUMEL
from shardgrad.sharding.mesh import DataParallelMesh
from shardgrad.sharding.offload import ShardMemory

# The dtype of a chunk of bytes. int8 and not uint8, since an exchange marks labels that have not
# arrived with -1.
_BYTE = torch.int8


def require_extension(
    param: torch.Tensor,
    name: str,
    mesh_after_forward: DataParallelMesh | None,
    memory: ShardMemory,
) -> None:
    """Refuses an extension that is incomplete, or options that the protocol does not support.

    Raises:
        ExtensionError: one of the two methods is missing.
        UnsupportedError: an int `reshard_after_forward` reshards to fewer ranks, for which the
            protocol does not define the shard to gather from; or shards are offloaded, but the
            subclass computes its data on the device.
    """
    local = local_of(param)
    if not (hasattr(local, "fsdp_pre_all_gather") and hasattr(local, "fsdp_post_all_gather")):
        raise ExtensionError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using "
            "all-gather extensions",
            expected="both methods, or none",
            got=type(local).__name__,
            where=f"parameter {name}",
        )
    if mesh_after_forward is not None:
        raise unsupported(
            f"reshard_after_forward as an int for {name}, which has fsdp_pre_all_gather",
            instead="reshard_after_forward=True or False",
        )
    if memory.is_offloaded:
        raise unsupported(
            f"CPUOffloadPolicy for {name}, which has fsdp_pre_all_gather",
            instead="a separate unit without offload_policy",
        )


@dataclass
class _Input:
    """One tensor that a shard sends. Only its values differ between ranks.

    Attributes:
        offset: its first byte in a chunk.
        nbytes: its size on each rank.
        shape: its shape on each rank.
        prefix: how often the tensors of all ranks alternate in the output. It is the product of the
            dims before the sharded one, so that the output is in the order of the parameter; but 1
            if the tensor has no fixed number of elements for each of the shard, as a scale.
        output: the tensor that receives those of all ranks.
    """

    offset: int
    nbytes: int
    shape: torch.Size
    prefix: int
    output: torch.Tensor

    @property
    def gathered(self) -> torch.Tensor:
        """The tensor that `fsdp_post_all_gather` is given."""
        return self.output.view(-1, *self.shape[1:])


class ExtensionGroup(ParamGroup):
    """A group whose parameters follow the protocol; see the module's docstring.

    `shard` is the chunk of bytes that is sent. The values are in the sharded parameters.
    """

    is_flat = False
    kind = "group of tensor extensions"

    # -- building

    @torch.no_grad()
    def shard_params(self) -> None:
        """See `ParamGroup.shard_params`; each sharded parameter has memory that only it uses."""
        rank = self.mesh.shard_rank
        for p, piece in zip(self.params, self.layout.pieces, strict=True):
            original = p.sharded
            values = local_of(original) if p.sharding.came_as_dtensor else original.detach()
            # As FSDP2 does it, so that a subclass needs no other operations: a full piece, a view
            # of it, and `torch.chunk`.
            full = values.new_zeros(piece.local_shape(0)).to(self.shard.device)
            part = full.narrow(piece.dim, 0, piece.local_shape(rank)[piece.dim])
            if part.numel() and values.device.type != "meta":
                part.copy_(torch.chunk(values, self.mesh.shard_size, piece.dim)[rank])
            sharded = p.sharding.sharded_dtensor(part)
            p.sharded = nn.Parameter(sharded, requires_grad=original.requires_grad)
            attributes = original.__dict__.items()
            p.sharded.__dict__.update({k: v for k, v in attributes if k not in part.__dict__})
        self._note_params()

    def _allocate(self, *, on_meta: bool = False) -> None:
        self.layout = self.layout_of(self.params, with_flags=False)
        self.shard = torch.empty(0, dtype=_BYTE, device="meta" if on_meta else self.mesh.device)
        self._forget_derived()

    def _forget_derived(self) -> None:
        super()._forget_derived()
        self._tensors: list[list[_Input]] = []
        self._metadata: list[Any] = []

    def local_views(self) -> list[torch.Tensor]:
        """Returns this rank's piece of each parameter, which is memory of the subclass's own."""
        return [local_of(p.sharded) for p in self.params]

    def refill(self, shown: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        """Takes replacements over as they are; see `engine/replaced_params.py`."""
        self.generation += 1
        if dtype != self.dtype or self.shard.device != self.mesh.device:
            self._set_dtypes(dtype)
            self._allocate()
        for p, new in zip(self.params, shown, strict=True):
            p.sharded = new
            p.register(new)
            mark(new, p)
        self._note_params()

    # -- all-gather

    def _launch(self, comm_ctx: CommContext, version: object) -> AllGather:
        """Calls `fsdp_pre_all_gather` of each parameter, copies the results into the chunk on the
        gather stream, and starts the all-gather.
        """
        streams = comm_ctx.streams
        with streams.on(streams.gather), torch.inference_mode(mode=False), torch.no_grad():
            comm_ctx.parameters_ready.wait(streams.gather)
            if self.unsharded_memory is not None:
                # On one rank nothing is sent, and the last copy-out has read the chunk itself.
                self.unsharded_memory.filled.wait(streams.gather)
            answers = [self._ask(p) for p in self.params]
            self._metadata = [metadata for _, metadata in answers]
            if not self._tensors:
                self._lay_out([tensors for tensors, _ in answers], streams)
            for inputs, (tensors, _) in zip(self._tensors, answers, strict=True):
                for place, tensor in zip(inputs, tensors, strict=True):
                    into = self.shard.narrow(0, place.offset, place.nbytes)
                    into.view(tensor.dtype).copy_(tensor.reshape(-1))
        return super()._launch(comm_ctx, version)

    def _ask(self, p: FSDPParam) -> tuple[Sequence[torch.Tensor], Any]:
        local: Any = local_of(p.sharded)
        pre = local.fsdp_pre_all_gather
        count = len(inspect.signature(pre).parameters)
        if count not in (1, 5):
            raise ExtensionError(
                f"Invalid fsdp_pre_all_gather: {inspect.signature(pre)}",
                expected="fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, "
                "mp_policy)",
                got=f"{count} parameters",
                where=f"parameter {p.name}",
            )
        if count == 1:
            inputs, metadata = pre(self._shard_mesh)
            return tuple(inputs), metadata
        shape = torch.Size(p.sharding.shape)
        stride = torch.empty(tuple(shape), device="meta").stride()
        inputs, metadata = pre(self._shard_mesh, shape, stride, p.owners[0][0], self.mp_policy)
        full = torch.Size(self.layout.pieces[self.params.index(p)].local_shape(0))
        if local.size() != full and any(tensor.size() != full for tensor in inputs):
            raise ExtensionError(
                "fsdp_pre_all_gather must return all-gather inputs with the padded sharded size",
                expected=str(tuple(full)),
                got=", ".join(str(tuple(tensor.size())) for tensor in inputs),
                where=f"parameter {p.name} of shape {tuple(p.sharded.shape)} on "
                f"{self.mesh.shard_size} ranks",
                fix="pad with rows of zeros: every rank must send as much as the first one",
            )
        return tuple(inputs), metadata

    @property
    def _shard_mesh(self) -> DeviceMesh:
        mesh = self.mesh.mesh
        return mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[-1]]

    def _lay_out(self, answers: Sequence[Sequence[torch.Tensor]], streams: Streams) -> None:
        """Lays out the chunk by the first results; later ones must have the same shapes and
        dtypes.
        """
        offset = 0
        outputs: list[torch.Tensor] = []
        for tensors, piece in zip(answers, self.layout.pieces, strict=True):
            inputs = []
            shape = piece.local_shape(0)
            for tensor in tensors:
                nbytes = tensor.numel() * tensor.itemsize
                numel = tensor.numel() * self.mesh.shard_size
                output = torch.empty(numel, dtype=tensor.dtype, device=self.mesh.device)
                outputs.append(output)
                is_whole = tensor.numel() % max(1, prod(shape)) == 0
                prefix = prod(shape[: piece.dim]) if is_whole else 1
                inputs.append(_Input(offset, nbytes, tensor.size(), prefix, output))
                offset += -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
            self._tensors.append(inputs)
        offset += -(-TAG_NUMEL // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
        self.shard = torch.zeros(offset, dtype=_BYTE, device=self.mesh.device)
        self.unsharded_memory = RecurringMemory(outputs, streams)
        self.unsharded_memory.free()

    @torch.no_grad()
    def _fill(self, gathered: torch.Tensor, gather: AllGather) -> None:
        memory = cast(RecurringMemory, self.unsharded_memory)  # since `_launch`
        with torch.inference_mode(mode=False):
            memory.allocate()
            chunks = gathered.view(-1, gather.chunk.numel())
            into: list[torch.Tensor] = []
            pieces: list[torch.Tensor] = []
            for place in (place for inputs in self._tensors for place in inputs):
                if place.nbytes:
                    # `.data` has its own version counter, so autograd does not see a refill.
                    whole = place.output.data.view(_BYTE)
                    into.append(whole.view(place.prefix, len(chunks), -1).transpose(0, 1))
                    sent = chunks.narrow(1, place.offset, place.nbytes)
                    pieces.append(sent.unflatten(1, (place.prefix, -1)))
            if into:
                torch._foreach_copy_(into, pieces)
            for p, inputs, metadata in zip(self.params, self._tensors, self._metadata, strict=True):
                memory.add(self._finish(p, tuple(place.gathered for place in inputs), metadata))
            # Such as scales, which were computed on the gather stream. The unsharded parameter
            # refers to them, and so may what autograd saves.
            for tensor in tree_leaves(self._metadata):
                if isinstance(tensor, torch.Tensor):
                    keep_for_current_stream(tensor)
            self._metadata = []
            memory.filled.record(gather.streams.current())

    def _finish(
        self, p: FSDPParam, outputs: tuple[torch.Tensor, ...], metadata: Any
    ) -> Sequence[torch.Tensor]:
        """Creates or refills the unsharded parameter; returns the tensors allocated for it."""
        local: Any = local_of(p.sharded)
        if p.unsharded is not None:
            out = local_of(p.unsharded)
            local.fsdp_post_all_gather(outputs, metadata, self.gather_dtype, out=out)
            return ()
        tensor, allocated = local.fsdp_post_all_gather(outputs, metadata, self.gather_dtype)
        shape = p.sharding.shape
        stride = torch.empty(shape, device="meta").stride()
        packed = torch.as_strided(tensor, shape, stride, storage_offset=0)
        unsharded = p.sharding.unsharded_tensor(packed)
        p.unsharded = nn.Parameter(unsharded, requires_grad=p.sharded.requires_grad)
        mark(p.unsharded, p)
        return tuple(allocated)
