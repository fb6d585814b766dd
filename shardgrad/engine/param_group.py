"""Parameters that travel together, and the two faces of each.

What a program sees, by state of the group:

| state                  | `module.weight`                                | memory besides the shards  |
|------------------------|------------------------------------------------|----------------------------|
| `SHARDED`              | `nn.Parameter(DTensor)`, local = view of shard | none                       |
| `SHARDED_POST_FORWARD` | the same, cut over fewer, neighbouring ranks   | 1/n of the group           |
| `UNSHARDED`            | plain `nn.Parameter`, view of the flat buffer  | the group, in gather dtype |

Each of these faces is one object for the life of the model; see `param.py` and `unsharded.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from enum import Enum, auto

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardgrad.engine.all_gather import Gathering, Source
from shardgrad.engine.all_gather_input import Departure
from shardgrad.engine.buffers import Recurring
from shardgrad.engine.comm_context import Runtime
from shardgrad.engine.grad_shard import GradientShard
from shardgrad.engine.message_tag import Label
from shardgrad.engine.param import ManagedParam, Owner, local_of, mark_sharded
from shardgrad.engine.replaced_params import Registration, adopt
from shardgrad.engine.streams import Mark
from shardgrad.engine.trace import span
from shardgrad.engine.unsharded import UnshardedParams
from shardgrad.features.custom_comms import Comms
from shardgrad.features.hfsdp import in_rank_order
from shardgrad.features.post_forward import PostForwardShard
from shardgrad.policies import GradientPolicy
from shardgrad.sharding.byte_params import from_bytes, is_carried, stored_shape
from shardgrad.sharding.dtensor import in_own_storage
from shardgrad.sharding.layout import ShardLayout, alignment_numel
from shardgrad.sharding.mesh import DataParallelMesh
from shardgrad.sharding.offload import Home
from shardgrad.sharding.param_sharding import Cut
from shardgrad.sharding.zero_copy import travels_directly
from shardgrad.sharding.zero_stage import Stage

__all__ = ["ParamGroup", "ShardState", "Source"]


class ShardState(Enum):
    """Where the parameters of a group are."""

    SHARDED = auto()
    SHARDED_POST_FORWARD = auto()
    UNSHARDED = auto()


class ParamGroup:
    """Parameters of one unit with one dtype on one mesh.

    Args:
        params: (name, original parameter, owners, cut), in an order all ranks share; not changed yet.
        mesh: the data-parallel mesh.
        post_forward_mesh: fewer, neighbouring ranks to reshard to after forward; None to reshard fully.
        mp_policy: torch's policy.
        gradient_policy: ours.
        home: where shards, gradients and optimizer states live.
        stage: what is kept whole on every rank.

    Attributes:
        name: of the unit, for errors and traces; empty until ranks have agreed on the model.
        state: see the module docstring.
        shard: 1-D, this rank's chunk in the parameters' dtype (bytes, if they are only carried), at home.
        is_flat: True if the sharded faces are views of `shard`.
        generation: how often parameters were replaced and taken over; see `replaced_params.py`.
        holds_dtensors: True if some parameter came as a DTensor; its gradients do too.
        steps_taken: how often an optimizer has moved the parameters; see `checks/optimizer_hooks.py`.
        comms: what carries the group's messages; for a program to change while nothing is in flight.
    """

    is_flat = True

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter, list[Owner], Cut]],
        mesh: DataParallelMesh,
        post_forward_mesh: DataParallelMesh | None,
        mp_policy: MixedPrecisionPolicy,
        gradient_policy: GradientPolicy,
        home: Home,
        stage: Stage,
    ) -> None:
        self.mesh = mesh
        self.home = home
        self.stage = stage
        self.post_forward_mesh = post_forward_mesh
        self.gradient_policy = gradient_policy
        self.mp_policy = mp_policy
        self.state = ShardState.SHARDED
        self.set_channel("", 0)
        # Called once the unsharded parameters exist; the reducer puts its hooks on them.
        self.on_new_unsharded: Callable[[], None] = lambda: None
        self._gathering: Gathering | None = None
        self._whole: Mark | None = None
        self._noted_version = (-1, -1)  # of the values that whole parameters hold, or will
        self._kept = self._kept_is_wanted = False
        self.comms = Comms()
        self.steps_taken = 0
        self.generation = 0
        self.registration: Registration | None = None
        self._set_dtypes(params[0][1].dtype)
        # Until `_build` has made the shard, a parameter's sharded face is the original itself.
        self.params = [ManagedParam(name, owners, tuple(p.shape), p, cut) for name, p, owners, cut in params]
        self.holds_dtensors = any(p.cut.came_as_dtensor for p in self.params)
        for managed in self.params:
            managed.group = self
        with torch.no_grad():
            self._build([local_of(p) if cut.came_as_dtensor else p.detach() for _, p, _, cut in params])

    def set_channel(self, name: str, channel: int) -> None:
        """Names the group's messages; `channel` comes from `same_model.py`, the same on every rank."""
        self.name = name
        self._gather_label = Label.of(f"all-gather of {name}", 4 * channel)
        self._regather_label = Label.of(f"all-gather of {name} from its neighbours", 4 * channel + 1)
        self.reduce_label = Label.of(f"reduce-scatter of {name}", 4 * channel + 2)
        self._departure: Departure | None = None
        self._post_forward: PostForwardShard | None = None

    # -- facts ------------------------------------------------------------------------------------------

    @property
    def is_in_use(self) -> bool:
        """True once ranks have agreed on it: which parameters it has is fixed from then on."""
        return bool(self.name)

    @property
    def _carries(self) -> bool:
        """True if the shard holds parameters as bytes; what an extension keeps is its own affair."""
        return self.is_flat and is_carried(self.dtype)

    def _set_dtypes(self, dtype: torch.dtype) -> None:
        """Fixes the dtypes that follow from the parameters' own."""
        policy = self.mp_policy
        self.dtype = dtype
        if self._carries:
            self.shard_dtype = self.gather_dtype = torch.uint8
            self.reduce_dtype = self.gradient_dtype = torch.float32  # of no gradients
            self.post_forward_mesh = None  # bytes are not cut a second time
        else:
            self.shard_dtype, self.gather_dtype = dtype, policy.param_dtype or dtype
            self.reduce_dtype = policy.reduce_dtype or self.gather_dtype
            self.gradient_dtype = self.gradient_policy.dtype or dtype
        self.alignment = alignment_numel(
            [self.shard_dtype, self.gather_dtype, self.reduce_dtype, self.gradient_dtype]
        )

    def _build(self, wholes: Sequence[torch.Tensor]) -> None:
        """Fills the shard from what is to be cut and makes the sharded faces show it."""
        device = wholes[0].device
        self._allocate(on_meta=device.type == "meta")
        rank = self.mesh.shard_rank
        pieces = self.layout.pieces
        for p, whole, view, piece in zip(self.params, wholes, self.local_views(), pieces, strict=True):
            if device.type != "meta":
                view.copy_(piece.of(whole, rank))
            face = p.cut.face(in_own_storage(view))
            attributes, p.sharded = (
                p.sharded.__dict__,
                nn.Parameter(face, requires_grad=p.sharded.requires_grad),
            )
            p.sharded.__dict__.update(attributes)
            p.expected_local = local_of(p.sharded)

    def _allocate(self, *, on_meta: bool = False) -> None:
        """Lays out the parameters and allocates their shard, zeroed, so that padding is zero for good."""
        self.layout = self._layout_of(self.params, with_flags=False)
        home = Home(torch.device("meta")) if on_meta else self.home
        self.shard = home.zeros(self.layout.chunk_numel, self.shard_dtype)
        self._forget_derived()

    def _layout_of(self, params: Sequence[ManagedParam], *, with_flags: bool) -> ShardLayout:
        return ShardLayout.of(
            [stored_shape(p.cut.shape, self.dtype) if self._carries else p.cut.shape for p in params],
            self.mesh.shard_size,
            alignment=self.alignment,
            with_flags=with_flags,
            dims=[p.cut.dim for p in params],
            direct=[self._travels_directly(p.cut) for p in params],
        )

    def _travels_directly(self, cut: Cut) -> bool:
        """Whether a parameter is direct; see [Note: Direct parameters] in `sharding/zero_copy.py`."""
        if not self.is_flat or self._carries or self.home.is_away or self.mesh.levels is not None:
            return False
        size, dtype = self.mesh.shard_size, self.gather_dtype
        return travels_directly(cut.shape, cut.dim, size, alignment=self.alignment, dtype=dtype)

    def local_views(self) -> list[torch.Tensor]:
        """Returns this rank's piece of each parameter, over the shard's memory."""
        stored = self.layout.local_views(self.shard, self.mesh.shard_rank)
        return [from_bytes(view, self.dtype) for view in stored]

    def _forget_derived(self) -> None:
        """Drops what is made on demand from layout, dtypes and trainability."""
        self._unsharded: Recurring | None = None
        self._departure = None
        self._post_forward = None
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
        """Takes note of which parameters require grad; True if that changed since the last call.

        A program may have frozen a whole parameter, as a forward left it; that is meant for the sharded one.
        """
        for p, known in zip(self.params, self._trainable or (), strict=False):
            if p.unsharded is not None and p.unsharded.requires_grad != known:
                p.sharded.requires_grad_(not known)
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

    @property
    def gradient_shard(self) -> GradientShard | None:
        """The gradient shard, if there is one."""
        return self._gradient_shard

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
                self.home,
            )
        return self._gradient_shard

    def memory(self) -> Iterator[tuple[str, torch.UntypedStorage]]:
        """Yields what the group keeps from step to step, with its owner; storage that is gone has 0 bytes."""
        yield "parameters", self.shard.untyped_storage()
        if self._gradient_shard is not None:
            yield "gradients", self._gradient_shard.flat.untyped_storage()
        if self._unsharded is not None:
            for storage in self._unsharded.storages():
                yield "whole parameters", storage
        if self._post_forward is not None:
            yield "post-forward shards", self._post_forward.chunk.untyped_storage()
        if self._departure is not None:
            for storage in self._departure.storages():
                yield "inner shards", storage

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
        if self._kept:
            self._kept_is_wanted = True
            return
        self._runtime = runtime
        source = self._source(runtime)
        self._noted_version = self._version
        gathering = Gathering(source, self.wait_for_unshard)
        gathering.launch(runtime, self.comms, self.wire_dtype, self.name)
        self._gathering = gathering

    @property
    def wire_dtype(self) -> torch.dtype:
        """In which chunks of an all-gather travel."""
        return self.gather_dtype

    def _source(self, runtime: Runtime) -> Source:
        """Returns where the next all-gather starts from, brought up to date."""
        if self.state is ShardState.SHARDED_POST_FORWARD:
            cut = self._post_forward
            if cut is None:
                raise RuntimeError("the post-forward shard is gone")
            return Source(cut.chunk, cut.mesh.shard_group, cut.label, ready=cut.ready)
        if self._departure is None:
            self._departure = Departure(
                self.shard, self.mesh, self.home, self.gather_dtype, self._gather_label, runtime
            )
        source = self._departure.source(self.comms, self.name, self._version)
        return self._with_direct(source) if self.layout.direct and self.comms.gathers_plainly else source

    def _with_direct(self, source: Source) -> Source:
        """Takes the direct parameters out of the chunk, to be gathered into their places."""
        whole, skipped = self._unsharded_params(), self.layout.packed_offset
        whole.lend(self._runtime.streams.gather)
        rest = source.chunk.narrow(0, skipped, self.layout.chunk_numel - skipped)
        return replace(source, chunk=rest, direct=whole.direct)

    def wait_for_unshard(self) -> None:
        """Ends the all-gather: parameters are whole and registered afterwards.

        Streams: the copy-out goes to the current stream, after the gather stream's chunk.

        Raises:
            CollectiveError: the gather failed.
        """
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            self._copy_out(gathering)
        elif self._whole is not None:  # another stream may have copied them out
            self._whole.wait(self._runtime.streams.current())
        if gathering is not None or self._kept_is_wanted:
            self._kept = self._kept_is_wanted = False
            self._show_whole()

    def _copy_out(self, gathering: Gathering) -> None:
        """Puts whole parameters together from the chunks of all ranks."""
        stream = self._runtime.streams.current()
        cut = self._post_forward if self.state is ShardState.SHARDED_POST_FORWARD else None
        layout = self.layout if cut is None else cut.layout
        if gathering.is_direct:
            layout = layout.packed
        with span("all_gather_copy_out", self.name):
            try:
                chunks = gathering.chunks(stream)
                if self.mesh.levels is not None:
                    chunks = in_rank_order(chunks, layout.chunk_numel)
                self._unpack(chunks, layout)
            finally:
                gathering.release(stream)
        self._whole = self._whole or self._runtime.streams.mark()
        self._whole.record(stream)
        if cut is not None:
            cut.free()

    def _show_whole(self) -> None:
        self.state = ShardState.UNSHARDED
        for p in self.params:
            p.register(p.whole)

    def _unpack(self, chunks: Sequence[torch.Tensor], layout: ShardLayout) -> None:
        """Puts whole parameters together from the chunks of all ranks, on the current stream."""
        self._unsharded_params().fill(chunks, layout)

    def _unsharded_params(self) -> UnshardedParams:
        """Returns the whole parameters' memory and faces, made at the first call."""
        if not isinstance(self._unsharded, UnshardedParams):
            streams, device = self._runtime.streams, self.mesh.device
            self._unsharded = UnshardedParams(
                self.params, self.layout, self.shard, self.gather_dtype, device, streams
            )
            self.on_new_unsharded()
        return self._unsharded

    def cancel_unshard(self) -> None:
        """Drops an all-gather nobody will use; waits until its memory is ours again."""
        self._kept_is_wanted = False
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            # The gather has read the shard, which the program may write next.
            gathering.chunks(self._runtime.streams.current())
            gathering.release(self._runtime.streams.gather)
            if gathering.is_direct:
                self._unsharded_params().free()

    def let_host_write(self) -> None:
        """Makes the host wait until its memory has been read, if the shard lives there."""
        if self._departure is not None:
            self._departure.let_host_write()

    # -- reshard ----------------------------------------------------------------------------------------

    def reshard(self, *, for_good: bool = False) -> None:
        """Shows the shards, and frees the whole parameters. A pending all-gather is dropped.

        Args:
            for_good: frees them also if the group's stage keeps them, and forgets what is kept of them
                between steps, so that the next all-gather starts from the shards.

        Streams: storage returns to the allocator on the stream it was allocated on.
        """
        self.cancel_unshard()
        if for_good and self._departure is not None:
            self._departure.forget()
        keeps = self.stage.keeps_whole and not for_good
        if self.state is ShardState.SHARDED and (keeps or not self._kept):
            return
        self._kept = keeps
        if self._unsharded is not None and not keeps:
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
        cut.fill()
        if self._unsharded is not None:
            self._unsharded.free()
        self.state = ShardState.SHARDED_POST_FORWARD
        cut.show()

    def _post_forward_shard(self, mesh: DataParallelMesh) -> PostForwardShard:
        if self._post_forward is None:
            self._post_forward = PostForwardShard(
                self.params,
                mesh,
                self._runtime.streams,
                alignment=self.alignment,
                dtype=self.gather_dtype,
                label=self._regather_label,
            )
        return self._post_forward

    def reshard_if_stale(self) -> None:
        """Reshards whole parameters whose shard was written since they were gathered.

        An optimizer step and an in-place operation on a sharded parameter are noticed, so nobody computes
        with old weights because parameters were kept whole.
        """
        resting = self.state is ShardState.SHARDED and self._gathering is None and not self._kept
        if not resting and self._version != self._noted_version:
            self.reshard(for_good=True)

    @property
    def _version(self) -> tuple[int, int]:
        """Moves with every optimizer step and every in-place operation on a sharded parameter."""
        writes = sum(p.sharded._version + local_of(p.sharded)._version for p in self.params)
        return self.generation, self.steps_taken + writes

    # -- foreign storage --------------------------------------------------------------------------------

    def adopt(self) -> bool:
        """Takes over parameters that the program replaced or moved; see `replaced_params.py`.

        Returns:
            True if anything was taken over: addresses may have changed.
        """
        return self.state is ShardState.SHARDED and adopt(self)

    def refill(self, shown: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        """Copies replacements into the shard, a new one if dtype or device changed, and shows it in them."""
        self.generation += 1
        locals_ = [local_of(p) for p in shown]
        self.let_host_write()
        if dtype != self.dtype or self.shard.device != self.home.device:
            self._set_dtypes(dtype)
            for p in self.params:
                p.unsharded = p.post_forward = None
            self._allocate()
        views = self.local_views()
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
        """Returns the group of the parameters that stay when others move to another one.

        Only while building: the group has never been unsharded. None if nothing stays.
        """
        views = self.local_views()
        staying = [(p, view) for p, view in zip(self.params, views, strict=True) if p not in leaving]
        if not staying:
            return None
        smaller = copy.copy(self)
        smaller.params = [p for p, _ in staying]
        smaller._allocate(on_meta=self.shard.device.type == "meta")
        for (p, old), view in zip(staying, smaller.local_views(), strict=True):
            with torch.no_grad():
                view.copy_(old)
            p.alias(view)
            p.group = smaller
        return smaller
