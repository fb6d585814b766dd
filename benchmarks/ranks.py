"""Running a function on ranks of this machine: fresh processes, one torch thread each, joined by gloo.

The parent merely waits and prints. Nothing it imports brings in torch, which would take it longer than a
short run takes the ranks; what ranks do is therefore named, not passed.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import click


class RankFailed(click.ClickException):
    """A rank raised, died or took too long; the message holds what it said."""


def join(rank: int, ranks: int, meeting: Path, *, keep_heap: bool) -> None:
    """Makes this process a rank.

    Args:
        rank: 0 to `ranks - 1`.
        ranks: in the world.
        meeting: a folder that all ranks see, empty before the first comes.
        keep_heap: apply the trainer's heap setting, to whatever engines run in this process.
    """
    # Loopback only, so that the interface's counter sees every byte.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    from shardgrad.train.heap import keep_freed_memory

    if keep_heap and not keep_freed_memory():
        raise RuntimeError("the C library has no such heap setting: use --no-keep-heap")
    # torch 2.13 gave collectives new names; the older ones that shardgrad serves know only the old.
    warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=ranks)


@contextmanager
def one_rank(device: str) -> Iterator[None]:
    """Makes this process a world of its own; on a CPU, with one thread."""
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as meeting:
        dist.init_process_group(backend, init_method=f"file://{meeting}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def on_ranks(function: str, ranks: int, *args: Any, keep_heap: bool, timeout_s: float = 3600.0) -> list[Any]:
    """Calls a function on every rank and returns what each returned, in order.

    Args:
        function: `module:name`.
        ranks: how many.
        *args: given to the function.
        keep_heap: see `join`.
        timeout_s: how long the ranks may say nothing.

    Raises:
        RankFailed: at the first failure; the other ranks are ended.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="shardgrad-benchmark-") as meeting:
        processes, pipes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            call = (function, args, rank, ranks, Path(meeting), keep_heap, theirs)
            process = context.Process(target=_rank_main, args=call, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            return _collect(pipes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _rank_main(
    function: str,
    args: tuple[Any, ...],
    rank: int,
    ranks: int,
    meeting: Path,
    keep_heap: bool,
    pipe: Connection,
) -> None:
    try:
        join(rank, ranks, meeting, keep_heap=keep_heap)
        pipe.send((True, resolve_name(function)(*args)))
    except Exception:
        pipe.send((False, traceback.format_exc()))
    # Until the parent has every answer: a peer may still be waiting for this rank's last message.
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])


def _collect(pipes: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {rank: pipe for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting.values()), timeout_s)
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting)} said nothing for {timeout_s:.0f} s")
        for rank, pipe in waiting.items():
            if pipe in ready:
                results[rank] = _answer(rank, pipe)
    return [results[rank] for rank in range(len(pipes))]


def _answer(rank: int, pipe: Connection) -> Any:
    try:
        is_good, result = pipe.recv()
    except EOFError:
        raise RankFailed(f"rank {rank} died without a word") from None
    if not is_good:
        raise RankFailed(f"rank {rank} failed:\n{result}")
    return result
