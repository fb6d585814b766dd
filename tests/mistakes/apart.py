"""Running a mistake that leaves ranks waiting: in processes that are killed once each has named
it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist

from tests.support.apart import text_of, two_ranks_apart
from tests.support.processes import FairClock

Program = Callable[[], None]


def _rank(tell: Callable[[Any], None], rank: int, folder: str, program: Program) -> None:
    dist.barrier()
    tell("")  # the clock starts
    try:
        program()
    except Exception as error:
        tell(text_of(error))
        # As at the end of a script; children of multiprocessing have forgotten it by then in 3.13.
        sys.last_value = error
        raise


def named_apart(
    program: Program,
    are_named: Mapping[int, Callable[[str], bool]],
    *,
    limit_s: float,
    backend: str = "gloo",
) -> tuple[dict[int, list[str]], float]:
    """Returns what ranks have said when each has said what it was to, or the time was over; and the
    seconds.

    Args:
        program: at the top of its module; run on two ranks.
        are_named: for each rank that is to name the mistake, whether a text does.
        limit_s: seconds, those left out in which the ranks waited for a core.
        backend: of the process group.
    """
    with two_ranks_apart(_rank, program, backend=backend) as (pipes, processes):
        said: dict[int, list[str]] = {rank: [] for rank in pipes.values()}
        return said, _listen(pipes, said, are_named, [p.pid for p in processes], limit_s)


def _listen(
    pipes: dict[Any, int],
    said: dict[int, list[str]],
    are_named: Mapping[int, Callable[[str], bool]],
    pids: list[int | None],
    limit_s: float,
) -> float:
    clock: FairClock | None = None
    begun_s = time.monotonic()
    missing = set(are_named)
    while missing and pipes and (clock is None or clock.elapsed_s() < limit_s):
        for pipe in wait(list(pipes), 0.2):
            rank = pipes[pipe]
            try:
                text = pipe.recv()  # type: ignore[union-attr]
            except (EOFError, OSError):
                del pipes[pipe]
                continue
            if not text:
                clock = clock or FairClock([pid for pid in pids if pid is not None])
                continue
            said[rank].append(text)
            if rank in missing and are_named[rank](text):
                missing.discard(rank)
    return clock.elapsed_s() if clock is not None else time.monotonic() - begun_s
