"""Saves a checkpoint with torch's planner and writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from shardgrad.programs.checkpoint import manifest
from shardgrad.programs.checkpoint.folder import Publication
from shardgrad.programs.checkpoint.metadata import require_whole
from shardgrad.programs.checkpoint.peers import Peers
from shardgrad.programs.checkpoint.state import flatten


def save(
    state: Mapping[Any, Any],
    folder: Path | str,
    *,
    group: dist.ProcessGroup | None = None,
    then: Callable[[], None] | None = None,
) -> None:
    """Saves a state in the format of `torch.distributed.checkpoint`. A collective of all ranks of a
    group.

    The folder is created when all its data is on the disk.

    Args:
        state: nested dictionaries and lists of tensors, numbers, strings, booleans and None, and
            tuples without tensors. Of a DTensor each rank saves its shard; of what several ranks
            have under one name, one of them saves its own.
        folder: path of the checkpoint, a new one, on a disk visible to all ranks.
        group: the ranks that share the checkpoint; None is the default group, or this process
            alone.
        then: called on the first rank after the folder is complete; if it raises, all ranks raise.

    Raises:
        CheckpointError: the state has an entry that is not data; on every rank.
        CheckpointSaveError: a rank could not write, or the ranks together do not hold an entire
            tensor, or the path is taken; on every rank.

    Streams: reads tensors on the current stream, and waits for it.
    """
    folder = Path(folder)
    write = _Write(folder, then)
    peers = Peers(group, where=folder)
    try:
        plan = peers.scatter("plan", lambda: write.local_plan(state, peers.rank), write.begin)
        peers.together("writing", lambda: write.write(plan), write.publish)
    except BaseException:
        write.publication.abandon()
        raise


class _Write:
    """One save on this rank.

    torch's `save` sends the metadata of all ranks to every rank. So its planner and its writer are
    called here, as that function calls them.
    """

    def __init__(self, folder: Path, then: Callable[[], None] | None) -> None:
        self._then = then
        self.publication = Publication(folder)
        self._planner = DefaultSavePlanner()
        self._writer = FileSystemWriter(self.publication.aside)
        self._writer.fs = self._files = manifest.SummingFiles()

    def local_plan(self, state: Mapping[Any, Any], rank: int) -> SavePlan:
        """Returns what this rank could write."""
        flatten(state)  # refuses what is not data
        self._planner.set_up_planner(dict(state), is_coordinator=rank == 0)
        self._writer.set_up_storage_writer(rank == 0)
        return self._planner.create_local_plan()

    def begin(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Decides, on the first rank, which rank writes what."""
        plans, self._metadata = self._planner.create_global_plan(plans)
        require_whole(self._metadata)
        self.publication.begin()
        return self._writer.prepare_global_plan(plans)

    def write(self, plan: SavePlan) -> tuple[list[WriteResult], manifest.Manifest]:
        """Writes what this rank was told to."""
        self._planner.finish_plan(plan)
        results = self._writer.write_data(plan, self._planner).wait()
        return results, self._files.sums

    def publish(self, written: list[tuple[list[WriteResult], manifest.Manifest]]) -> None:
        """Completes the checkpoint, on the first rank."""
        self._writer.finish(self._metadata, [results for results, _ in written])
        sums = {**self._files.sums}  # with that of the metadata
        for _, files in written:
            sums.update(files)
        manifest.write(self.publication.aside, sums)
        self.publication.finish()
        if self._then is not None:
            self._then()
