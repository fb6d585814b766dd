"""Where the all-gathers of a group start from: this rank's shard, or an inner shard that was made of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardgrad.engine.all_gather import Source
from shardgrad.engine.comm_context import Runtime
from shardgrad.engine.message_tag import Label
from shardgrad.features.custom_comms import Comms
from shardgrad.features.hfsdp import InnerShard
from shardgrad.sharding.mesh import DataParallelMesh
from shardgrad.sharding.offload import Home

__all__ = ["Departure"]


class Departure:
    """A shard as it is sent.

    Args:
        shard: this rank's chunk, 1-D, at home; gets its label, for which the host waits.
        mesh: of the group.
        home: where the shard lives.
        dtype: in which it is gathered.
        label: of the all-gather.
        runtime: of the root.
    """

    def __init__(
        self,
        shard: torch.Tensor,
        mesh: DataParallelMesh,
        home: Home,
        dtype: torch.dtype,
        label: Label,
        runtime: Runtime,
    ) -> None:
        departed = runtime.streams.mark() if home.is_away else None
        levels = mesh.levels
        group = mesh.shard_group if levels is None else levels.outer
        self._source = Source(shard, group, label, departed=departed)
        self._source.write_label()
        self._inner = None if levels is None else InnerShard(levels, shard.numel(), dtype, label, runtime)

    def source(self, comms: Comms, name: str, version: object) -> Source:
        """Returns where the next all-gather starts from, brought up to date.

        Args:
            comms: what carries the messages.
            name: of the unit, for traces.
            version: of the parameters.

        Streams: over two levels, and if the version is another, the gather stream gathers over the outer one.
        """
        if self._inner is None:
            return self._source
        if self._inner.version != version:
            self._inner.fill(self._source, comms, name, version)
        return self._inner.source

    def forget(self) -> None:
        """Forgets what is kept of the parameters between steps."""
        if self._inner is not None:
            self._inner.version = None

    def let_host_write(self) -> None:
        """Makes the host wait until its memory has been read, if the shard lives there."""
        if self._source.departed is not None:
            self._source.departed.wait_on_host()

    def storages(self) -> Iterator[torch.UntypedStorage]:
        """Yields what is kept besides the shard."""
        if self._inner is not None:
            yield self._inner.source.chunk.untyped_storage()
