"""Ranks that torchrun or Slurm started, on any number of machines.

The first of these processes measures; the others start the workers that it asks for, each on its
own machine, and measure nothing themselves. A worker's calls and answers go through a connection
that reaches from the first process to the worker.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from benchmarks.workers import ThisMachine, Worker, WorkersFailed

_CONNECT_S = 300.0  # for the slowest of all processes to start
# What Slurm's srun calls what torchrun sets.
_SLURM = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "GROUP_WORLD_SIZE": "SLURM_NNODES",
}


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    Attributes:
        rank: of this process.
        world_size: processes that were started.
        local_rank: among those on this machine.
        hosts: machines that they are spread over.
    """

    rank: int
    world_size: int
    local_rank: int
    hosts: int


def launch_of(environ: Mapping[str, str]) -> Launch | None:
    """Reads what torchrun or srun has set; None where this is not one of several processes.

    Raises:
        ValueError: a variable is missing by which the processes would find each other.
    """
    found = {
        name: environ.get(name, environ.get(slurm) if _is_step(environ) else None)
        for name, slurm in _SLURM.items()
    }
    if found["RANK"] is None or int(found["WORLD_SIZE"] or 1) < 2:
        return None
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in environ:
            raise ValueError(
                f"{found['WORLD_SIZE']} processes were started, and {name} is not set: start them "
                "with torchrun, or, in a batch file of Slurm, write before srun: export "
                'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) '
                "MASTER_PORT=29500"
            )
    return Launch(
        rank=int(found["RANK"]),
        world_size=int(found["WORLD_SIZE"] or 1),
        local_rank=int(found["LOCAL_RANK"] or 0),
        hosts=int(found["GROUP_WORLD_SIZE"] or 1),
    )


def _is_step(environ: Mapping[str, str]) -> bool:
    """True in a process of srun, not in the batch file of a job."""
    return "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ


@contextmanager
def launched(launch: Launch) -> Iterator[Launched | None]:
    """Connects all processes; yields, in the first one, what starts workers on all machines.

    In the others it serves until the first one is done, and then yields None.
    """
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    os.environ |= {"RANK": str(launch.rank), "WORLD_SIZE": str(launch.world_size)}
    store, _, _ = next(iter(dist.rendezvous("env://")))
    # torchrun may start all of them again beside the same store.
    key = f"benchmarks/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if launch.rank:
        told, secret = store.get(key).split(b" ")
        with Client((address, int(told)), authkey=secret) as first:
            first.send(("process", launch.rank, os.uname().nodename))
            _serve(first, (address, int(told)), secret, launch)
        yield None
        return
    secret = secrets.token_hex(16).encode()
    with Listener(("", 0), backlog=launch.world_size, authkey=secret) as listener:
        store.set(key, b"%d %b" % (listener.address[1], secret))
        all_of_them = Launched(launch, listener, f"tcp://{address}:{port}/{key}")
        try:
            yield all_of_them
        finally:
            all_of_them.close()


def _serve(first: Connection, address: tuple[str, int], secret: bytes, launch: Launch) -> None:
    """Starts and ends workers as the first process says, until it goes away."""
    here, processes = ThisMachine(), {}
    while True:
        try:
            order, number, argument = first.recv()
        except (EOFError, OSError):
            for process in processes.values():
                process.kill()
            return
        if order == "start":
            with Client(address, authkey=secret) as connection:
                connection.send(("worker", number, ""))
                worker = replace(argument, local_rank=launch.local_rank)
                processes[number] = here.process_of(worker, connection)
        elif order == "kill":
            processes[number].kill()
        else:
            processes[number].join(argument)
            first.send(processes[number].exitcode)


class Launched(ThisMachine):
    """Starts each worker in the process of its rank.

    Args:
        launch: of this process, the first.
        listener: that the others connect to.
        store: where workers find each other; each group gets a name of its own below it.
    """

    def __init__(self, launch: Launch, listener: Listener, store: str) -> None:
        self.launch = launch
        self._store, self._groups, self._workers = store, 0, 0
        self._arrivals: queue.Queue[tuple[str, int, Connection]] = queue.Queue()
        self._others: dict[int, Connection] = {}
        self.hosts = {0: os.uname().nodename}
        # accept() has no time limit, and Queue.get() has one.
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        while len(self._others) < launch.world_size - 1:
            _, rank, connection = self._arrival(f"{launch.world_size} processes to start")
            self._others[rank] = connection

    def _accept(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept()
                kind, number, host = connection.recv()
            except (EOFError, OSError):
                return
            if kind == "process":
                self.hosts[number] = host
            self._arrivals.put((kind, number, connection))

    def _arrival(self, awaited: str) -> tuple[str, int, Connection]:
        try:
            return self._arrivals.get(timeout=_CONNECT_S)
        except queue.Empty:
            raise WorkersFailed(f"waited {_CONNECT_S:g} s for {awaited}") from None

    def new_store(self) -> str:
        """Returns where the ranks of a new group find each other."""
        self._groups += 1
        return f"{self._store}/{self._groups}"

    def start(self, worker: Worker) -> tuple[Any, Connection]:
        """Starts a worker in the process of its rank."""
        if worker.rank == 0:
            return super().start(replace(worker, local_rank=self.launch.local_rank))
        self._workers += 1
        number, other = self._workers, self._others[worker.rank]
        other.send(("start", number, worker))
        _, _, connection = self._arrival(f"rank {worker.rank} to start")
        return _Elsewhere(other, number), connection

    def close(self) -> None:
        """Lets the other processes end."""
        for connection in self._others.values():
            connection.close()


class _Elsewhere:
    """A process of another one, with what `Workers` asks of a process."""

    def __init__(self, owner: Connection, number: int) -> None:
        self._owner, self._number = owner, number
        self.exitcode: int | None = None

    def join(self, timeout: float | None = None) -> None:
        try:
            self._owner.send(("join", self._number, timeout))
            self.exitcode = self._owner.recv()
        except (EOFError, OSError):
            self.exitcode = None  # its machine is gone

    def kill(self) -> None:
        with suppress(OSError):
            self._owner.send(("kill", self._number, None))
