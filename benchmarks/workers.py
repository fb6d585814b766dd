"""Worker processes: the ranks in which everything of more than one rank is measured.

What goes wrong in them is told in a sentence, and stays there. The parent names what workers do
(`module:name`) and does not pass it, so that it need not import it.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import textwrap
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

_PRELOADED = "benchmarks.engines.torch_and_shardgrad"
_GRACE_S = 2.0  # for a peer to tell the cause, where the first to speak only felt the consequence
_CONSEQUENCES = ("connection closed by peer", "connection reset by peer", "broken pipe")

# On a CPU, PyTorch has no caching allocator. glibc returns large blocks and the top of its heap to
# the kernel, so that every step would pay a page fault for every 4 KiB that it touches.
_KEEP_HEAP = {
    "MALLOC_MMAP_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}

# Several ranks on one GPU: NCCL 2.30 allows it if asked, as torch's symmetric memory does; older
# ones do not look at ranks of other hosts.
SHARED_DEVICE = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MNNVL_ENABLE": "0",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}


@dataclass(frozen=True)
class Worker:
    """One process.

    Attributes:
        serves: `module:class`; made of this worker and `argument`, its methods are what the parent
            calls.
        argument: for it.
        rank: of this process.
        ranks: of its group.
        store: where the ranks find each other: an empty folder of this machine, or a name below the
            address of a store, `tcp://host:port/name`.
        timeout_s: after which a collective gives up.
        device: `cpu` or `cuda`.
        share_device: all ranks use one GPU.
        log: file for what the process prints; None leaves it on the terminal.
        local_rank: among the ranks of its machine; None where all are on one.
        starts_by: "forkserver" or "spawn", which takes longer, and has the environment of now.
    """

    serves: str
    argument: Any
    rank: int
    ranks: int
    store: str
    timeout_s: float
    device: str = "cpu"
    share_device: bool = False
    log: str | None = None
    local_rank: int | None = None
    starts_by: str = "forkserver"

    def join(self) -> Any:
        """Makes this process a rank of its process group; returns its `torch.device`."""
        import torch
        import torch.distributed as dist

        # torch 2.13 gave collectives new names; engines that serve older ones know only the old.
        warnings.filterwarnings(
            "ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning
        )
        torch.set_num_threads(1)
        device, backend = torch.device("cpu"), "gloo"
        if self.device == "cuda":
            local = self.rank if self.local_rank is None else self.local_rank
            device = torch.device("cuda", 0 if self.share_device else local)
            torch.cuda.set_device(device)
            here = self.ranks if self.local_rank is None else torch.cuda.device_count()
            places = [0 if self.share_device else rank for rank in range(here)]
            os.sched_setaffinity(0, share_of_cores([_cores_near(place) for place in places], local))
            backend = "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=self.timeout_s)
        if self.is_among_hosts:
            address, _, name = self.store.removeprefix("tcp://").partition("/")
            host, _, port = address.rpartition(":")
            met: dist.Store = dist.PrefixStore(
                name, dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
            )
        else:
            met = dist.FileStore(f"{self.store}/store", self.ranks)
        dist.init_process_group(
            backend, store=met, rank=self.rank, world_size=self.ranks, timeout=timeout
        )
        return device

    @property
    def is_among_hosts(self) -> bool:
        """True where ranks may be on several machines."""
        return self.store.startswith("tcp://")


def _cores_near(device: int) -> list[int]:
    """Returns the cores on a GPU's NUMA node, of those that this process may use; all of these if
    unknown.
    """
    import torch

    allowed = os.sched_getaffinity(0)
    place = torch.cuda.get_device_properties(device)
    bus = f"{place.pci_domain_id:04x}:{place.pci_bus_id:02x}:{place.pci_device_id:02x}.0"
    try:
        listed = Path(f"/sys/bus/pci/devices/{bus}/local_cpulist").read_text()
    except OSError:
        listed = ""
    near: set[int] = set()
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        near.update(range(int(first), int(last or first) + 1))
    return sorted(allowed & near or allowed)


def share_of_cores(near: Sequence[Sequence[int]], rank: int) -> Sequence[int]:
    """Returns a rank's part of the cores that it has in common with other ranks.

    So that no two ranks have the same core, and none moves to another node: NCCL from 2.30 on does
    not see to it any more.

    Args:
        near: for each rank, the cores near its GPU.
        rank: whose part.
    """
    same = [other for other, cores in enumerate(near) if cores == near[rank]]
    each, place = len(near[rank]) // len(same), same.index(rank)
    return near[rank][place * each : (place + 1) * each] or near[rank]


@dataclass(frozen=True)
class _Failure:
    """An exception on a rank.

    Attributes:
        words: its kind and message, shortened.
        traceback: all of it.
        is_memory: memory ran out.
    """

    words: str
    traceback: str = ""
    is_memory: bool = False


class WorkersFailed(Exception):
    """A rank raised, died or said nothing for too long; the text is a sentence.

    Attributes:
        is_memory: memory ran out.
        traceback: of the rank that raised; empty where none did.
    """

    def __init__(self, words: str, *, is_memory: bool = False, traceback: str = "") -> None:
        super().__init__(words)
        self.is_memory = is_memory
        self.traceback = traceback


class ThisMachine:
    """Starts workers here."""

    hosts: Mapping[int, str] = {}  # by rank, if there are several

    def new_store(self) -> str:
        """Returns where the ranks of a new group find each other."""
        return tempfile.mkdtemp(prefix="shardgrad-benchmark-")

    def start(self, worker: Worker) -> tuple[BaseProcess, Connection]:
        """Starts a worker; returns its process, and what its calls and answers go through."""
        ours, theirs = multiprocessing.Pipe()
        process = self.process_of(worker, theirs)
        theirs.close()
        return process, ours

    def process_of(self, worker: Worker, connection: Connection) -> BaseProcess:
        """Starts a worker that answers through a connection."""
        # A server imports torch and the engines once, touches no device, and is forked for every
        # rank.
        os.environ.update(_KEEP_HEAP)
        context = multiprocessing.get_context(worker.starts_by)
        context.set_forkserver_preload([_PRELOADED, worker.serves.partition(":")[0]])
        process = context.Process(target=_main, args=(worker, connection), daemon=True)
        process.start()
        return process


class Workers:
    """All ranks of one process group.

    Args:
        serves: see `Worker`.
        argument: see `Worker`.
        ranks: how many.
        timeout_s: seconds that ranks may take over a call.
        on: what starts them.
        **settings: further fields of `Worker`.
    """

    def __init__(
        self,
        serves: str,
        argument: Any,
        ranks: int,
        timeout_s: float,
        on: ThisMachine | None = None,
        **settings: Any,
    ) -> None:
        self._timeout_s = timeout_s
        on = on or ThisMachine()
        self._store, self._hosts = on.new_store(), on.hosts
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        for rank in range(ranks):
            worker = Worker(serves, argument, rank, ranks, self._store, timeout_s, **settings)
            process, pipe = on.start(worker)
            self._processes.append(process)
            self._pipes.append(pipe)

    def ready(self) -> None:
        """Waits until every rank has made what it serves.

        Raises:
            WorkersFailed: one could not.
        """
        self._answers("start")

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method on every rank, and returns their answers in the order of ranks.

        Raises:
            WorkersFailed: a rank did not answer well; the workers are of no use any more.
        """
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((method, arguments))
            except OSError:
                raise WorkersFailed(self._death(rank, method)) from None
        return self._answers(method)

    def close(self) -> None:
        """Ends all processes at once; may be called again."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes.clear()
        self._processes.clear()
        shutil.rmtree(self._store, ignore_errors=True)  # if it is a folder

    def _answers(self, doing: str) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline_s = time.monotonic() + self._timeout_s
        while len(answers) < len(self._pipes):
            missing = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(missing), max(0.0, deadline_s - time.monotonic()))
            if not ready:
                ranks = ", ".join(map(self._named, missing.values()))
                raise WorkersFailed(
                    f"rank {ranks} did not answer within {self._timeout_s:g} s ({doing})"
                )
            for pipe in ready:
                rank = missing[pipe]  # type: ignore[index]
                answers[rank] = self._answer(rank, doing)
            if any(isinstance(answer, _Failure) for answer in answers.values()):
                raise self._cause(answers, doing)
        return [answers[rank] for rank in range(len(self._pipes))]

    def _answer(self, rank: int, doing: str) -> Any:
        try:
            return self._pipes[rank].recv()
        except (EOFError, OSError):
            return _Failure(self._death(rank, doing))

    def _cause(self, answers: dict[int, Any], doing: str) -> WorkersFailed:
        """The failure that explains the others: ranks that felt only the end of a peer come
        last.
        """
        missing = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
        for pipe in wait(missing, _GRACE_S):
            rank = self._pipes.index(pipe)  # type: ignore[arg-type]
            answers[rank] = self._answer(rank, doing)
        failures = {rank: one for rank, one in answers.items() if isinstance(one, _Failure)}

        def is_consequence(rank: int) -> bool:
            return any(words in failures[rank].words.lower() for words in _CONSEQUENCES)

        rank = min(failures, key=lambda rank: (is_consequence(rank), rank))
        failure = failures[rank]
        words = (
            failure.words if not failure.traceback else f"rank {self._named(rank)}: {failure.words}"
        )
        return WorkersFailed(words, is_memory=failure.is_memory, traceback=failure.traceback)

    def _death(self, rank: int, doing: str) -> str:
        process = self._processes[rank]
        process.join(_GRACE_S)
        code = process.exitcode
        if code is not None and code < 0:
            hint = ", as when the system runs out of memory" if -code == signal.SIGKILL else ""
            how = f"was ended by {signal.Signals(-code).name}{hint}"
        else:
            how = f"ended{'' if code is None else f' with status {code}'} without a word"
        return f"rank {self._named(rank)} {how} ({doing})"

    def _named(self, rank: int) -> str:
        host = self._hosts.get(rank)
        return str(rank) if host is None else f"{rank} on {host}"


def _main(worker: Worker, pipe: Connection) -> None:
    """What torchrun would have done for a rank, and then the answers to calls, until the pipe
    closes.
    """
    if worker.log is not None:
        Path(worker.log).parent.mkdir(parents=True, exist_ok=True)  # of another machine
        with open(worker.log, "ab") as log:  # some engines print a lot, some from C++
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    os.environ |= {"RANK": str(worker.rank), "WORLD_SIZE": str(worker.ranks)}
    if not worker.is_among_hosts:
        os.environ |= {"LOCAL_RANK": str(worker.rank), "LOCAL_WORLD_SIZE": str(worker.ranks)}
        # Loopback only, so that the interface's counter sees every byte.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if worker.device == "cuda":
        # Once taken down, CUPTI starts again in the middle of a graph's replay, and breaks it.
        os.environ |= {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
    if worker.share_device:
        os.environ |= {**SHARED_DEVICE, "NCCL_HOSTID": f"rank{worker.rank}"}
    try:
        served = resolve_name(worker.serves)(worker)
        pipe.send(None)
        while True:
            method, arguments = pipe.recv()
            pipe.send(getattr(served, method)(*arguments))
    except EOFError:
        # The parent has closed the pipe; graphs, watchdogs and peers may be in any state.
        os._exit(0)
    except BaseException as error:
        is_memory = isinstance(error, MemoryError) or "out of memory" in str(error).lower()
        words = textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
        pipe.send(_Failure(words, "".join(traceback.format_exception(error)), is_memory))
        # Not by unwinding: a peer may never come to the collective that a destructor waits for.
        os._exit(1)


# -- functions on ranks


class Functions:
    """What `on_ranks` has its workers serve: any function, in a process group of gloo."""

    def __init__(self, worker: Worker) -> None:
        worker.join()

    def call(self, function: str, arguments: tuple[Any, ...]) -> Any:
        """Calls `module:name`."""
        return resolve_name(function)(*arguments)


def on_ranks(function: str, ranks: int, *arguments: Any) -> list[Any]:
    """Calls a function on every rank of new processes, and waits an hour at most; returns what each
    returned, in order.

    Args:
        function: `module:name`.
        ranks: how many.
        *arguments: for it.

    Raises:
        WorkersFailed: at the first failure; the other ranks are ended.
    """
    workers = Workers("benchmarks.workers:Functions", None, ranks, timeout_s=3600.0)
    try:
        workers.ready()
        return workers.call("call", function, arguments)
    except WorkersFailed as failure:
        raise WorkersFailed(failure.traceback or str(failure)) from None
    finally:
        workers.close()
