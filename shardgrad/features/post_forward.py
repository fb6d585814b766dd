"""`reshard_after_forward` as an int: between forward and backward, parameters are sharded over
fewer ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import increment_version

from shardgrad.engine.buffers import RecurringMemory
from shardgrad.engine.comm_context import CommContext
from shardgrad.engine.param_group import (
    POST_FORWARD,
    SHARDED,
    UNSHARDED,
    AllGather,
    FSDPParam,
    ParamGroup,
    mark,
    versions_of,
    warn_of_lost_writes,
)
from shardgrad.sharding.layout import ShardLayout
from shardgrad.sharding.mesh import DataParallelMesh
from shardgrad.sharding.param_sharding import sharding_of


@dataclass(eq=False)
class PostForwardGather(AllGather):
    """This rank's chunk of a group over the smaller mesh, allocated from `fill` to `free`.

    Attributes:
        params: the parameters in order. Their parameters over an earlier chunk are dropped.
    """

    params: Sequence[FSDPParam] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._memory = RecurringMemory([self.chunk], self.streams)
        self.ready = self._memory.filled
        with torch.inference_mode(mode=False):
            self._views = self.layout.local_views(self.chunk, self.mesh.shard_rank)
        # `requires_grad` and version counters of the parameters over this chunk when `register`
        # ran.
        self._trained = [False] * len(self.params)
        self._versions: tuple[int, ...] = ()
        for p in self.params:
            p.post_forward = None

    @torch.no_grad()
    def fill(self) -> None:
        """Copies this rank's rows out of the unsharded parameters.

        Streams: on the current one.
        """
        self._memory.allocate()
        rank = self.mesh.shard_rank
        for p, view, piece in zip(self.params, self._views, self.layout.pieces, strict=True):
            view.copy_(piece.of(p.require_unsharded().detach(), rank))
        self._memory.filled.record(self.streams.current())

    def register(self) -> None:
        """Registers the parameters over this chunk on their modules."""
        for p, view in zip(self.params, self._views, strict=True):
            with torch.inference_mode(
                mode=False
            ):  # for training, even if an evaluation comes first
                if p.post_forward is None:
                    unsharded = p.require_unsharded()
                    sharding = sharding_of(unsharded, p.name, self.mesh, p.sharding.dim)
                    local = sharding.sharded_dtensor(view)
                    p.post_forward = nn.Parameter(local, requires_grad=p.sharded.requires_grad)
                    mark(p.post_forward, p)
                p.post_forward.requires_grad_(p.sharded.requires_grad)
            p.register(p.post_forward)
        self._trained = [p.sharded.requires_grad for p in self.params]
        self._versions = versions_of(self._registered())

    def _registered(self) -> list[nn.Parameter]:
        return [p.post_forward for p in self.params if p.post_forward is not None]

    def written(self) -> list[FSDPParam]:
        """Returns the parameters whose part over this chunk the program has written since
        `register`.
        """
        versions = zip(self.params, versions_of(self._registered()), self._versions, strict=True)
        return [p for p, now, then in versions if now != then]

    def follow(self) -> None:
        """Copies `requires_grad` from the parameters over this chunk to the sharded ones."""
        for p, was in zip(self.params, self._trained, strict=True):
            if p.post_forward is not None and p.post_forward.requires_grad != was:
                p.sharded.requires_grad_(not was)

    def free(self) -> None:
        """Frees the memory after the last use on the current stream."""
        self._memory.free()


class PostForwardGroup(ParamGroup):
    """A group that reshards to fewer ranks after forward."""

    def _forget_derived(self) -> None:
        super()._forget_derived()
        self._smaller: PostForwardGather | None = None

    def reshard_after_forward(self) -> None:
        """Reshards to fewer ranks."""
        mesh = self.spec.mesh_after_forward
        if mesh is None:
            self.reshard()
        elif self.state is UNSHARDED and self.gather is not None:
            smaller = self._smaller_gather(self.gather.comm_ctx, mesh)
            smaller.fill()
            self.reshard()
            smaller.register()
            self.state = POST_FORWARD

    def show_sharded(self) -> None:
        """See `ParamGroup`."""
        super().show_sharded()
        if self._smaller is not None and self.state is POST_FORWARD:
            self.state = SHARDED
            if written := self._smaller.written():
                warn_of_lost_writes(written)
            self._smaller.follow()
            self._smaller.free()
            for p in self.params:
                p.register(p.sharded)

    def _smaller_gather(self, comm_ctx: CommContext, mesh: DataParallelMesh) -> PostForwardGather:
        smaller = self._smaller
        made_for = None if smaller is None else (smaller.comm_ctx, smaller.collectives)
        if smaller is None or made_for != (comm_ctx, self.collectives):
            shardings = [p.sharding for p in self.params]
            layout = ShardLayout.of(
                [sharding.shape for sharding in shardings],
                mesh.shard_size,
                alignment=self.alignment,
                with_flags=False,
                dims=[sharding.dim for sharding in shardings],
            )
            dtype = self.gather_dtype
            with torch.inference_mode(mode=False):
                chunk = torch.empty(layout.chunk_numel, dtype=dtype, device=mesh.device)
            smaller = self._smaller = PostForwardGather(
                chunk,
                layout,
                mesh,
                dtype,
                self._regather_tag,
                comm_ctx,
                self.collectives,
                params=self.params,
            )
        return smaller

    def _launch(self, comm_ctx: CommContext, version: object) -> AllGather:
        if self._smaller is not None and self.state is POST_FORWARD:
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
