"""Saves a checkpoint with torch's planner and writer."""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from shardgrad.errors import AsleepError, CheckpointError
from shardgrad.ops.virtual_memory import is_released
from shardgrad.programs.checkpoint.contents import MANIFEST, VERSION, Manifest, require_whole
from shardgrad.programs.checkpoint.files import named_in_errors, write_synced
from shardgrad.programs.checkpoint.folder import published
from shardgrad.programs.checkpoint.peers import Peers
from shardgrad.programs.text import printable
from shardgrad.sharding.dtensor import local_of


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
        CheckpointError: a rank could not write, or the ranks together do not hold an entire
            tensor, or the path is taken; on every rank.

    Streams: reads tensors on the current stream, and waits for it.
    """
    # torch's `save` sends the metadata of all ranks to every rank. So its planner and its writer
    # are called here, as that function calls them.
    peers, planner = Peers(group, where=folder), DefaultSavePlanner()
    writer, files = FileSystemWriter(folder), _SummingFiles()
    writer.fs = files

    def plan() -> SavePlan:
        """Returns what this rank could write."""
        flatten(state)  # refuses what is not data
        planner.set_up_planner(dict(state), is_coordinator=peers.rank == 0)
        return planner.create_local_plan()

    def begin(plans: list[SavePlan]) -> list[tuple[SavePlan, str]]:
        """Decides, on the first rank, which rank writes what, and the name of the folder."""
        plans, metadata = planner.create_global_plan(plans)
        require_whole(metadata)
        aside = publication.enter_context(published(Path(folder)))
        return [(plan, aside.name) for plan in writer.prepare_global_plan(plans)]

    def write() -> tuple[list[WriteResult], Manifest]:
        """Writes what this rank was told to."""
        # This raises if this rank's working directory is gone, which all ranks need to hear of.
        writer.reset(Path(os.path.realpath(folder)).with_name(name))
        planner.finish_plan(part)
        return writer.write_data(part, planner).wait(), files.sums

    def publish(written: list[tuple[list[WriteResult], Manifest]]) -> None:
        """Completes the checkpoint, on the first rank."""
        writer.finish(planner.metadata, [results for results, _ in written])
        for _, others in written:
            files.sums.update(others)
        content = json.dumps({"version": VERSION, "files": files.sums})
        write_synced(Path(writer.path, MANIFEST), content)
        publication.close()
        if then is not None:
            then()

    with ExitStack() as publication:
        part, name = peers.together("plan", plan, begin)
        peers.together("writing", write, publish)


def flatten(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns the leaves of a nested state by their names, which are keys joined by dots.

    Raises:
        CheckpointError: the state has something in it that is not data.
        AsleepError: a tensor's memory is released.
        ValueError: two leaves have one name.
    """
    leaves, _ = flatten_state_dict(dict(state))
    for name, leaf in leaves.items():
        if not isinstance(leaf, torch.Tensor):
            odd = _not_data_in(leaf)
        else:
            is_dense = leaf.layout is torch.strided and not leaf.is_meta
            odd = "" if is_dense else f"a tensor of {leaf.layout} on {leaf.device}"
            if is_dense and is_released(local_of(leaf)):  # of a state dict from before the sleep
                raise AsleepError.of(printable(name))
        if odd:
            raise CheckpointError(
                "a state that is not plain data cannot be saved or loaded",
                expected="dense tensors, numbers, strings, booleans and None in dictionaries and "
                "lists; tuples without tensors",
                got=odd,
                where=printable(name),
                fix="remove it from the state, or represent it by tensors and numbers",
            )
    return leaves


def _not_data_in(value: Any) -> str:
    """Returns what in a value is not data; nothing if all of it is."""
    parts = list(value.values()) if isinstance(value, Mapping) else value
    if type(parts) in (list, tuple):
        return next(filter(None, map(_not_data_in, parts)), "")
    is_data = value is None or type(value) in (bool, int, float, str)
    return "" if is_data else f"an entry of type {type(value).__name__}"


class _SummingFiles(FileSystem):
    """The file system of torch's writer, which also sums up what is written.

    Attributes:
        sums: size and checksum of every file that was written and closed, by name.
    """

    def __init__(self) -> None:
        self.sums: dict[str, tuple[int, int]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Opens a new file for writing."""
        with named_in_errors(path), _SummingStream(io.FileIO(os.fspath(path), "x")) as stream:
            try:
                yield stream
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):
                    # torch's archive writer, which fails once more while it is closed, hides why.
                    raise error.__context__ from None
                raise
        # The metadata is written as `.metadata.tmp`, and then renamed.
        name = Path(path).name.removesuffix(".tmp")
        self.sums[name] = os.path.getsize(path), stream.checksum


class _SummingStream(io.BufferedWriter):
    """Keeps nothing back: torch syncs some files before it flushes them."""

    checksum = 0

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        written = super().write(data)
        self.flush()
        return written
