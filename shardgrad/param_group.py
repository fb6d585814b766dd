"""Parameters that travel together, and the two faces of each.

What a program sees, by state of the group:

| state                  | `module.weight`                                | memory besides the shards  |
|------------------------|------------------------------------------------|----------------------------|
| `SHARDED`              | `nn.Parameter(DTensor)`, local = view of shard | none                       |
| `SHARDED_POST_FORWARD` | the same, cut over fewer, neighbouring ranks   | 1/n of the group           |
| `UNSHARDED`            | plain `nn.Parameter`, view of the flat buffer  | the group, in gather dtype |

The unsharded parameter is one tensor object for the life of the model: resharding frees its storage and
unsharding fills it again, so what autograd saved in forward is valid in backward. The objects are detached
from the flat buffer's version counter, therefore a refill does not look like an in-place change to autograd.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from . import ops
from .adoption import adopt
from .buffers import Recurring, RecurringBuffer, Slot
from .collectives import Flight
from .crosswise import unpack_crosswise
from .cuts import Cut, cut_of
from .errors import MetaParameterError
from .faces import in_own_storage
from .gradient_shard import GradientShard
from .labels import LABEL_NUMEL, Label
from .layout import ShardLayout, alignment_numel
from .managed_param import ManagedParam, Owner, local_of, mark_sharded
from .mesh import DataParallelMesh
from .policies import GradientPolicy
from .post_forward import PostForwardShard
from .runtime import Runtime
from .streams import Mark
from .trace import span

__all__ = ["ParamGroup", "ShardState", "Source"]


class ShardState(Enum):
    """Where the parameters of a group are."""

    SHARDED = auto()
    SHARDED_POST_FORWARD = auto()
    UNSHARDED = auto()


@dataclass(frozen=True)
class Source:
    """Where an all-gather starts from: the shard, or the post-forward shard.

    Attributes:
        layout: of the parameters over the ranks that gather.
        chunk: this rank's, 1-D, with room for the label at its end.
        mesh: whose shard group gathers.
        label: of the message.
        ready: where the chunk was last filled; None if `parameters_ready` tells.
    """

    layout: ShardLayout
    chunk: torch.Tensor
    mesh: DataParallelMesh
    label: Label
    ready: Mark | None

    def write_label(self) -> None:
        """Puts the label at the end of the chunk, if it is not there yet."""
        end = self.chunk.narrow(0, self.chunk.numel() - LABEL_NUMEL, LABEL_NUMEL)
        end.copy_(torch.tensor(self.label.digits, dtype=end.dtype))


class _Gathering:
    """An all-gather under way; holds its slot until the group has copied it out."""

    def __init__(self, group: ParamGroup, source: Source) -> None:
        self.group = group
        self.source = source
        self.slot: Slot
        self.flight: Flight

    def complete(self) -> None:
        self.group.wait_for_unshard()


class ParamGroup:
    """Parameters of one unit with one dtype on one mesh.

    Args:
        params: (name, original parameter, owners, cut), in an order all ranks share; not changed yet.
        mesh: the data-parallel mesh.
        post_forward_mesh: fewer, neighbouring ranks to reshard to after forward; None to reshard fully.
        mp_policy: torch's policy.
        gradient_policy: ours.

    Attributes:
        name: of the unit, for errors and traces.
        state: see the module docstring.
        shard: 1-D, this rank's chunk in the parameters' dtype.
        is_flat: True if the sharded faces are views of `shard`.
        generation: how often parameters were replaced and taken over; see `adoption.py`.
        holds_dtensors: True if some parameter came as a DTensor; its gradients do too.
        steps_taken: how often an optimizer has moved the parameters; see `optimizer_steps.py`.
    """

    is_flat = True

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter, list[Owner], Cut]],
        mesh: DataParallelMesh,
        post_forward_mesh: DataParallelMesh | None,
        mp_policy: MixedPrecisionPolicy,
        gradient_policy: GradientPolicy,
    ) -> None:
        self.mesh = mesh
        self.post_forward_mesh = post_forward_mesh
        self.gradient_policy = gradient_policy
        self.mp_policy = mp_policy
        self.state = ShardState.SHARDED
        self.set_channel("", 0)
        # Called once the unsharded parameters exist; the reducer puts its hooks on them.
        self.on_new_unsharded: Callable[[], None] = lambda: None
        self._gathering: _Gathering | None = None
        self._whole: Mark | None = None
        self._noted_version = -1
        self.steps_taken = 0
        self.generation = 0
        self._set_dtypes(params[0][1].dtype)
        # Until `_build` has made the shard, a parameter's sharded face is the original itself.
        self.params = [ManagedParam(name, owners, tuple(p.shape), p, cut) for name, p, owners, cut in params]
        self.holds_dtensors = any(p.cut.came_as_dtensor for p in self.params)
        for managed in self.params:
            managed.group = self
        with torch.no_grad():
            self._build([local_of(p) if cut.came_as_dtensor else p.detach() for _, p, _, cut in params])

    def set_channel(self, name: str, channel: int) -> None:
        """Names the group's messages; `channel` comes from `agreement.py`, the same on every rank."""
        self.name = name
        self._gather_label = Label.of(f"all-gather of {name}", 4 * channel)
        self._regather_label = Label.of(f"all-gather of {name} from its neighbours", 4 * channel + 1)
        self.reduce_label = Label.of(f"reduce-scatter of {name}", 4 * channel + 2)
        self._labelled: torch.Tensor | None = None  # the shard, once it ends in its label
        self._post_forward: PostForwardShard | None = None

    # -- facts ------------------------------------------------------------------------------------------

    def _set_dtypes(self, dtype: torch.dtype) -> None:
        """Fixes the dtypes that follow from the parameters' own."""
        policy = self.mp_policy
        self.dtype = dtype
        self.gather_dtype = policy.param_dtype or dtype
        self.reduce_dtype = policy.reduce_dtype or self.gather_dtype
        self.gradient_dtype = self.gradient_policy.dtype or dtype
        self.alignment = alignment_numel([dtype, self.gather_dtype, self.reduce_dtype, self.gradient_dtype])

    def _build(self, wholes: Sequence[torch.Tensor]) -> None:
        """Fills the shard from what is to be cut and makes the sharded faces show it."""
        device = wholes[0].device
        self._allocate(device if device.type == "meta" else self.mesh.device)
        rank = self.mesh.shard_rank
        views = self.layout.local_views(self.shard, rank)
        for p, whole, view, piece in zip(self.params, wholes, views, self.layout.pieces, strict=True):
            if device.type != "meta":
                view.copy_(piece.of(whole, rank))
            face = p.cut.face(in_own_storage(view))
            attributes, p.sharded = (
                p.sharded.__dict__,
                nn.Parameter(face, requires_grad=p.sharded.requires_grad),
            )
            p.sharded.__dict__.update(attributes)
            p.expected_local = local_of(p.sharded)

    def _allocate(self, device: torch.device) -> None:
        """Lays out the parameters and allocates their shard, zeroed, so that padding is zero for good."""
        self.layout = self._layout_of(self.params, with_flags=False)
        self.shard = torch.zeros(self.layout.chunk_numel, dtype=self.dtype, device=device)
        self._forget_derived()

    def _layout_of(self, params: Sequence[ManagedParam], *, with_flags: bool) -> ShardLayout:
        return ShardLayout.of(
            [p.cut.shape for p in params],
            self.mesh.shard_size,
            alignment=self.alignment,
            with_flags=with_flags,
            dims=[p.cut.dim for p in params],
        )

    def _forget_derived(self) -> None:
        """Drops what is made on demand from layout, dtypes and trainability."""
        self._unsharded: Recurring | None = None
        self._post_forward = None
        self._labelled = None
        self._trainable: tuple[bool, ...] | None = None
        self.gradient_layout: ShardLayout | None = None
        self._gradient_shard: GradientShard | None = None

    # -- trainability and gradients ---------------------------------------------------------------------

    def trainable(self) -> list[ManagedParam]:
        """Returns the parameters that require grad now, in order."""
        return [p for p in self.params if p.sharded.requires_grad]

    @property
    def has_trainable(self) -> bool:
        """True if some parameter required grad when `refresh_trainable` last looked."""
        return self.gradient_layout is not None and bool(self.gradient_layout.pieces)

    def refresh_trainable(self) -> bool:
        """Takes note of which parameters require grad; True if that changed since the last call."""
        now = tuple(p.sharded.requires_grad for p in self.params)
        if now == self._trainable:
            return False
        self._trainable = now
        self._gradient_shard = None
        self.gradient_layout = self._layout_of(self.trainable(), with_flags=True)
        for p in self.params:
            if p.unsharded is not None:
                p.unsharded.requires_grad_(p.sharded.requires_grad)
        return True

    def local_gradients(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Returns what this rank packs of the trainable parameters' gradients; see `Cut.local_gradient`."""
        return [
            None if grad is None else p.cut.local_gradient(grad)
            for p, grad in zip(self.trainable(), grads, strict=True)
        ]

    @property
    def has_gradients(self) -> bool:
        """True once the gradient shard exists."""
        return self._gradient_shard is not None

    def gradients(self) -> GradientShard:
        """Returns the persistent gradient shard, allocating it at the first call."""
        if self._gradient_shard is None:
            layout = self.gradient_layout
            if layout is None:
                raise RuntimeError("gradients() before refresh_trainable(): the group was never unsharded")
            self._gradient_shard = GradientShard(
                [p.sharded for p in self.trainable()],
                layout,
                self.mesh,
                self.gradient_dtype,
                self.gradient_policy,
            )
        return self._gradient_shard

    # -- unshard ----------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        """True if the parameters are neither whole nor on their way."""
        return self._gathering is None and self.state is not ShardState.UNSHARDED

    def unshard(self, runtime: Runtime) -> None:
        """Starts the all-gather, unless the parameters are whole or on their way.

        Streams: cast and collective go to the gather stream, after the parameters were last written.
        Capture: safe after the first call.
        """
        if not self.is_sharded:
            return
        source = self._source(runtime)
        transport = runtime.transport(source.mesh.shard_group)
        cast = source.chunk.dtype != self.wire_dtype
        apart = cast and not transport.gathers_in_place  # the cast chunk needs room of its own
        count = transport.gather_chunks
        n = source.chunk.numel()
        gathering = _Gathering(self, source)
        stream = runtime.streams.gather
        if source.ready is None and self._labelled is not source.chunk:
            source.write_label()  # once; the host waits
            self._labelled = source.chunk
        with span("all_gather", self.name), runtime.streams.on(stream):
            runtime.parameters_ready.wait(stream)
            if source.ready is not None:
                source.ready.wait(stream)
            slot = runtime.gather_ring.acquire((count + apart) * n * self.wire_dtype.itemsize, gathering)
            slot.start_writing(stream)
            staging = slot.chunks(self.wire_dtype, count, n)
            chunk = source.chunk
            if cast:
                room = slot.chunks(self.wire_dtype, 1, n, skip=count * n) if apart else staging
                chunk = room.parts[0 if apart else transport.rank]
                chunk.copy_(source.chunk)
            gathering.slot = slot
            gathering.flight = transport.all_gather(chunk, staging, source.label)
            slot.finish_writing(stream)
        self._runtime = runtime
        self._gathering = gathering

    @property
    def wire_dtype(self) -> torch.dtype:
        """In which chunks of an all-gather travel."""
        return self.gather_dtype

    def _source(self, runtime: Runtime) -> Source:
        if self.state is ShardState.SHARDED_POST_FORWARD:
            cut = self._post_forward
            if cut is None:
                raise RuntimeError("the post-forward shard is gone")
            return Source(cut.layout, cut.chunk, cut.mesh, cut.label, cut.ready)
        return Source(self.layout, self.shard, self.mesh, self._gather_label, None)

    def wait_for_unshard(self) -> None:
        """Ends the all-gather: parameters are whole and registered afterwards.

        Streams: the copy-out goes to the current stream, after the gather stream's chunk.

        Raises:
            CollectiveError: the gather failed.
        """
        gathering = self._gathering
        if gathering is None:
            if self._whole is not None:  # another stream may have copied them out
                self._whole.wait(self._runtime.streams.current())
            return
        self._gathering = None
        stream = self._runtime.streams.current()
        with span("all_gather_copy_out", self.name):
            try:
                chunks = gathering.flight.wait()
                gathering.slot.start_reading(stream)
                self._copy_out(chunks, gathering.source.layout)
            finally:
                gathering.slot.release(stream)
        self._whole = self._whole or self._runtime.streams.mark()
        self._whole.record(stream)
        self.state = ShardState.UNSHARDED
        if self._post_forward is not None:
            self._post_forward.free()
        for p in self.params:
            face = p.whole
            for module, attribute in p.owners:
                module._parameters[attribute] = face

    def _copy_out(self, chunks: Sequence[torch.Tensor], layout: ShardLayout) -> None:
        """Puts whole parameters together from the chunks of all ranks, on the current stream."""
        flat = self._unsharded_storage()
        # Offsets in the unsharded buffer do not depend on how many ranks the chunks come from.
        ops.unpack(chunks, flat, layout.table)
        if layout.crosswise:
            unpack_crosswise(chunks, flat, layout)

    def _unsharded_storage(self) -> torch.Tensor:
        """Returns the flat unsharded buffer with its storage allocated, making it at the first call."""
        if isinstance(self._unsharded, RecurringBuffer):
            self._unsharded.allocate()
            return self._unsharded.tensor
        numel, streams = self.layout.unsharded_numel, self._runtime.streams
        self._unsharded = RecurringBuffer(numel, self.gather_dtype, self.mesh.device, streams)
        # Made for training even if the first forward is an evaluation in inference mode.
        with torch.inference_mode(mode=False):
            for p, view in zip(self.params, self.layout.unsharded_views(self._unsharded.tensor), strict=True):
                # `.data` gives the view a version counter of its own: see the module docstring.
                face = p.cut.unsharded_face(view.data)
                p.unsharded = nn.Parameter(face, requires_grad=p.sharded.requires_grad)
        self.on_new_unsharded()
        return self._unsharded.tensor

    def cancel_unshard(self) -> None:
        """Drops an all-gather nobody will use; waits until its memory is ours again."""
        gathering = self._gathering
        if gathering is None:
            return
        self._gathering = None
        gathering.flight.wait()
        # The gather has read the shard, which the program may write next.
        gathering.slot.start_reading(self._runtime.streams.current())
        gathering.slot.release(self._runtime.streams.gather)

    # -- reshard ----------------------------------------------------------------------------------------

    def reshard(self) -> None:
        """Frees the whole parameters and shows the shards. A pending all-gather is dropped.

        Streams: storage returns to the allocator on the stream it was allocated on.
        """
        self.cancel_unshard()
        if self.state is ShardState.SHARDED:
            return
        if self._unsharded is not None:
            self._unsharded.free()
        if self._post_forward is not None:
            self._post_forward.free()
        self.state = ShardState.SHARDED
        for p in self.params:
            for module, attribute in p.owners:
                module._parameters[attribute] = p.sharded

    def reshard_after_forward(self) -> None:
        """Reshards as the group was asked to after forward: fully, or to fewer ranks."""
        if self.post_forward_mesh is None:
            self.reshard()
            return
        if self.state is not ShardState.UNSHARDED:
            return
        cut = self._post_forward_shard(self.post_forward_mesh)
        cut.fill([p.whole for p in self.params])
        if self._unsharded is not None:
            self._unsharded.free()
        self.state = ShardState.SHARDED_POST_FORWARD
        for p, view in zip(self.params, cut.views, strict=True):
            if p.post_forward is None:
                face = cut_of(p.whole, p.name, cut.mesh, p.cut.dim).face(view)
                p.post_forward = nn.Parameter(face, requires_grad=p.sharded.requires_grad)
            p.register(p.post_forward)

    def _post_forward_shard(self, mesh: DataParallelMesh) -> PostForwardShard:
        if self._post_forward is None:
            self._post_forward = PostForwardShard(
                [p.cut.shape for p in self.params],
                [p.cut.dim for p in self.params],
                mesh,
                self._runtime.streams,
                alignment=self.alignment,
                dtype=self.gather_dtype,
                label=self._regather_label,
            )
            for p in self.params:
                p.post_forward = None
        return self._post_forward

    def note_version(self) -> None:
        """Remembers which values the whole parameters hold, if they are going to stay whole for a while."""
        if not self.is_sharded:
            self._noted_version = self._version

    def reshard_if_stale(self) -> None:
        """Reshards whole parameters whose shard was written since they were gathered.

        An optimizer step and an in-place operation on a sharded parameter are noticed, so nobody computes
        with old weights because parameters were kept whole.
        """
        resting = self.state is ShardState.SHARDED and self._gathering is None
        if not resting and self._version != self._noted_version:
            self.reshard()

    @property
    def _version(self) -> int:
        """Moves with every optimizer step and every in-place operation on a sharded parameter."""
        return self.steps_taken + sum(p.sharded._version + local_of(p.sharded)._version for p in self.params)

    # -- foreign storage --------------------------------------------------------------------------------

    def meta_names(self) -> list[str]:
        """Returns the parameters that have no data yet."""
        return [p.name for p in self.params if p.sharded.device.type == "meta"]

    def require_data(self) -> None:
        """Refuses parameters on the meta device.

        Raises:
            MetaParameterError: naming them.
        """
        names = self.meta_names()
        if names:
            raise MetaParameterError(
                "FSDP parameters should be materialized from meta device before training, but the following "
                f"were still on meta device: {names}",
                expected=f"parameters on {self.mesh.device}",
                got=f"{len(names)} on meta",
                where=f"unit {self.name}",
                fix="model.to_empty(device=...) and initialise, or load_state_dict(..., assign=True)",
            )

    def adopt(self) -> bool:
        """Takes over parameters that the program replaced or moved; see `adoption.py`.

        Returns:
            True if anything was taken over: addresses may have changed.
        """
        return self.state is ShardState.SHARDED and adopt(self)

    def refill(self, shown: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        """Copies replacements into the shard, a new one if dtype or device changed, and shows it in them."""
        self.generation += 1
        locals_ = [local_of(p) for p in shown]
        if dtype != self.dtype or self.shard.device != self.mesh.device:
            self._set_dtypes(dtype)
            for p in self.params:
                p.unsharded = p.post_forward = None
            self._allocate(self.mesh.device)
        views = self.layout.local_views(self.shard, self.mesh.shard_rank)
        with torch.no_grad():
            for p, new, local, view in zip(self.params, shown, locals_, views, strict=True):
                if local.data_ptr() != view.data_ptr() or local.numel() == 0:
                    view.copy_(local)
                p.sharded = new
                p.alias(view)
                p.register(new)
                mark_sharded(p)
        # A gradient that moved along with its parameter is in foreign memory now, and one of a replaced
        # parameter belongs to an object nobody holds: the next reduction makes a new shard.
        self._gradient_shard = None

    def without(self, leaving: Collection[ManagedParam]) -> ParamGroup | None:
        """Returns the group of the parameters that stay when others move to a common ancestor.

        Only while building: the group has never been unsharded. None if nothing stays.
        """
        rank = self.mesh.shard_rank
        views = self.layout.local_views(self.shard, rank)
        staying = [(p, view) for p, view in zip(self.params, views, strict=True) if p not in leaving]
        if not staying:
            return None
        smaller = copy.copy(self)
        smaller.params = [p for p, _ in staying]
        smaller._allocate(self.shard.device)
        for (p, old), view in zip(staying, smaller.layout.local_views(smaller.shard, rank), strict=True):
            with torch.no_grad():
                view.copy_(old)
            p.alias(view)
            p.group = smaller
        return smaller
