"""Loads a checkpoint into an existing state, on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from shardgrad.checkpoint.peers import Peers
from shardgrad.checkpoint.plan import Holding, holdings
from shardgrad.checkpoint.safetensors import INDEX_FILE, ONE_FILE, SafetensorsSource
from shardgrad.checkpoint.source import COMPLETE, NativeSource, Source
from shardgrad.checkpoint.text import listed, printable
from shardgrad.checkpoint.torch_format import METADATA, TorchSource
from shardgrad.checkpoint.tree import Value, rebuild
from shardgrad.errors import CheckpointError

__all__ = ["load", "open_checkpoint"]

_State = TypeVar("_State", bound=Mapping[Any, Any])


def open_checkpoint(folder: Path | str) -> Source:
    """Opens a checkpoint of shardgrad, of `torch.distributed.checkpoint`, or `safetensors` files
    for reading.

    Args:
        folder: folder of the checkpoint.

    Returns:
        A context manager with `tensors`, `values`, and `read(name)`.

    Raises:
        CheckpointError: there is no checkpoint, or it is incomplete, damaged, or contains more than
            data.
    """
    folder = Path(folder)
    if (folder / METADATA).exists() and not (folder / COMPLETE).exists():
        return TorchSource(folder)
    if not (folder / COMPLETE).exists() and any(
        (folder / name).exists() for name in (ONE_FILE, INDEX_FILE)
    ):
        return SafetensorsSource(folder)
    if not folder.is_dir() or not (folder / COMPLETE).exists():
        raise CheckpointError(
            "there is no complete checkpoint",
            expected=f"a folder with a file {COMPLETE} (of shardgrad) or {METADATA} (of torch)",
            got="another folder, or one whose writing was interrupted"
            if folder.is_dir()
            else "no folder",
            where=printable(folder),
            fix="correct the path, or take an older checkpoint",
        )
    return NativeSource(folder)


def load(
    state: _State,
    folder: Path | str,
    *,
    optional: Sequence[str] = (),
    verify: bool = True,
    group: dist.ProcessGroup | None = None,
) -> _State:
    """Loads a checkpoint into the tensors of a state. A collective of all ranks of a group.

    Everything is checked before anything is changed: names, shapes, sizes of files, and with
    `verify` every byte that will be read. The number of ranks and the sharding may differ from
    those of the save.

    Args:
        state: a state of the structure that was saved. Its tensors are filled in place and keep
            their dtypes, so captured graphs stay valid.
        folder: a checkpoint of shardgrad or of `torch.distributed.checkpoint`, or `safetensors`
            files.
        optional: shell patterns of names that may be missing on either side; `("*",)` loads the
            names that both sides have.
        verify: read everything twice, to verify checksums before the first tensor is changed.
        group: the ranks that load; None is the default group, or this process alone.

    Returns:
        The state with the same tensors and the checkpoint's other values.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, or does not fit; names the entries
            that are missing, unexpected or of another shape. The same on every rank; nothing was
            changed.

    Streams: writes on the current stream. Host memory: see `Source.fill`.
    """
    peers = Peers(group)
    wanted, values = peers.together("state", lambda: holdings(state))
    source = peers.together("opening", lambda: open_checkpoint(folder))
    with source:
        _refuse_different(peers, source)
        fit = peers.together("fit", lambda: _fit(source, wanted, values, optional))
        _refuse_left_over(peers, source, {*wanted, *values}, optional)
        if verify:
            peers.together(
                "verification",
                lambda: [source.check(name, held.box) for name, held in fit.tensors.items()],
            )
        with torch.no_grad():
            peers.together("reading", lambda: _fill(source, fit.tensors))
    loaded: _State = rebuild(state, fit.values)
    return loaded


@dataclass(frozen=True)
class _Fit:
    tensors: Mapping[str, Holding]
    values: Mapping[str, Value]


def _fit(
    source: Source,
    wanted: Mapping[str, Holding],
    values: Mapping[str, Value],
    optional: Sequence[str],
) -> _Fit:
    """Returns what will be loaded on this rank, after comparing names, shapes and kinds of
    dtypes.
    """
    required = [name for name in (*wanted, *values) if not _matches(name, optional)]
    missing = [
        name for name in required if name not in source.tensors and name not in source.values
    ]
    if missing:
        raise _misfit(
            source, "the checkpoint lacks entries", f"entries for {listed(missing)}", "nothing"
        )
    odd = [
        words for name, held in wanted.items() if (words := _oddity(source, name, held)) is not None
    ]
    odd += [
        f"{printable(name)} is a tensor, not a value" for name in values if name in source.tensors
    ]
    if odd:
        raise _misfit(
            source, "entries are of another shape or kind", "those of the state", listed(odd)
        )
    return _Fit(
        {name: held for name, held in wanted.items() if name in source.tensors and held.box.numel},
        {name: source.values[name] for name in values if name in source.values},
    )


def _oddity(source: Source, name: str, held: Holding) -> str | None:
    """Returns why a tensor of the checkpoint does not fit; None if it does."""
    entry = source.tensors.get(name)
    if entry is None:
        return f"{printable(name)} is a value, not a tensor" if name in source.values else None
    if entry.shape != held.shape:
        return f"{printable(name)} has shape {entry.shape} for {held.shape}"
    if _kind(entry.dtype) != _kind(held.local.dtype):
        return f"{printable(name)} has {entry.dtype} for {held.local.dtype}"
    return None


def _refuse_different(peers: Peers, source: Source) -> None:
    """Checks that all ranks have opened the same checkpoint: a machine may see an older folder."""
    opened = peers.all_gather("identity", (source.identity, printable(source.folder)))
    others = [
        (rank, where) for rank, (identity, where) in enumerate(opened) if identity != opened[0][0]
    ]
    if others:
        rank, where = others[0]
        raise CheckpointError(
            "ranks would load different checkpoints",
            expected=f"the one that the first rank has opened, {opened[0][1]}",
            got=f"another one on rank {rank} of those that load",
            where=where,
            fix="a disk that all ranks see alike; try again if it was written a moment ago",
        )


def _fill(source: Source, tensors: Mapping[str, Holding]) -> None:
    for name, held in tensors.items():
        source.fill(name, held.box, held.local)
        # So that autograd and the engine notice the change: a DTensor and its local tensor count
        # separately.
        increment_version(held.tensor)


def _refuse_left_over(
    peers: Peers, source: Source, mine: set[str], optional: Sequence[str]
) -> None:
    """Checks that every entry of the checkpoint is in the state of some rank."""
    names = sorted({*source.tensors, *source.values})
    # One bit for each name: every rank has read the same list.
    asked = sum(1 << i for i, name in enumerate(names) if name in mine)
    by_any_rank = 0
    for bits in peers.all_gather("names", asked):
        by_any_rank |= bits
    left = [
        name
        for i, name in enumerate(names)
        if not by_any_rank >> i & 1 and not _matches(name, optional)
    ]
    if left:
        raise _misfit(
            source, "the checkpoint has unexpected entries", "none", f"also {listed(left)}"
        )


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating-point"
    return "bool" if dtype is torch.bool else "integer"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _misfit(source: Source, what: str, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint does not fit, and nothing was loaded: {what}",
        expected=expected,
        got=got,
        where=printable(source.folder),
        fix="build the model and the optimizer that were saved; or, where a difference is meant, "
        "name it "
        "in `optional`",
    )
