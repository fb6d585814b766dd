"""One writer: a lock that a process holds while it writes into a folder, and that says who holds
it.

The lock is a file that the holder has locked with `fcntl`: the system unlocks it when the process
ends, however it ends, so the lock of a dead process is free. Network file systems pass such locks
on between hosts; on one that does not, a warning says that a second writer is not noticed.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
import warnings
from pathlib import Path

from shardgrad.errors import CheckpointError
from shardgrad.programs.checkpoint.files import make_folder
from shardgrad.programs.text import printable

_LOCK = ".lock"
_NOT_SUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

# The files that this process has locked, by path: closing any descriptor of one would unlock it, so
# it is opened once. A forked process does not inherit the locks.
_held: dict[Path, int] = {}
_one_thread = threading.RLock()
os.register_at_fork(after_in_child=_held.clear)


def acquire(folder: Path) -> None:
    """Makes this process the one that writes into a folder; does nothing if it is already.

    Raises:
        CheckpointError: another process is; the error says which and since when.
        OSError: the folder cannot be written.
    """
    with _one_thread:
        if _holds(folder):
            return
        release(folder)  # of a file that was removed
        make_folder(folder)
        _held[_path_in(folder)] = _opened(folder, os.F_TLOCK)


def release(folder: Path) -> None:
    """Lets another process write into a folder; does nothing if this one does not."""
    with _one_thread:
        descriptor = _held.pop(_path_in(folder), None)
        if descriptor is not None:
            os.close(descriptor)


def require_no_other(folder: Path) -> None:
    """Checks that no other process writes into a folder.

    Raises:
        CheckpointError: one does; the error says which and since when.
    """
    with _one_thread:
        if _path_in(folder).exists() and not _holds(folder):
            os.close(_opened(folder, os.F_TEST))


def _path_in(folder: Path) -> Path:
    return Path(os.path.abspath(folder), _LOCK)


def _holds(folder: Path) -> bool:
    """Returns whether this process has the lock: it is lost if the file is removed."""
    path = _path_in(folder)
    try:
        return path in _held and os.path.samestat(os.fstat(_held[path]), os.stat(path))
    except FileNotFoundError:
        return False


def _opened(folder: Path, command: int) -> int:
    """Opens the lock of a folder, and locks it, or only tests that no other process has."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(_path_in(folder), flags, 0o644)
    try:
        os.lockf(descriptor, command, 0)
        if command == os.F_TLOCK:
            since = time.strftime("%Y-%m-%d %H:%M:%S %z")
            own = f"process {os.getpid()} on {socket.gethostname()}, since {since}\n"
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, own.encode(), 0)
    except OSError as error:
        if error.errno in _NOT_SUPPORTED:
            warnings.warn(
                f"{folder} is on a file system without locks ({error.strerror}): a second "
                "process that writes there is not detected.",
                stacklevel=4,
            )
            return descriptor
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        os.close(descriptor)
        if not isinstance(error, BlockingIOError | PermissionError):
            raise
        raise CheckpointError(
            f"{printable(folder)} is being written by another process",
            expected="one writing process",
            got=printable(holder or "another one"),
            fix="wait for it to end, or stop it; or write into another folder",
        ) from None
    return descriptor
