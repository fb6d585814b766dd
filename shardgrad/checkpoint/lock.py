"""One writer: a lock that a process holds while it writes into a folder, and that says who holds
it.

The lock is a file that the holder has locked with `fcntl`: the system unlocks it when the process
ends, however it ends, so the lock of a dead process is free. Network file systems pass such locks
on between hosts, but some are mounted so that they do not, and then two hosts would both hold it.
Therefore the holder also renews the file's time every `RENEWAL_S`; a process that gets the lock
although a holder on another host has not given it back waits for three renewals, and refuses if
there is one.
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
from dataclasses import asdict, dataclass
from pathlib import Path

from shardgrad.checkpoint.files import make_folder
from shardgrad.checkpoint.text import printable
from shardgrad.errors import CheckpointSaveError

__all__ = ["RENEWAL_S", "FileLock", "require_free"]

RENEWAL_S = 10.0
_NOT_SUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_TAKEN = {errno.EACCES, errno.EAGAIN}
_MOST_NBYTES = 4096

# By path, of this process: closing any descriptor of a file would unlock it, so it is opened once.
_held: dict[str, FileLock] = {}
_held_lock = threading.RLock()


@dataclass(frozen=True)
class _Holder:
    """Who holds a lock: what is in its file."""

    host: str
    process: int
    since: str

    def __str__(self) -> str:
        return printable(f"process {self.process} on {self.host}, since {self.since}")


class FileLock:
    """A lock that one process holds at a time; it may take it several times, and gives it back as
    often.

    Args:
        path: of the lock's file, which is there while the lock is held.
        what: is written by its holder, for the error.
    """

    def __init__(self, path: Path, what: Path) -> None:
        self._path = path
        self._what = what
        self._descriptor = -1
        self._count = 0
        self._process = 0
        self._is_released = threading.Event()
        self._renewing = threading.Lock()

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
            if held is None or held._process != os.getpid():  # a forked process does not inherit it
                held = cls(Path(key), what)
                held._acquire()
                _held[key] = held
            held._count += 1
            return held

    def release(self) -> None:
        """Gives it back; the last of several times, it is free."""
        with _held_lock:
            self._count -= 1
            if self._count or self._process != os.getpid():
                return
            del _held[str(self._path)]
            with self._renewing:  # or a renewal would be taken for one of the next holder
                self._is_released.set()
            self._path.unlink(missing_ok=True)  # before it is unlocked: the file is ours until then
            os.close(self._descriptor)

    def _acquire(self) -> None:
        while True:
            self._descriptor = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
            )
            try:
                is_shared = self._lock()
                if _is_same_file(self._descriptor, self._path):
                    self._refuse_living_holder(is_shared=is_shared)
                    self._write()
                    break
            except BaseException:
                os.close(self._descriptor)
                raise
            os.close(self._descriptor)  # its holder has given it back, and removed it, meanwhile
        self._process = os.getpid()
        threading.Thread(target=self._renew, name="lock", daemon=True).start()

    def _lock(self) -> bool:
        """Locks the file; returns whether other processes are kept out by the file system."""
        for _ in range(3):
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if error.errno in _NOT_SUPPORTED:
                    self._warn(error)
                    return False
                if error.errno not in _TAKEN:
                    raise
            time.sleep(0.05)  # `require_free` of another process holds it for a moment
        raise _taken(self._what, _holder(self._descriptor))

    def _warn(self, error: OSError) -> None:
        warnings.warn(
            f"{self._path.parent} is on a file system without locks ({error.strerror}): a second "
            f"process "
            f"that writes there is noticed only if it starts more than {RENEWAL_S:.0f} s after the "
            f"first.",
            stacklevel=5,
        )

    def _refuse_living_holder(self, *, is_shared: bool) -> None:
        """Refuses a lock that its last holder has not given back, and still renews.

        On this host, the system's lock is proof that the holder has ended.
        """
        holder = _holder(self._descriptor)
        if holder is None or (is_shared and holder.host == socket.gethostname()):
            return
        before_ns = os.fstat(self._descriptor).st_mtime_ns
        deadline_s = time.monotonic() + 3 * RENEWAL_S
        while time.monotonic() < deadline_s:
            time.sleep(RENEWAL_S / 10)
            if is_shared:  # locking again makes NFS ask its server for the time
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._descriptor).st_mtime_ns != before_ns:
                raise _taken(self._what, holder)

    def _write(self) -> None:
        holder = _Holder(socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S %z"))
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(asdict(holder)).encode() + b"\n", 0)

    def _renew(self) -> None:
        while not self._is_released.wait(RENEWAL_S):
            try:
                with self._renewing:
                    if self._is_released.is_set() or not _is_same_file(
                        self._descriptor, self._path
                    ):
                        return
                    os.utime(self._descriptor)
            except (
                OSError
            ):  # a full disk or a network that is away: the holder has other ways to notice
                continue


def require_free(path: Path, what: Path) -> None:
    """Refuses to go on if another process holds a lock.

    Raises:
        CheckpointSaveError: which process does, and since when.
    """
    key = os.path.abspath(path)
    with _held_lock:
        held = _held.get(key)
        if held is not None and held._process == os.getpid():
            return
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                raise _taken(what, _holder(descriptor)) from None
        finally:
            os.close(descriptor)


def _holder(descriptor: int) -> _Holder | None:
    """Returns who has written into a lock's file; None if that is nothing, or cannot be read."""
    try:
        found = json.loads(os.pread(descriptor, _MOST_NBYTES, 0))
        return _Holder(str(found["host"]), int(found["process"]), str(found["since"]))
    except (OSError, ValueError, TypeError, LookupError, RecursionError, OverflowError):
        return None


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def _taken(what: Path, holder: _Holder | None) -> CheckpointSaveError:
    return CheckpointSaveError(
        f"{printable(what)} is being written by another process",
        expected="one process that writes there",
        got="another one" if holder is None else str(holder),
        fix="wait until it has ended, or end it; or write into another folder",
    )
