"""Two ranks in processes of their own, which say what they warn of, and are killed in the end.

For programs that leave ranks waiting, or end them. What lives on is for `tests/support/ranks.py`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

from shardgrad.diagnosis import watchdog
from tests.support.processes import CONTEXT, FairClock

RANKS = 2
STALL_S = 2.0  # of the watchdog; 10 outside of tests


def text_of(message: BaseException | str, category: type | None = None) -> str:
    """Returns an error or a warning as Python prints it, with the class in front."""
    return f"{(category or type(message)).__name__}: {message}"


def heard_apart(
    main: Callable[..., None], *args: Any, backend: str = "gloo"
) -> Iterator[tuple[int, Any, float]]:
    """Runs `main(tell, rank, folder, *args)` on each rank, and kills the ranks in the end.

    Yields:
        A rank, what is heard of it, and the seconds since the ranks began, without those in which
        they waited for a core. Warnings are heard as texts, what `main` tells as it is, and the end
        of a process as its exit status. Now and then, None is heard of rank 0: look at the time.
    """
    with tempfile.TemporaryDirectory(prefix="apart-") as folder:
        pipes: dict[Any, int] = {}
        processes = []
        for rank in range(RANKS):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            order = main, args, backend, rank, folder, theirs
            processes.append(CONTEXT.Process(target=_rank, args=order, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes[ours] = rank
        try:
            for pipe in pipes:
                with suppress(EOFError):
                    pipe.recv()  # the rank has begun
            clock = FairClock([process.pid for process in processes])
            while pipes:
                for pipe in wait([*pipes], 0.1):
                    rank, heard = pipes[pipe], None
                    try:
                        heard = pipe.recv()
                    except (EOFError, OSError):
                        del pipes[pipe]
                        processes[rank].join(1)
                        heard = processes[rank].exitcode or 0
                    yield rank, heard, clock.elapsed_s()
                yield 0, None, clock.elapsed_s()
        finally:
            for process in processes:
                process.kill()
                process.join()


def _rank(
    main: Callable[..., None], args: Any, backend: str, rank: int, folder: str, pipe: Any
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    silence = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # backends say a lot when a rank goes
        os.dup2(silence, descriptor)
    watchdog.STALL_S = STALL_S
    # Longer than any time limit: what waits that long hangs.
    store, timeout = dist.FileStore(f"{folder}/store", RANKS), timedelta(minutes=30)
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS, timeout=timeout)
    torch.manual_seed(0)
    dist.barrier()
    pipe.send("begins")
    one_at_a_time = threading.Lock()  # threads warn too

    def tell(what: Any) -> None:
        with one_at_a_time:
            pipe.send(what)

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        tell(text_of(str(message), category))

    warnings.simplefilter("always")
    warnings.showwarning = show
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: tell(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    main(tell, rank, folder, *args)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
