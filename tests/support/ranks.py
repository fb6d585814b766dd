"""Running a function on every rank of a small world, within a time limit.

Workers start once for each world size and serve many tests: they keep what torch has imported,
compiled and cached. They are replaced after a test that fails or breaks the process group, and once
too many process groups were left behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import inspect
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.support.processes import CONTEXT, FairClock

# Longer than the limit of a test, which ends ranks that hang: this one counts the time that a rank
# waits for one that has no core.
COLLECTIVE_TIMEOUT_S = 300.0
# Process groups that a worker may keep. Each has a thread of gloo that looks for work 100 times a
# second.
MOST_GROUPS = 12
# How long the other ranks may go on after one has raised: they may wait for it in a collective.
GRACE_S = 5.0
# How long a rank that hangs is listened to, after its last word, when it is asked where it is.
QUIET_S = 2.0


def on_ranks(world_size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test run on every rank of a world, with its parameters."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def test(worlds: dict[int, Ranks], **parameters: Any) -> None:
            worlds[world_size].renewed().run(function, **parameters)

        signature = inspect.signature(function)
        added = inspect.Parameter("worlds", inspect.Parameter.KEYWORD_ONLY)
        named = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values()]
        test.on_each_rank = function  # type: ignore[attr-defined]
        test.__signature__ = signature.replace(parameters=[*named, added])  # type: ignore[attr-defined]
        return test

    return decorate


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _serve(
    rank: int,
    world_size: int,
    port: int,
    backend: str,
    timeout_s: float,
    pipe: Connection,
    stacks: Connection,
    path: list[str],
) -> None:
    sys.path[:] = path
    faulthandler.enable(file=stacks)  # type: ignore[arg-type]
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)  # type: ignore[arg-type]
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size)
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
    while True:
        task = pipe.recv()
        if task is None:
            dist.destroy_process_group()
            return
        module, name, args, kwargs = task
        try:
            torch.manual_seed(0)
            found = getattr(importlib.import_module(module), name)
            result = getattr(found, "on_each_rank", found)(*args, **kwargs)
            pipe.send((True, result, len(dist.distributed_c10d._world.pg_map)))
        except BaseException:
            pipe.send((False, traceback.format_exc(), 0))


class Ranks:
    """`world_size` processes joined by `backend`."""

    def __init__(
        self,
        world_size: int,
        collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
        *,
        backend: str = "gloo",
    ) -> None:
        self.world_size = world_size
        self._backend = backend
        self._timeout_s = collective_timeout_s
        self._groups = 0  # that a worker has
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._stacks: list[Connection] = []  # where each rank says, on a signal, what it is doing

    def start(self) -> None:
        """Starts the workers, unless they run."""
        if self._processes:
            return
        port = free_port()
        for rank in range(self.world_size):
            ours, theirs = CONTEXT.Pipe()
            said, says = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(
                target=_serve,
                args=(
                    rank,
                    self.world_size,
                    port,
                    self._backend,
                    self._timeout_s,
                    theirs,
                    says,
                    sys.path,
                ),
                daemon=True,
            )
            process.start()
            theirs.close()
            says.close()
            self._processes.append(process)
            self._pipes.append(ours)
            self._stacks.append(said)

    def stop(self) -> None:
        """Ends the workers, by force after a second."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes, self._stacks, self._groups = [], [], [], 0

    def renewed(self) -> Ranks:
        """Returns these ranks, with other workers if those of before keep many process groups."""
        if self._groups > MOST_GROUPS:
            self.stop()
        return self

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Returns what `function` returned on each rank.

        Args:
            function: at the top of its module.
            timeout_s: seconds, those left out in which the ranks waited for a core.

        Raises:
            RankError: a rank raised, died, or took longer than `timeout_s`, and says where it is
                then; the workers are replaced.
        """
        self.start()
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__qualname__, args, kwargs))
        results: dict[int, tuple[bool, Any, int]] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        clock, limit_s = FairClock([process.pid for process in self._processes]), timeout_s
        while waiting:
            for pipe in wait(list(waiting), 0.5):
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    results[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    self._processes[rank].join(GRACE_S)
                    code = self._processes[rank].exitcode  # of a signal, its negative number
                    died = f"the process died, exit code {code}:\n{self._where(rank)}"
                    results[rank] = (False, died, 0)
                if not results[rank][0]:
                    limit_s = min(limit_s, clock.elapsed_s() + GRACE_S)
            if waiting and clock.elapsed_s() > limit_s:
                late = (
                    f"did not finish within {timeout_s:.0f} s, or {GRACE_S:.0f} s after another "
                    "rank"
                )
                results.update(
                    (rank, (False, f"{late}:\n{self._where(rank)}", 0)) for rank in waiting.values()
                )
                break
        failed = {rank: text for rank, (ok, text, _) in results.items() if not ok}
        if failed:
            self.stop()
            raise RankError(
                "\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(failed.items()))
            )
        counts = {groups for _, _, groups in results.values()}
        # torch names some groups by their count, so workers that differ in it are renewed.
        self._groups = max(counts) if len(counts) == 1 else MOST_GROUPS + 1
        return [results[rank][1] for rank in range(self.world_size)]

    def _where(self, rank: int) -> str:
        """Returns the Python stacks of all threads of a rank that hangs or has died of a signal, as
        the rank itself writes them.
        """
        with contextlib.suppress(ProcessLookupError):  # it has died
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        said = b""
        while wait([self._stacks[rank]], QUIET_S):
            if not (more := os.read(self._stacks[rank].fileno(), 1 << 16)):
                break
            said += more
        return said.decode()
