"""Two hosts on one machine: network namespaces joined by a link that can be cut, and the ranks'
store.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType

__all__ = ["Hosts", "can_have_hosts"]

_CLONE_NEWNET = 0x40000000
_LOOPBACK = "127.0.0.1"
_CUT = "cut"  # a file that holds the number of seconds; empty means permanently


class Hosts:
    """The machine itself, or `count` network namespaces, each with one end of a link.

    Args:
        count: number of hosts; 1 uses the machine as it is.
        folder: where a rank writes the request to cut the link.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self.count = count
        self._names = (
            [f"drill{os.getpid()}h{number}" for number in range(count)] if count > 1 else []
        )
        self._request = folder / _CUT
        self._until_s: float | None = None
        self._store: int | None = None

    def __enter__(self) -> Hosts:
        self._request.unlink(missing_ok=True)
        for name in self._names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        if self._names:
            first, second = self._names
            _ip(
                "-n",
                first,
                "link",
                "add",
                "cable",
                "type",
                "veth",
                "peer",
                "name",
                "cable",
                "netns",
                second,
            )
            for number, name in enumerate(self._names):
                _ip("-n", name, "addr", "add", f"{_address(number)}/24", "dev", "cable")
                _ip("-n", name, "link", "set", "cable", "up")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end_store()
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def move_to(self, number: int) -> None:
        """Moves this process, which must have one thread, to a host."""
        os.environ["DRILL_CUT"] = str(self._request)
        os.environ["DRILL_STORE_PID"] = str(self._store)
        if not self._names:
            return
        _enter(self._names[number])
        os.environ["GLOO_SOCKET_IFNAME"] = "cable"

    def start_store(self, ranks: int) -> tuple[str, int]:
        """Starts a store on the first host, in a separate process, as torchrun's agent does.

        Returns:
            Address and port of the store.
        """
        address = _address(0) if self._names else _LOOPBACK
        reading, writing = os.pipe()
        self._store = os.fork()
        if self._store == 0:
            try:
                os.setsid()
                if self._names:
                    _enter(self._names[0])
                from torch._C._distributed_c10d import TCPStore

                store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
                os.write(writing, str(store.port).encode())
                os.close(writing)
                signal.pause()
            finally:
                os._exit(0)
        os.close(writing)
        port = int(os.read(reading, 16))
        os.close(reading)
        return address, port

    def end_store(self) -> None:
        """Kills the store's process, if there is one."""
        if self._store is not None:
            os.kill(self._store, signal.SIGKILL)
            os.waitpid(self._store, 0)
            self._store = None

    def obey(self) -> None:
        """Cuts the link if a rank has requested it, and restores it after the requested time."""
        if self._until_s is None and self._names and self._request.exists():
            seconds = float(self._request.read_text() or "inf")
            _ip("-n", self._names[0], "link", "set", "cable", "down")
            self._until_s = time.monotonic() + seconds
        elif self._until_s is not None and time.monotonic() > self._until_s:
            _ip("-n", self._names[0], "link", "set", "cable", "up")
            self._until_s = float("inf")


def can_have_hosts() -> bool:
    """Returns whether this process may create network namespaces, and the `ip` tool is
    installed.
    """
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"drill{os.getpid()}probe"
    made = (
        subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode
        == 0
    )
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return made


def _address(number: int) -> str:
    return f"10.213.97.{number + 1}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _enter(name: str) -> None:
    """Moves the calling thread to a named network namespace; os.setns is younger than our oldest
    Python.
    """
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns failed")
    finally:
        os.close(descriptor)
