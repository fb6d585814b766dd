"""A model of what a power failure leaves of a folder.

A file system promises little: what `fsync` was called for is there. Of everything else, any part
may be missing: the bytes of a file, or some of them; the name of a new file; one of two renames,
the later without the earlier. A `PowerCut` stands between a program and its folder, remembers what
was synced, and before each change of the folder makes folders as a failure at this moment could
have left them, for a check.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

__all__ = ["PowerCut"]

_RANDOM = 4  # drawn folders for each moment, after those that are chosen


@dataclass(eq=False)
class _Node:
    """A file, or a folder if it has entries.

    Attributes:
        entries: of a folder, by name, as the program sees them.
        durable: of a folder, what is on the disk.
        content: of a file, as the program has written it.
        synced: of a file, what is on the disk; None if nothing is.
    """

    entries: dict[str, _Node] | None = None
    durable: dict[str, _Node] = field(default_factory=dict)
    content: bytes = b""
    synced: bytes | None = None


@dataclass(frozen=True)
class _Change:
    """Names in a folder that have changed together: given to something, or (None) taken away from
    it.
    """

    folder: _Node
    names: tuple[tuple[str, _Node, bool], ...]

    def apply(self, entries: dict[str, _Node]) -> None:
        for name, node, is_there in self.names:
            if is_there:
                entries[name] = node
            elif entries.get(name) is node:
                del entries[name]


class PowerCut:
    """Watches a folder, in a `with` block.

    Args:
        root: the folder; empty.
        check: is called with a folder as a power failure could have left this one; raises if it is
            wrong.
        scratch: where those folders are made.

    Attributes:
        moments: how many changes there were.
        folders: how many folders were checked.
    """

    def __init__(
        self,
        root: Path,
        check: Callable[[Path], None],
        scratch: Path,
    ) -> None:
        self._path = root
        self._root = _Node(entries={})
        self._pending: list[_Change] = []
        self._check = check
        self._scratch = scratch
        self._numbers = count()
        self._draw = random.Random(0)
        self._is_checking = False  # what a check does is not watched
        self.moments = self.folders = 0

    @contextmanager
    def watching(self) -> Iterator[PowerCut]:
        real = {
            name: getattr(os, name) for name in ("fsync", "rename", "replace", "unlink", "rmdir")
        }

        def fsync(descriptor: int) -> None:
            if self._is_checking:
                return
            self.cut()
            real["fsync"](descriptor)
            self._synced(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

        def moving(function: Callable[..., None]) -> Callable[..., None]:
            def move(source: Any, target: Any, **options: Any) -> None:
                if self._is_checking:
                    function(source, target, **options)
                    return
                self.cut()
                function(source, target, **options)
                self._moved(Path(source), Path(target))

            return move

        def removing(function: Callable[..., None]) -> Callable[..., None]:
            def remove(path: Any, *, dir_fd: int | None = None) -> None:
                if self._is_checking:
                    function(path, dir_fd=dir_fd)
                    return
                self.cut()
                where = (
                    Path(path)
                    if dir_fd is None
                    else Path(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
                )
                function(path, dir_fd=dir_fd)
                self._removed(where)

            return remove

        with (
            mock.patch.object(os, "fsync", fsync),
            mock.patch.object(os, "rename", moving(real["rename"])),
            mock.patch.object(os, "replace", moving(real["replace"])),
            mock.patch.object(os, "unlink", removing(real["unlink"])),
            mock.patch.object(os, "rmdir", removing(real["rmdir"])),
        ):
            yield self
            self.cut()

    def cut(self) -> None:
        """Checks what a power failure now could leave."""
        self._notice(self._path, self._root)
        self.moments += 1
        changes = self._pending
        chosen: list[tuple[list[_Change], str]] = [
            *(([], contents) for contents in ("synced", "written")),
            *((list(changes), contents) for contents in ("synced", "written", "zeros")),
        ]
        for _ in range(_RANDOM if changes else 0):
            one = self._draw.choice(changes)
            some = [change for change in changes if self._draw.random() < 0.5]
            others = [change for change in changes if change is not one]
            chosen.append((self._draw.choice((some, others, [one])), "any"))
        self._is_checking = True
        for some, contents in chosen:
            folder = self._scratch / str(next(self._numbers))
            self._make(folder, self._root, set(map(id, some)), contents)
            self.folders += 1
            self._check(folder)
            shutil.rmtree(folder)
        self._is_checking = False

    def _make(self, path: Path, node: _Node, chosen: set[int], contents: str) -> None:
        path.mkdir()
        entries = dict(node.durable)
        for change in self._pending:
            if change.folder is node and id(change) in chosen:
                change.apply(entries)
        for name, child in entries.items():
            if child.entries is not None:
                self._make(path / name, child, chosen, contents)
            else:
                (path / name).write_bytes(self._left_of(child, contents))

    def _left_of(self, file: _Node, contents: str) -> bytes:
        synced, written = file.synced or b"", file.content
        if synced == written:
            return written
        kind = (
            self._draw.choice(("synced", "written", "zeros", "torn"))
            if contents == "any"
            else contents
        )
        if kind == "zeros":  # the size has changed, the bytes have not been written
            return synced + bytes(max(0, len(written) - len(synced)))
        if kind == "torn":
            return written[: self._draw.randrange(len(written) + 1)]
        return synced if kind == "synced" else written

    # -- what the program does

    def _notice(self, path: Path, folder: _Node) -> None:
        """Finds what has been made or written since the last moment."""
        assert folder.entries is not None
        for entry in os.scandir(path):
            node = folder.entries.get(entry.name)
            if node is None:
                node = _Node(entries={} if entry.is_dir() else None)
                folder.entries[entry.name] = node
                self._pending.append(_Change(folder, ((entry.name, node, True),)))
            if node.entries is None:
                node.content = Path(entry.path).read_bytes()
            else:
                self._notice(Path(entry.path), node)

    def _found(self, path: Path) -> _Node | None:
        """Returns what is watched at a path; None outside."""
        if not path.is_relative_to(self._path):
            return None
        node = self._root
        for name in path.relative_to(self._path).parts:
            assert node.entries is not None
            node = node.entries[name]
        return node

    def _synced(self, path: Path) -> None:
        node = self._found(path)
        if node is None:
            return
        if node.entries is None:
            node.synced = node.content
        else:
            node.durable = dict(node.entries)
            self._pending = [change for change in self._pending if change.folder is not node]

    def _moved(self, source: Path, target: Path) -> None:
        folder = self._found(source.parent)
        if folder is None:
            return
        assert folder is self._found(target.parent), "a rename from folder to folder is not modeled"
        assert folder.entries is not None
        node = folder.entries.pop(source.name)
        folder.entries[target.name] = node
        self._pending.append(
            _Change(folder, ((source.name, node, False), (target.name, node, True)))
        )

    def _removed(self, path: Path) -> None:
        folder = self._found(path.parent)
        if folder is not None:
            assert folder.entries is not None
            node = folder.entries.pop(path.name)
            self._pending.append(_Change(folder, ((path.name, node, False),)))
