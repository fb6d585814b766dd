"""Runs a program under an engine on two ranks, and judges how it ended by how it ends with plain
torch.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.silent.cases import PROGRAMS
from tests.silent.engines import ENGINES, NotOffered
from tests.support.apart import RANKS, heard_apart

LIMIT_S = 13.0  # without a word; the longest program takes two seconds
GRACE_S = 1.0  # for another rank's message, once one has ended badly
SOON_S = 1.5  # a warning after it comes from a program that waits, mostly,
PATIENCE_S = 4.0  # and has this long to go on
# Numbers are of order one, in float32, and go through some hundred operations: rounding stays below
# 1e-5. What these programs get wrong, they get wrong in the second or third digit.
TOLERANCE = 2e-5
_BACKENDS = ("gloo", "Connection closed by peer", "Connection reset by peer")


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


def judged(program: str, engine: str, usual: set[str]) -> dict[str, Any]:
    """Runs a program and returns `verdict`; runs it again, with more time, if it seems to hang."""
    found = verdict(run(program, engine), usual)
    return (
        verdict(run(program, engine, 2 * LIMIT_S), usual) if found["verdict"] == "hangs" else found
    )


def run(program: str, engine: str, limit_s: float = LIMIT_S) -> list[Ending]:
    """Runs a program with plain torch and then under an engine, in a new process for each rank."""
    endings = [Ending() for _ in range(RANKS)]
    with closing(heard_apart(_rank, program, engine)) as heard:
        for rank, told, now_s in heard:
            ending = endings[rank]
            if isinstance(told, str):
                ending.warned += told.strip().splitlines()[:1]
                if now_s > SOON_S:
                    limit_s = min(limit_s, now_s + PATIENCE_S)
            elif told is not None and ending.how == "late":
                if isinstance(told, int):
                    name = signal.Signals(-told).name if told < 0 else f"exit status {told}"
                    told = Ending("died", error=name)
                endings[rank] = told
                told.warned = ending.warned
                if told.how != "returned":
                    limit_s = min(limit_s, now_s + GRACE_S)
            if now_s > limit_s or all(each.how != "late" for each in endings):
                break
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
        how = "backend error" if _is_of_backend(worst) else "refused"
        message = {"message": worst.message} if worst.message else {}
        return {
            "verdict": "crashes" if worst.how == "died" else how,
            "error": worst.error,
            **message,
            **told,
        }
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


def _rank(tell: Callable[[Any], None], rank: int, folder: str, program: str, engine: str) -> None:
    ending = Ending()
    try:
        ending.truth = _result(program, "torch", folder)
        ending.values = _result(program, engine, folder)
        ending.how = "returned"
    except NotOffered:
        ending.how = "not offered"
    except BaseException as error:
        ending.how, ending.error = "raised", type(error).__name__
        ending.message = " ".join(str(error).split())[:400]
    tell(ending)
    threading.Event().wait()  # until it is killed: the other rank may still need this one


def _result(program: str, engine: str, folder: str) -> Any:
    torch.manual_seed(0)
    running = ENGINES[engine](folder)
    result = PROGRAMS[program](running)
    return _plain(running.parameters(result) if isinstance(result, nn.Module) else result)


def _plain(result: Any) -> Any:
    if isinstance(result, dict):
        return {key: _plain(value) for key, value in result.items()}
    return result.detach().double().tolist() if isinstance(result, torch.Tensor) else result
