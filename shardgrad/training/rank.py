"""One rank from joining the others to leaving them, and the word it leaves behind.

Nothing here imports PyTorch before :func:`run_rank` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import traceback
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

from shardgrad.training.config import TrainConfig
from shardgrad.training.failure import CheckpointUnusable, PeerLost, TrainingError, UsageError, explain
from shardgrad.training.stop import StopRequest

if TYPE_CHECKING:
    from shardgrad.diagnosis.hang_watchdog import Lookout
    from shardgrad.diagnosis.rank_status import Account, Finding

INQUEST = "inquest.json"  # in the run folder: what every rank said when it went wrong
_PATIENCE_S = 10.0  # for the other ranks to say where they are
_STALL = 0.8  # of the collectives' time limit: before a backend ends the process


class Blame(IntEnum):
    """How near a report is to the cause; the lowest is told to the user."""

    OWN = 0  # happened on this rank
    SHARED = 1  # the ranks found it together and say the same
    CONSEQUENCE = 2  # of what happened on another rank


@dataclass(frozen=True)
class Report:
    """How a rank ended.

    Args:
        rank: whose.
        exit_status: 0 where all went well.
        what: what happened, a sentence.
        waits: where that left the other ranks, a sentence.
        hint: what to do.
        blame: how near it is to the cause.
        speaks: whether it is for this rank to tell the user, where each rank has a terminal of its own.
        stack: of the rank that is to blame, if it is not this one.
    """

    rank: int
    exit_status: int
    what: str = ""
    waits: str = ""
    hint: str = ""
    blame: Blame = Blame.SHARED
    speaks: bool = False
    stack: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """All of it."""
        return " ".join(filter(None, (self.what, self.waits, self.hint)))


@dataclass(frozen=True)
class Order:
    """What the ranks are told to do.

    Args:
        config: resolved, with a run folder.
        folder: the run folder.
        resume: go on from the folder's newest checkpoint.
        debug: print tracebacks.
    """

    config: TrainConfig
    folder: Path
    resume: bool
    debug: bool


def run_rank(order: Order, *, init_method: str) -> Report:
    """Train as the rank that the environment names (`RANK`, `WORLD_SIZE`, ...), and tell how it ended.

    Args:
        order: the same on every rank.
        init_method: where the ranks meet, as `init_process_group` takes it.
    """
    stop = StopRequest().install()
    folder = order.folder
    rank = int(os.environ["RANK"])
    lookout: Lookout | None = None
    try:
        import torch.distributed as dist

        from shardgrad.training.loop import train
        from shardgrad.training.parallel import join, look_out

        place = join(order.config, init_method=init_method)
        lookout = look_out(place, stall_s=_STALL * order.config.timeout, on_stall=_tell_of_stall)
        # torchrun's ranks each looked at their own clock to name the folder: the first one's counts.
        folder = Path(place.tell_all(str(folder)))
        train(
            dataclasses.replace(order.config, run_dir=str(folder)), place, folder, stop, resume=order.resume
        )
        lookout.close()
        dist.destroy_process_group()
    except BaseException as error:  # CheckpointException, for one, is no Exception
        if order.debug:
            traceback.print_exc()
        try:
            return _failed(error, rank, folder, lookout)
        finally:
            if lookout is not None:
                lookout.close()
    return Report(rank, 0)


def resume_hint(folder: Path) -> str:
    """How to go on with the run in `folder`, as a sentence."""
    from shardgrad.checkpoint import Series

    try:
        newest = Series(folder / "checkpoints").latest()
    except OSError:  # nothing can be read here, for want of descriptors or of a network
        return f"Resume with: shardgrad train --resume {folder}"
    if newest is None:
        return "No checkpoint had been written yet, so start the run again."
    return f"The newest checkpoint is {newest.name}; resume with: shardgrad train --resume {folder}"


def _failed(error: BaseException, rank: int, folder: Path, lookout: Lookout | None) -> Report:
    failure = explain(error)
    hint = "" if isinstance(failure, UsageError | CheckpointUnusable) else resume_hint(folder)
    if isinstance(error, TrainingError) or lookout is None:
        blame = Blame.CONSEQUENCE if isinstance(failure, PeerLost) else Blame.SHARED
        return Report(rank, failure.exit_status, str(failure), hint=hint, blame=blame, speaks=rank == 0)
    if not isinstance(failure, PeerLost):
        lookout.report(error)
        what = f"Rank {rank} failed at {lookout.place}: {failure}"
        return Report(rank, failure.exit_status, what, hint=hint, blame=Blame.OWN, speaks=True)
    finding, answers = lookout.ask(patience_s=_PATIENCE_S)
    witnesses = set(answers) - set(finding.culprits)
    speaks = rank == min(witnesses, default=rank)
    if speaks:
        _keep(finding, answers, folder)
    return Report(
        rank,
        failure.exit_status,
        finding.what if finding.culprits else f"Rank {rank}: {failure} {finding.what}",
        finding.waits,
        hint,
        Blame.CONSEQUENCE,
        # A rank that failed by itself has a voice of its own.
        speaks and not any(answers[culprit].error for culprit in finding.culprits if culprit in answers),
        finding.stack,
    )


def _tell_of_stall(finding: Finding, answers: dict[int, Account]) -> None:
    """Say who holds up the others, while it lasts, once: the lowest of those who wait does."""
    waiting = [rank for rank, answer in answers.items() if rank not in finding.culprits]
    if finding.culprits and int(os.environ["RANK"]) == min(waiting, default=-1):
        print(f"shardgrad train: {finding.sentence}", *finding.stack, sep="\n  ", file=sys.stderr, flush=True)


def _keep(finding: Finding, answers: dict[int, Account], folder: Path) -> None:
    """Leave what was found, and what every rank said, in the run folder, if that can be written."""
    facts = {
        "finding": dataclasses.asdict(finding),
        "ranks": [json.loads(t.to_json()) for t in answers.values()],
    }
    with contextlib.suppress(OSError):
        (folder / INQUEST).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
