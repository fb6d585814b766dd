"""`reshard_after_forward` as an int: between forward and backward, parameters are sharded over
fewer ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.autograd.graph import increment_version

from shardgrad.engine.buffers import RecurringMemory
from shardgrad.engine.comm_context import CollectiveConfig, CommContext
from shardgrad.engine.param import FSDPParam, mark_post_forward
from shardgrad.engine.param_group import (
    AllGather,
    GroupSpec,
    ParamGroup,
    ParamState,
    versions_of,
    warn_of_lost_writes,
)
from shardgrad.engine.transports import MessageTag
from shardgrad.sharding.layout import ShardLayout
from shardgrad.sharding.mesh import DataParallelMesh
from shardgrad.sharding.param_sharding import sharding_of

__all__ = ["PostForwardGroup"]


class PostForwardGather(AllGather):
    """This rank's chunk of a group over the smaller mesh, allocated from `fill` to `free`.

    Args:
        params: the parameters in order. Their parameters over an earlier chunk are dropped.
        layout: the layout of the chunk.
        mesh: the mesh of the neighbouring ranks.
        dtype: the dtype of the unsharded parameters.
        tag: the tag of the all-gather from this chunk.
        comm_ctx: the root's communication context.
        collectives: the collectives that send the message.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        layout: ShardLayout,
        mesh: DataParallelMesh,
        dtype: torch.dtype,
        tag: MessageTag,
        comm_ctx: CommContext,
        collectives: CollectiveConfig,
    ) -> None:
        self._mesh = mesh
        self._params = params
        self._streams = comm_ctx.streams
        with torch.inference_mode(mode=False):
            chunk = torch.empty(layout.chunk_numel, dtype=dtype, device=mesh.device)
        super().__init__(chunk, layout, mesh, dtype, tag, comm_ctx, collectives)
        self._memory = RecurringMemory([chunk], comm_ctx.streams)
        self.ready = self._memory.filled
        with torch.inference_mode(mode=False):
            self._views = layout.local_views(self.chunk, mesh.shard_rank)
        # `requires_grad` and version counters of the parameters over this chunk when `register`
        # ran.
        self._trained = [False] * len(params)
        self._versions: tuple[int, ...] = ()
        for p in params:
            p.post_forward = None

    @torch.no_grad()
    def fill(self) -> None:
        """Copies this rank's rows out of the unsharded parameters.

        Streams: on the current one.
        """
        self._memory.allocate()
        rank = self._mesh.shard_rank
        for p, view, piece in zip(self._params, self._views, self.layout.pieces, strict=True):
            view.copy_(piece.of(p.require_unsharded().detach(), rank))
        self._memory.filled.record(self._streams.current())

    def register(self) -> None:
        """Registers the parameters over this chunk on their modules."""
        for p, view in zip(self._params, self._views, strict=True):
            with torch.inference_mode(
                mode=False
            ):  # for training, even if an evaluation comes first
                if p.post_forward is None:
                    sharding = sharding_of(
                        p.require_unsharded(), p.name, self._mesh, p.sharding.dim
                    )
                    local = sharding.sharded_dtensor(view)
                    p.post_forward = nn.Parameter(local, requires_grad=p.sharded.requires_grad)
                    mark_post_forward(p)
                p.post_forward.requires_grad_(p.sharded.requires_grad)
            p.register(p.post_forward)
        self._trained = [p.sharded.requires_grad for p in self._params]
        self._versions = versions_of(self._registered())

    def _registered(self) -> list[nn.Parameter]:
        return [p.post_forward for p in self._params if p.post_forward is not None]

    def written(self) -> list[FSDPParam]:
        """Returns the parameters whose part over this chunk the program has written since
        `register`.
        """
        versions = zip(self._params, versions_of(self._registered()), self._versions, strict=True)
        return [p for p, now, then in versions if now != then]

    def follow(self) -> None:
        """Copies `requires_grad` from the parameters over this chunk to the sharded ones."""
        for p, was in zip(self._params, self._trained, strict=True):
            if p.post_forward is not None and p.post_forward.requires_grad != was:
                p.sharded.requires_grad_(not was)

    def free(self) -> None:
        """Frees the memory after the last use on the current stream."""
        self._memory.free()

    def memory(self) -> Iterator[tuple[str, torch.UntypedStorage]]:
        """See `AllGather`."""
        yield "post-forward shards", self.chunk.untyped_storage()


class PostForwardGroup(ParamGroup):
    """A group that reshards to fewer ranks after forward.

    Args:
        params: see `ParamGroup`.
        spec: see `ParamGroup`.
        mesh_after_forward: the neighbouring ranks; None to reshard fully.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        spec: GroupSpec,
        mesh_after_forward: DataParallelMesh | None,
    ) -> None:
        self.mesh_after_forward = mesh_after_forward
        self._smaller: PostForwardGather | None = None
        self._is_over_fewer = False  # modules register the parameters over fewer ranks
        super().__init__(params, spec)

    def _rebuilt(self, params: Sequence[FSDPParam]) -> ParamGroup:
        return PostForwardGroup(params, self.spec, self.mesh_after_forward)

    def _forget_derived(self) -> None:
        super()._forget_derived()
        self._smaller = None

    def memory(self) -> Iterator[tuple[str, torch.UntypedStorage]]:
        """See `ParamGroup`."""
        yield from super().memory()
        if self._smaller is not None:
            yield from self._smaller.memory()

    @property
    def registers_sharded(self) -> bool:
        """See `ParamGroup`."""
        return super().registers_sharded and not self._is_over_fewer

    def reshard_after_forward(self) -> None:
        """Reshards to fewer ranks."""
        if self.mesh_after_forward is None:
            self.reshard()
        elif self.state is ParamState.UNSHARDED and self._gather is not None:
            smaller = self._smaller_gather(self._gather.comm_ctx, self.mesh_after_forward)
            smaller.fill()
            self.reshard()
            smaller.register()
            self._is_over_fewer = True

    def reshard(self, *, drop_kept: bool = False) -> None:
        """See `ParamGroup`."""
        super().reshard(drop_kept=drop_kept)
        if self._smaller is not None and self._is_over_fewer:
            self._is_over_fewer = False
            if written := self._smaller.written():
                warn_of_lost_writes(written)
            self._smaller.follow()
            self._smaller.free()
            for p in self.params:
                p.register(p.sharded)

    def reshard_fully_after_forward(self) -> None:
        """See `ParamGroup`."""
        self.mesh_after_forward = None

    def _smaller_gather(self, comm_ctx: CommContext, mesh: DataParallelMesh) -> PostForwardGather:
        if self._smaller is None or self._smaller.comm_ctx is not comm_ctx:
            shardings = [p.sharding for p in self.params]
            layout = ShardLayout.of(
                [sharding.shape for sharding in shardings],
                mesh.shard_size,
                alignment=self.alignment,
                with_flags=False,
                dims=[sharding.dim for sharding in shardings],
            )
            dtype, tag = self.gather_dtype, self._regather_tag
            self._smaller = PostForwardGather(
                self.params, layout, mesh, dtype, tag, comm_ctx, self.collectives
            )
        return self._smaller

    def _launch(self, comm_ctx: CommContext, version: tuple[int, int]) -> AllGather:
        if self._smaller is not None and self._is_over_fewer:
            self._smaller.follow()
            self._smaller.launch(self.name, version, self.wait_for_unshard)
            return self._smaller
        return super()._launch(comm_ctx, version)

    def _fill(self, gathered: torch.Tensor, gather: AllGather) -> None:
        super()._fill(gathered, gather)
        if isinstance(gather, PostForwardGather):
            # The unsharded parameters now have the program's writes to the fewer ranks' rows.
            # `take_writes` copies these into the shard.
            increment_version([p.require_unsharded() for p in gather.written()])
            gather.free()
            self._is_over_fewer = False
