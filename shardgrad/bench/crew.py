"""A contestant's processes, supervised: what goes wrong in them is told in a sentence, and stays there."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from shardgrad.bench.catalogue import CATALOGUE
from shardgrad.bench.measure import Cost
from shardgrad.bench.task import Task

__all__ = ["ENTRY", "Crew", "CrewFailed", "Seat", "Trouble", "Turn"]

ENTRY = "shardgrad.bench.rank:serve"

_GRACE_S = 2.0  # for a peer to tell the cause, where the first to speak only felt the consequence
_CONSEQUENCES = ("connection closed by peer", "connection reset by peer", "broken pipe")

# Several ranks on one GPU: NCCL 2.30 allows it if asked; older ones do not look at ranks of other hosts.
_SHARED_DEVICE = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MNNVL_ENABLE": "0",
}


@dataclass(frozen=True)
class Seat:
    """Who a process is.

    Attributes:
        name: of the contestant.
        task: what it shall do.
        rank: in the contestant's own group.
        ranks: of that group.
        meeting: an empty folder where they find each other.
        answer_s: seconds after which a collective gives up.
        log: file for what the process prints.
        entry: `module:function` that serves it, given the seat and a pipe.
    """

    name: str
    task: Task
    rank: int
    ranks: int
    meeting: str
    answer_s: float
    log: str
    entry: str


@dataclass(frozen=True)
class Turn:
    """What a contestant's turn in a round cost one rank, per step.

    Attributes:
        cost: of the steps.
        host_s: until the call of a single step returned, with an idle device; None on a CPU.
    """

    cost: Cost
    host_s: float | None = None


@dataclass(frozen=True)
class Trouble:
    """An exception on a rank.

    Attributes:
        words: its kind and message, shortened.
        traceback: all of it.
        is_memory: memory ran out.
    """

    words: str
    traceback: str
    is_memory: bool = False


class CrewFailed(Exception):
    """A rank raised, died or said nothing for too long; the text is a sentence.

    Attributes:
        is_memory: memory ran out.
        traceback: of the rank that raised; empty where none did.
    """

    def __init__(self, words: str, *, is_memory: bool = False, traceback: str = "") -> None:
        super().__init__(words)
        self.is_memory = is_memory
        self.traceback = traceback


class Crew:
    """All ranks of one contestant.

    Args:
        name: of the contestant.
        task: what it shall do.
        answer_s: seconds that ranks may take over a command.
        log: file for what the processes print, appended to.
        entry: what runs in the processes; see `Seat`.
    """

    def __init__(self, name: str, task: Task, answer_s: float, log: Path, *, entry: str = ENTRY) -> None:
        self.name = name
        self._answer_s = answer_s
        self._meeting = tempfile.mkdtemp(prefix="shardgrad-bench-")
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        ranks = 1 if CATALOGUE[name].is_alone else task.ranks
        for rank in range(ranks):
            self._start(Seat(name, task, rank, ranks, self._meeting, answer_s, str(log), entry))

    def _start(self, seat: Seat) -> None:
        # A server imports torch once, touches no device, and is forked for every rank.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([seat.entry.partition(":")[0]])
        ours, theirs = context.Pipe()
        name = f"{self.name} {seat.rank}"
        process = context.Process(target=_process_main, args=(seat, theirs), name=name, daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)

    def ready(self) -> None:
        """Waits until every rank has built its contestant.

        Raises:
            CrewFailed: one could not.
        """
        self._answers("building it")

    def call(self, command: str, *arguments: Any) -> list[Any]:
        """Has every rank do something, and returns their answers in the order of ranks.

        Raises:
            CrewFailed: a rank did not answer well; the crew is of no use any more.
        """
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((command, arguments))
            except OSError:
                raise CrewFailed(self._death(rank, command)) from None
        return self._answers(command)

    def close(self) -> None:
        """Ends all processes at once; may be called again."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes.clear()
        self._processes.clear()
        shutil.rmtree(self._meeting, ignore_errors=True)

    def _answers(self, doing: str) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline_s = time.monotonic() + self._answer_s
        while len(answers) < len(self._pipes):
            missing = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(missing), max(0.0, deadline_s - time.monotonic()))
            if not ready:
                ranks = ", ".join(map(str, missing.values()))
                raise CrewFailed(f"rank {ranks} did not answer within {self._answer_s:g} s ({doing})")
            for pipe in ready:
                rank = missing[pipe]  # type: ignore[index]
                answers[rank] = self._answer(rank, doing)
            if any(isinstance(answer, Trouble) for answer in answers.values()):
                raise self._cause(answers, doing)
        return [answers[rank] for rank in range(len(self._pipes))]

    def _answer(self, rank: int, doing: str) -> Any:
        try:
            return self._pipes[rank].recv()
        except (EOFError, OSError):
            return Trouble(self._death(rank, doing), "", is_memory=False)

    def _cause(self, answers: dict[int, Any], doing: str) -> CrewFailed:
        """The trouble that explains the others: ranks that felt only the end of a peer come last."""
        missing = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
        for pipe in wait(missing, _GRACE_S):
            rank = self._pipes.index(pipe)  # type: ignore[arg-type]
            answers[rank] = self._answer(rank, doing)
        troubles = {rank: one for rank, one in answers.items() if isinstance(one, Trouble)}

        def is_consequence(rank: int) -> bool:
            return any(words in troubles[rank].words.lower() for words in _CONSEQUENCES)

        rank = min(troubles, key=lambda rank: (is_consequence(rank), rank))
        trouble = troubles[rank]
        words = trouble.words if not trouble.traceback else f"rank {rank}: {trouble.words}"
        return CrewFailed(words, is_memory=trouble.is_memory, traceback=trouble.traceback)

    def _death(self, rank: int, doing: str) -> str:
        process = self._processes[rank]
        process.join(_GRACE_S)
        code = process.exitcode
        if code is not None and code < 0:
            hint = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
            return f"rank {rank} was ended by {signal.Signals(-code).name}{hint} ({doing})"
        return f"rank {rank} ended with status {code} without a word ({doing})"


def _process_main(seat: Seat, pipe: Connection) -> None:
    """What torchrun would have done for a rank, and then the rank itself."""
    with open(seat.log, "ab") as log:  # some engines print a lot, some from C++
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ |= {"RANK": str(seat.rank), "WORLD_SIZE": str(seat.ranks)}
    os.environ |= {"LOCAL_RANK": str(seat.rank), "LOCAL_WORLD_SIZE": str(seat.ranks)}
    # Loopback only, so that the interface's counter sees every byte.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if seat.task.device == "cuda":
        # Once taken down, CUPTI starts again in the middle of a graph's replay, and breaks it.
        os.environ |= {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
    if seat.task.share_device:
        os.environ |= {**_SHARED_DEVICE, "NCCL_HOSTID": f"rank{seat.rank}"}
    resolve_name(seat.entry)(seat, pipe)
