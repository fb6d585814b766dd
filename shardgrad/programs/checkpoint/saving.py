"""Saves a checkpoint with torch's planner and writer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
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
    peers = Peers(group, where=folder)
    with ExitStack() as at_end:
        write = _Write(folder, then, at_end)
        part = peers.scatter("plan", lambda: write.local_plan(state, peers.rank), write.begin)
        peers.together("writing", lambda: write.write(*part), write.publish)


class _Write:
    """One save on this rank.

    torch's `save` sends the metadata of all ranks to every rank. So its planner and its writer are
    called here, as that function calls them.
    """

    _publication: Publication  # of the first rank

    def __init__(self, folder: Path, then: Callable[[], None] | None, at_end: ExitStack) -> None:
        self._folder = Path(os.path.abspath(folder))
        self._then = then
        self._at_end = at_end
        self._planner = DefaultSavePlanner()

    def local_plan(self, state: Mapping[Any, Any], rank: int) -> SavePlan:
        """Returns what this rank could write."""
        flatten(state)  # refuses what is not data
        self._planner.set_up_planner(dict(state), is_coordinator=rank == 0)
        return self._planner.create_local_plan()

    def begin(self, plans: list[SavePlan]) -> list[tuple[SavePlan, str]]:
        """Decides, on the first rank, which rank writes what, and the name of the folder."""
        plans, self._metadata = self._planner.create_global_plan(plans)
        require_whole(self._metadata)
        self._publication = Publication(self._folder)
        self._at_end.callback(self._publication.abandon)
        aside = self._publication.aside
        return [(plan, aside.name) for plan in FileSystemWriter(aside).prepare_global_plan(plans)]

    def write(self, plan: SavePlan, aside: str) -> tuple[list[WriteResult], manifest.Manifest]:
        """Writes what this rank was told to."""
        self._planner.finish_plan(plan)
        writer, files = _writer(self._folder.with_name(aside))
        return writer.write_data(plan, self._planner).wait(), files.sums

    def publish(self, written: list[tuple[list[WriteResult], manifest.Manifest]]) -> None:
        """Completes the checkpoint, on the first rank."""
        aside = self._publication.aside
        writer, files = _writer(aside)
        writer.finish(self._metadata, [results for results, _ in written])
        sums = dict(files.sums)  # that of the metadata
        for _, others in written:
            sums.update(others)
        manifest.write(aside, sums)
        self._publication.finish()
        if self._then is not None:
            self._then()


def _writer(folder: Path) -> tuple[FileSystemWriter, manifest.SummingFiles]:
    """Returns torch's writer, and its files, which are summed up."""
    writer = FileSystemWriter(folder)
    writer.fs = files = manifest.SummingFiles()
    return writer, files
