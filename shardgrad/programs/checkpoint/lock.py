"""One writer: a lock that a process holds while it writes into a folder, and that says who holds
it.

The lock is a file that the holder has locked with `fcntl`: the system unlocks it when the process
ends, however it ends, so the lock of a dead process is free. Network file systems pass such locks
on between hosts; on one that does not, a warning says that a second writer is not noticed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
import warnings
from pathlib import Path

from shardgrad.errors import CheckpointSaveError
from shardgrad.programs.checkpoint.files import make_folder
from shardgrad.programs.text import printable

_NOT_SUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_TAKEN = {errno.EACCES, errno.EAGAIN}

# By path, of this process: closing any descriptor of a file would unlock it, so it is opened once.
_held: dict[str, FileLock] = {}
_held_lock = threading.RLock()


class FileLock:
    """A lock that one process holds at a time; it may take it several times, and gives it back as
    often.

    Args:
        path: of the lock's file, which is there while the lock is held.
        what: is written by its holder, for the error.

    Attributes:
        count: how often this process has taken it.
    """

    def __init__(self, path: Path, what: Path) -> None:
        self._path = path
        self._what = what
        self._process = os.getpid()
        self.count = 0
        while True:
            self._descriptor = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
            )
            try:
                self._lock()
                if self.holds():
                    self._sign()
                    return
            except BaseException:
                os.close(self._descriptor)
                raise
            os.close(self._descriptor)  # its holder has given it back, and removed it, meanwhile

    @classmethod
    def take(cls, path: Path, what: Path) -> FileLock:
        """Returns the lock, held.

        Raises:
            CheckpointSaveError: another process holds it; the error says which and since when.
            OSError: the file cannot be written.
        """
        key = os.path.abspath(path)
        make_folder(Path(key).parent)
        with _held_lock:
            held = _held.get(key)
            if held is None or not held.holds():
                held = _held[key] = cls(Path(key), what)
            held.count += 1
            return held

    def holds(self) -> bool:
        """Returns whether this process still has the lock: it is lost if the file is removed."""
        if self._process != os.getpid():  # a forked process does not inherit it
            return False
        try:
            there = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(self._descriptor), there)

    def release(self) -> None:
        """Gives it back; the last of several times, it is free."""
        with _held_lock:
            self.count -= 1
            if self.count or self._process != os.getpid():
                return
            if _held.get(str(self._path)) is self:
                del _held[str(self._path)]
            if self.holds():
                self._path.unlink()  # before it is unlocked: the file is ours until then
            os.close(self._descriptor)

    def _lock(self) -> None:
        for _ in range(3):
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _NOT_SUPPORTED:
                    warnings.warn(
                        f"{self._path.parent} is on a file system without locks "
                        f"({error.strerror}): a second process that writes there is not noticed.",
                        stacklevel=5,
                    )
                    return
                if error.errno not in _TAKEN:
                    raise
                time.sleep(0.05)  # a save of another process looks at it for a moment
            else:
                return
        try:
            found = json.loads(os.pread(self._descriptor, 4096, 0))
            holder = f"process {found['process']} on {found['host']}, since {found['since']}"
        except (OSError, ValueError, TypeError, LookupError, RecursionError):
            holder = "another one"
        raise CheckpointSaveError(
            f"{printable(self._what)} is being written by another process",
            expected="one process that writes there",
            got=printable(holder),
            fix="wait until it has ended, or end it; or write into another folder",
        )

    def _sign(self) -> None:
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        holder = {"host": socket.gethostname(), "process": self._process, "since": since}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(holder).encode() + b"\n", 0)
