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
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardgrad.diagnosis import watchdog
from tests.support.processes import CONTEXT

__all__ = ["RANKS", "STALL_S", "text_of", "two_ranks_apart"]

RANKS = 2
STALL_S = 2.0  # of the watchdog; 10 outside of tests

Tell = Callable[[Any], None]


def text_of(message: BaseException | str, category: type | None = None) -> str:
    """Returns an error or a warning as Python prints it, with the class in front."""
    return f"{(category or type(message)).__name__}: {message}"


@contextmanager
def two_ranks_apart(
    main: Callable[..., None], *args: Any, backend: str = "gloo"
) -> Iterator[tuple[dict[Any, int], list[Any]]]:
    """Starts `main(tell, rank, folder, *args)` on each rank, and kills the ranks in the end.

    Yields:
        The pipe of each rank, and the processes. Through a pipe come warnings, as texts, and what
        `main` tells.
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
            yield pipes, processes
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
    watchdog.STALL_S = STALL_S
    # Longer than any time limit: what waits that long hangs.
    store, timeout = dist.FileStore(f"{folder}/store", RANKS), timedelta(minutes=30)
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS, timeout=timeout)
    torch.manual_seed(0)
    main(tell, rank, folder, *args)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
