"""What a launcher such as torchrun has put into the environment, and how many ranks fit on this
machine.

This module does not import PyTorch.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardgrad.train.failure import UsageError

_ORDER = (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
_LOOK_UP_S = 10.0  # a machine that starts at the same time may get its name late
_PAUSE_S = 0.5
_TURN_S = 3.0
_RANKS_PER_CORE = 16  # more only wait for each other
_CORRECT = "Correct the launcher, or unset RANK and WORLD_SIZE to start without one."


def available_cores() -> int:
    """Returns the number of cores this process may use; in a container, fewer than the machine
    has.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def require_room(ranks: int) -> None:
    """Refuses to start more ranks than this machine can run.

    Raises:
        UsageError: there are too many.
    """
    most = _RANKS_PER_CORE * available_cores()
    if ranks > most:
        raise UsageError(
            f"{ranks} ranks are to start on this machine, which has {available_cores()} cores: "
            f"start at most "
            f"{most} with --ranks or --mesh, or start them on several machines with torchrun."
        )


def torchrun_world_size() -> int | None:
    """Returns the number of ranks that a launcher started; None without one.

    Raises:
        UsageError: a variable is no number, a rank is not below the number of ranks, or the address
            or port at which the ranks meet is missing.
    """
    if not ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        return None
    for rank, size in _ORDER:
        if size in os.environ and not _number(rank) < _number(size):
            raise UsageError(
                f"{rank} is {_number(rank)} and {size} is {_number(size)} in the environment: "
                f"ranks count "
                f"from 0 to {size} - 1. {_CORRECT}"
            )
    if not os.environ.get("MASTER_ADDR"):
        raise UsageError(
            f"RANK and WORLD_SIZE are set, and MASTER_ADDR, where the ranks meet, is not. "
            f"{_CORRECT}"
        )
    if "MASTER_PORT" not in os.environ or _number("MASTER_PORT") >= 2**16:
        raise UsageError(
            f"MASTER_PORT is {os.environ.get('MASTER_PORT', 'not set')!r:.50}: ranks meet at a "
            f"port below "
            f"65536. {_CORRECT}"
        )
    _number("LOCAL_RANK")
    return _number("WORLD_SIZE")


@contextmanager
def first_rank_speaks() -> Iterator[None]:
    """Lets the first rank of a machine say what all refuse; a launcher ends the others when it has
    ended.
    """
    try:
        yield
    except UsageError:
        if torchrun_world_size() is not None and _number("LOCAL_RANK") > 0:
            time.sleep(_TURN_S)
        raise


def is_restarted() -> bool:
    """Returns whether torchrun has restarted these ranks after a failure (`--max-restarts`)."""
    return _number("TORCHELASTIC_RESTART_COUNT") > 0


def require_resolvable_master(patience_s: float = _LOOK_UP_S) -> None:
    """Looks `MASTER_ADDR` up, which a rendezvous would do in silence until its timeout.

    Args:
        patience_s: seconds to go on trying.

    Raises:
        UsageError: it has no address on this machine.
    """
    address = os.environ["MASTER_ADDR"]
    found, is_over, reasons = threading.Event(), threading.Event(), ["no answer"]

    def look_up() -> None:  # on a thread: a name server that does not answer blocks for a long time
        while not is_over.is_set():
            try:
                socket.getaddrinfo(address, None)
            except (OSError, UnicodeError) as error:
                reasons.append(getattr(error, "strerror", None) or str(error))
                is_over.wait(_PAUSE_S)
            else:
                found.set()
                return

    threading.Thread(target=look_up, daemon=True).start()
    if not found.wait(patience_s):
        is_over.set()
        raise UsageError(
            f"MASTER_ADDR is {address!r:.100}, which {socket.gethostname()} cannot resolve "
            f"({reasons[-1]}): "
            "correct it in the launcher, or the name service of this machine."
        )


def _number(name: str) -> int:
    """What a launcher has put into a variable; 0 where there is none."""
    text = os.environ.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise UsageError(
            f"{name} is {text!r:.50} in the environment, where launchers put a number. {_CORRECT}"
        )
    return int(text)
