"""Running a mistake that leaves ranks waiting: in processes that are killed once each has named
it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.mistakes.table import text_of
from tests.support.processes import CONTEXT, FairClock

Program = Callable[[], None]
STALL_S = 2.0  # 10 outside of tests


def _rank(
    rank: int, world_size: int, meeting: str, backend: str, program: Program, pipe: Connection
) -> None:
    import torch
    import torch.distributed as dist

    from shardgrad.diagnosis import watchdog

    watchdog.STALL_S = STALL_S
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # backends say a lot when a rank goes
    torch.set_num_threads(1)
    one_at_a_time = threading.Lock()

    def tell(text: str) -> None:
        with one_at_a_time:
            pipe.send(text)

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        tell(text_of(str(message), category))

    warnings.simplefilter("always")
    warnings.showwarning = show
    dist.init_process_group(
        backend,
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=30),
    )
    torch.manual_seed(0)
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
    world_size = 2
    with tempfile.TemporaryDirectory() as folder:
        pipes: dict[Any, int] = {}
        processes = []
        for rank in range(world_size):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_rank,
                args=(rank, world_size, f"{folder}/meeting", backend, program, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes[ours] = rank
            processes.append(process)
        said: dict[int, list[str]] = {rank: [] for rank in range(world_size)}
        try:
            return said, _listen(pipes, said, are_named, [p.pid for p in processes], limit_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


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
