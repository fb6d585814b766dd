"""Saves a checkpoint with torch's planner and writer, at once or in the background from a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from shardgrad.errors import CheckpointSaveError
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

    The folder is created, or replaces an existing checkpoint, when all its data is on the disk.

    Args:
        state: nested dictionaries and lists of tensors, numbers, strings, booleans and None, and
            tuples without tensors. Of a DTensor each rank saves its shard; of what several ranks
            have under one name, one of them saves its own.
        folder: path of the checkpoint, on a disk visible to all ranks.
        group: the ranks that share the checkpoint; None is the default group, or this process
            alone.
        then: called on the first rank after the folder is complete; if it raises, all ranks raise.

    Raises:
        CheckpointError: the state has an entry that is not data; on every rank.
        CheckpointSaveError: a rank could not write, or the ranks together do not hold an entire
            tensor; on every rank. An existing checkpoint is unchanged.

    Streams: reads tensors on the current stream, and waits for it.
    """
    folder = Path(folder)
    write = _Write(folder, Peers(group, where=folder), then)
    write.plan(state)
    write()


def save_async(
    state: Mapping[Any, Any],
    folder: Path | str,
    *,
    group: dist.ProcessGroup | None = None,
    then: Callable[[], None] | None = None,
) -> Future[None]:
    """Like :func:`save`, but returns when the state is copied to the host; a thread writes the
    copy.

    The checkpoint has the state at the time of the call.

    Args:
        state: as for `save`; the copy takes host memory for the part that this rank writes.
        folder: path of the checkpoint, on a disk visible to all ranks.
        group: a group that nothing else uses before the save has ended, such as
            `dist.new_group(backend="gloo")`. None only for one process.
        then: as for `save`, called on the thread.

    Returns:
        The running save, whose `result()` waits for the checkpoint.

    Raises:
        CheckpointError, CheckpointSaveError: an error before the copy is complete, on every rank.
            `result()` raises later errors.
    """
    folder = Path(folder)
    peers = Peers(group, where=folder)
    if group is None and peers.count > 1:
        raise CheckpointSaveError(
            "an asynchronous save needs a separate process group",
            expected='group=dist.new_group(backend="gloo")',
            got="None, which training uses at the same time",
            fix="create a group once, and pass it to every save_async",
        )
    write = _Write(folder, peers, then)
    write.plan(state)
    write.copy()
    thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    saving = thread.submit(write)
    thread.shutdown(wait=False)  # after what was submitted; a process that ends waits for it too
    return saving


class _Write:
    """One save on this rank. Each method is a collective, which raises on all ranks or on none.

    torch's `save` sends the metadata of all ranks to every rank. So its planner and its writer are
    called here, as that function calls them.
    """

    def __init__(self, folder: Path, peers: Peers, then: Callable[[], None] | None) -> None:
        self.peers = peers
        self._then = then
        self._publication = Publication(folder)
        self._planner = _Planner()
        self._writer = FileSystemWriter(self._publication.aside)
        self._writer.fs = self._files = manifest.SummingFiles()

    def plan(self, state: Mapping[Any, Any]) -> None:
        """Decides which rank writes what."""
        with self._abandoned_on_failure():
            plan = self.peers.scatter("plan", lambda: self._local_plan(state), self._begin)
            self._planner.finish_plan(plan)

    def copy(self) -> None:
        """Copies what this rank writes."""
        with self._abandoned_on_failure():
            self.peers.together("copy", self._planner.copy)

    def __call__(self) -> None:
        """Writes and publishes."""
        with self._abandoned_on_failure():
            self.peers.together("writing", self._write, self._publish)

    def _local_plan(self, state: Mapping[Any, Any]) -> SavePlan:
        flatten(state)  # refuses what is not data
        self._planner.set_up_planner(dict(state), is_coordinator=self.peers.rank == 0)
        self._writer.set_up_storage_writer(self.peers.rank == 0)
        return self._planner.create_local_plan()

    def _begin(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans, self._metadata = self._planner.create_global_plan(plans)
        require_whole(self._metadata)
        self._publication.begin()
        return self._writer.prepare_global_plan(plans)

    def _write(self) -> tuple[list[WriteResult], manifest.Manifest]:
        results = self._writer.write_data(self._planner.plan, self._planner).wait()
        return results, self._files.sums

    def _publish(self, written: list[tuple[list[WriteResult], manifest.Manifest]]) -> None:
        self._writer.finish(self._metadata, [results for results, _ in written])
        sums = {**self._files.sums}  # with that of the metadata
        for _, files in written:
            sums.update(files)
        manifest.write(self._publication.aside, sums)
        self._publication.finish()
        if self._then is not None:
            self._then()

    @contextmanager
    def _abandoned_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._publication.abandon()
            raise


class _Planner(DefaultSavePlanner):
    """torch's planner, which may copy what this rank writes before it is written."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[MetadataIndex, Any] = {}

    def copy(self) -> None:
        """Copies to the host what the plan of this rank has."""
        self._copies = {item.index: _copied(self.resolve_data(item)) for item in self.plan.items}
        self.state_dict = {}

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Returns the copy of an entry, or the entry."""
        if write_item.index in self._copies:
            return self._copies[write_item.index]
        return super().resolve_data(write_item)


def _copied(data: Any) -> Any:
    return data.detach().to("cpu", copy=True) if isinstance(data, Tensor) else data
