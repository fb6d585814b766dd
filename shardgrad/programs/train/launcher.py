"""What a launcher such as torchrun has put into the environment, and how many ranks fit on this
machine.

This module does not import PyTorch.
"""

from __future__ import annotations

import os

from shardgrad.programs.train.failure import UsageError

_RANKS_PER_CORE = 16  # more only wait for each other


def available_cores() -> int:
    """Returns the number of cores this process may use; in a container, fewer than the machine
    has.
    """
    return len(os.sched_getaffinity(0))


def require_room(ranks: int) -> None:
    """Refuses to start more ranks than this machine can run.

    Raises:
        UsageError: there are too many.
    """
    most = _RANKS_PER_CORE * available_cores()
    if ranks > most:
        raise UsageError(
            f"{ranks} ranks are to start on this machine, which has {available_cores()} cores: "
            f"start at most {most} with --ranks or --mesh, or start them on several machines with "
            "torchrun."
        )


def torchrun_world_size() -> int | None:
    """Returns the number of ranks that a launcher started; None without one.

    Raises:
        UsageError: a rank is no number, or not below the number of ranks.
    """
    if not ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        return None
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if size in os.environ and not _number(rank) < _number(size):
            raise UsageError(
                f"{rank} is {_number(rank)} and {size} is {_number(size)} in the environment: "
                "correct the launcher, or unset RANK and WORLD_SIZE to start without one."
            )
    return _number("WORLD_SIZE")


def is_restarted() -> bool:
    """Returns whether torchrun has restarted these ranks after a failure (`--max-restarts`)."""
    return _number("TORCHELASTIC_RESTART_COUNT") > 0


def _number(name: str) -> int:
    """What a launcher has put into a variable; 0 where there is none."""
    text = os.environ.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise UsageError(
            f"{name} is {text!r:.50} in the environment, where launchers put a number: correct the "
            "launcher, or unset RANK and WORLD_SIZE to start without one."
        )
    return int(text)
