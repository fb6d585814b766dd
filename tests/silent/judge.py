"""Runs a program under an engine on two ranks, and judges how it ended by how it ends with plain
torch.
"""

from __future__ import annotations

import importlib
import logging
import math
import multiprocessing
import os
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardgrad.diagnosis import watchdog
from tests.silent.engines import ENGINES, NotOffered
from tests.support.processes import CONTEXT, FairClock

RANKS = 2
LIMIT_S = 13.0  # without a word; the longest program takes two seconds
GRACE_S = 1.0  # for another rank's message, once one has ended badly
SOON_S = 1.5  # a warning after it comes from a program that waits, mostly,
STALL_S = 2.0  # of the watchdog; 10 outside of tests
PATIENCE_S = 4.0  # and has this long to go on
# Numbers are of order one, in float32, and go through some hundred operations: rounding stays below
# 1e-5. What these programs get wrong, they get wrong in the second or third digit.
TOLERANCE = 2e-5
_BACKENDS = ("gloo", "Connection closed by peer", "Connection reset by peer")
_CASES = Path(__file__).parent / "cases"


@dataclass
class Ending:
    """How a program ended on one rank.

    Attributes:
        how: returned, raised, died, late, or not offered.
        values: what it returned; tensors as nested lists.
        truth: what it returned before, in the same process, with plain torch.
        error: type of what it raised, or the signal that ended it.
        message: of what it raised, in one line.
        warned: first lines of warnings, and of what was logged as one.
    """

    how: str = "late"
    values: Any = None
    truth: Any = None
    error: str = ""
    message: str = ""
    warned: list[str] = field(default_factory=list)


def names() -> list[str]:
    """Returns the names of all programs."""
    return sorted(path.stem for path in _CASES.glob("*.py"))


def judged(program: str, engine: str, usual: set[str]) -> dict[str, Any]:
    """Runs a program and returns `verdict`; runs it again, with more time, if it seems to hang."""
    found = verdict(run(program, engine), usual)
    return (
        verdict(run(program, engine, 2 * LIMIT_S), usual) if found["verdict"] == "hangs" else found
    )


def run(program: str, engine: str, limit_s: float = LIMIT_S) -> list[Ending]:
    """Runs `cases/<program>.py` with plain torch and then under an engine, in a new process for
    each rank.
    """
    with tempfile.TemporaryDirectory(prefix="silent-") as folder:
        processes, pipes = [], []
        for rank in range(RANKS):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(
                target=_rank, args=(program, engine, rank, folder, theirs), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            return _listen(pipes, processes, limit_s)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _listen(pipes: Sequence[Connection], processes: Sequence[Any], limit_s: float) -> list[Ending]:
    endings = [Ending() for _ in pipes]
    clock = FairClock([process.pid for process in processes])
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    while open_pipes and (now_s := clock.elapsed_s()) < limit_s:
        for pipe in wait(list(open_pipes), 0.1):
            rank = open_pipes[pipe]  # type: ignore[index]
            ending = endings[rank]
            try:
                told = pipe.recv()  # type: ignore[union-attr]
            except (EOFError, OSError):
                processes[rank].join(1)
                status = processes[rank].exitcode or 0
                ending.how = "died"
                ending.error = (
                    signal.Signals(-status).name if status < 0 else f"exit status {status}"
                )
                told = None
            if isinstance(told, str):
                ending.warned.append(told)
                if now_s > SOON_S:
                    limit_s = min(limit_s, now_s + PATIENCE_S)
                continue
            if told is not None:
                ending.how, ending.values, ending.truth, ending.error, ending.message = told
            del open_pipes[pipe]  # type: ignore[arg-type]
            if ending.how in ("raised", "died", "not offered"):
                limit_s = min(limit_s, now_s + GRACE_S)
    return endings


# -- verdicts


def verdict(endings: Sequence[Ending], usual: set[str]) -> dict[str, Any]:
    """Judges how a program ended.

    Args:
        endings: by rank.
        usual: warnings that the engine gives to a program without a mistake.

    Returns:
        `verdict`, and what there is of `error`, `message`, `off` (the largest difference) and
        `warned`.
    """
    hows = {ending.how for ending in endings}
    warned = sorted({line for ending in endings for line in ending.warned} - usual)
    told: dict[str, Any] = {"warned": warned} if warned else {}
    if "not offered" in hows:
        return {"verdict": "not offered"}
    truths = [ending.truth for ending in endings if ending.how in ("returned", "raised")]
    if any(truth is None or _distance(truth, truths[0]) > 0 for truth in truths):
        return {"verdict": "no oracle"}
    # What names the cause counts, if another rank only lost its connection.
    bad = [ending for ending in endings if ending.how in ("raised", "died")]
    if bad:
        worst = min(bad, key=lambda ending: (ending.how == "died", _is_of_backend(ending)))
        how = "refused"
        if worst.how == "died":
            how = "crashes"
        elif _is_of_backend(worst):
            how = "backend error"
        message = {"message": worst.message} if worst.message else {}
        return {"verdict": how, "error": worst.error, **message, **told}
    if "late" in hows:
        return {"verdict": "hangs, warned" if warned else "hangs", **told}
    off = max(_distance(ending.values, ending.truth) for ending in endings)
    if off <= TOLERANCE:
        return {"verdict": "right", "off": off, **told}
    return {"verdict": "wrong, warned" if warned else "wrong", "off": off, **told}


def _is_of_backend(ending: Ending) -> bool:
    return any(words in ending.message for words in _BACKENDS)


def _distance(values: Any, truth: Any) -> float:
    """Returns the largest absolute difference; infinity where one side lacks something, or is not
    finite.
    """
    if isinstance(truth, dict) and isinstance(values, dict) and set(truth) == set(values):
        return max((_distance(values[key], truth[key]) for key in truth), default=0.0)
    if isinstance(truth, list) and isinstance(values, list) and len(truth) == len(values):
        return max(map(_distance, values, truth), default=0.0)
    if not isinstance(truth, int | float) or not isinstance(values, int | float):
        return math.inf
    off = abs(float(values) - float(truth))
    return off if math.isfinite(off) else (0.0 if str(values) == str(truth) else math.inf)


# -- in a rank


def _rank(program: str, engine: str, rank: int, folder: str, pipe: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    silence = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(silence, descriptor)
    lock, known = threading.Lock(), set[str]()

    def tell(text: object) -> None:
        line = str(text).strip().splitlines()[0] if str(text).strip() else ""
        with lock:  # threads warn too
            if line not in known:
                known.add(line)
                pipe.send(line)

    _hear_warnings(tell)
    watchdog.STALL_S = STALL_S
    # Longer than the time limit: what waits that long hangs.
    store, timeout = dist.FileStore(f"{folder}/store", RANKS), timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
    ending = _ending(program, engine, rank, folder)
    with lock:
        pipe.send(ending)
    threading.Event().wait()  # until it is killed: the other rank may still need this one


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _hear_warnings(tell: Callable[[object], None]) -> None:
    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        tell(message)

    warnings.simplefilter("always")
    warnings.showwarning = show  # type: ignore[assignment]
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: tell(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)


def _ending(program: str, engine: str, rank: int, folder: str) -> tuple[str, Any, Any, str, str]:
    truth = None
    try:
        module = importlib.import_module(f"tests.silent.cases.{program}")
        truth = _result(module, "torch", rank, folder)
        return "returned", _result(module, engine, rank, folder), truth, "", ""
    except NotOffered as error:
        return "not offered", None, truth, "", str(error)
    except BaseException as error:
        return "raised", None, truth, type(error).__name__, " ".join(str(error).split())[:400]


def _result(module: Any, engine: str, rank: int, folder: str) -> Any:
    torch.manual_seed(0)
    running = ENGINES[engine](folder)
    result = module.program(running, rank)
    return _plain(running.parameters(result) if isinstance(result, nn.Module) else result)


def _plain(result: Any) -> Any:
    if isinstance(result, dict):
        return {key: _plain(value) for key, value in result.items()}
    return result.detach().double().tolist() if isinstance(result, torch.Tensor) else result
