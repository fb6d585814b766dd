"""One rank: joins the process group, trains, and reports how it ended.

Only :func:`run_rank` imports PyTorch.
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

from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.failure import (
    CheckpointUnusable,
    PeerLost,
    TrainingError,
    UsageError,
    explain,
)
from shardgrad.programs.train.stop import StopRequest

if TYPE_CHECKING:
    from shardgrad.diagnosis.rank_status import Diagnosis, RankStatus
    from shardgrad.diagnosis.watchdog import Watchdog

RANK_STATUS = "rank_status.json"  # in the run folder: the status of every rank when a run failed
_PATIENCE_S = 10.0  # how long to wait for the other ranks' status
_STALL = 0.8  # fraction of the collectives' timeout: report before a backend ends the process


class Cause(IntEnum):
    """How close a report is to the cause of a failure; the report with the lowest value is
    printed.
    """

    OWN = 0  # the failure happened on this rank
    SHARED = 1  # all ranks found the failure together, with the same message
    CONSEQUENCE = 2  # the failure happened on another rank


@dataclass(frozen=True)
class Report:
    """How a rank ended.

    Args:
        rank: the rank.
        exit_status: 0 on success.
        what: what happened, one sentence.
        waits: where the other ranks wait because of it, one sentence.
        hint: what to do.
        cause: how close the report is to the cause of the failure.
        speaks: whether this rank prints its report, if every rank has its own terminal.
        stack: stack of the faulty rank, if it is not this one.
    """

    rank: int
    exit_status: int
    what: str = ""
    waits: str = ""
    hint: str = ""
    cause: Cause = Cause.SHARED
    speaks: bool = False
    stack: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The complete report."""
        return " ".join(filter(None, (self.what, self.waits, self.hint)))


@dataclass(frozen=True)
class Job:
    """What the ranks are to run.

    Args:
        config: resolved settings, with a run folder.
        folder: the run folder.
        resume: resume from the folder's newest checkpoint.
        debug: print tracebacks.
    """

    config: TrainConfig
    folder: Path
    resume: bool
    debug: bool


def run_rank(job: Job, *, init_method: str) -> Report:
    """Trains as the rank given by the environment (`RANK`, `WORLD_SIZE`, ...); reports how it
    ended.

    Args:
        job: what to run, the same on every rank.
        init_method: as for `init_process_group`.
    """
    stop = StopRequest().install()
    folder = job.folder
    rank = int(os.environ["RANK"])
    watchdog: Watchdog | None = None
    try:
        import torch.distributed as dist

        from shardgrad.programs.train.loop import train
        from shardgrad.programs.train.parallel import join, require_same_settings, start_watchdog

        world = join(job.config, init_method=init_method)
        watchdog = start_watchdog(
            world, stall_s=_STALL * job.config.timeout, on_stall=_tell_of_stall
        )
        folder = require_same_settings(world, job.config, folder, resume=job.resume)
        train(
            dataclasses.replace(job.config, run_dir=str(folder)),
            world,
            folder,
            stop,
            resume=job.resume,
        )
        watchdog.close()
        dist.destroy_process_group()
    except BaseException as error:  # CheckpointException of torch is not an Exception
        if job.debug:
            traceback.print_exc()
        try:
            return _failed(error, rank, folder, watchdog)
        finally:
            if watchdog is not None:
                watchdog.close()
    return Report(rank, 0)


def resume_hint(folder: Path) -> str:
    """Returns a sentence that says how to resume the run in `folder`."""
    from shardgrad.programs.checkpoint import Series

    try:
        newest = Series(folder / "checkpoints").latest()
    except OSError:  # nothing can be read: out of descriptors, or a network file system is gone
        return f"Resume with: shardgrad train --resume {folder}"
    if newest is None:
        return "No checkpoint had been written yet, so start the run again."
    return f"The newest checkpoint is {newest.name}; resume with: shardgrad train --resume {folder}"


def _failed(error: BaseException, rank: int, folder: Path, watchdog: Watchdog | None) -> Report:
    failure = explain(error)
    hint = "" if isinstance(failure, UsageError | CheckpointUnusable) else resume_hint(folder)
    if isinstance(error, TrainingError) or watchdog is None:
        cause = Cause.CONSEQUENCE if isinstance(failure, PeerLost) else Cause.SHARED
        return Report(
            rank, failure.exit_status, str(failure), hint=hint, cause=cause, speaks=rank == 0
        )
    if not isinstance(failure, PeerLost):
        watchdog.report_error(error)
        what = f"Rank {rank} failed at {watchdog.location}: {failure}"
        return Report(rank, failure.exit_status, what, hint=hint, cause=Cause.OWN, speaks=True)
    finding, answers = watchdog.query_ranks(timeout_s=_PATIENCE_S)
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
        Cause.CONSEQUENCE,
        # A rank that failed by itself prints its own report.
        speaks
        and not any(answers[culprit].error for culprit in finding.culprits if culprit in answers),
        finding.stack,
    )


def _tell_of_stall(finding: Diagnosis, answers: dict[int, RankStatus]) -> None:
    """Prints which rank the others wait for, on the lowest waiting rank, once per stall."""
    waiting = [rank for rank, answer in answers.items() if rank not in finding.culprits]
    if finding.culprits and int(os.environ["RANK"]) == min(waiting, default=-1):
        print(
            f"shardgrad train: {finding.sentence}",
            *finding.stack,
            sep="\n  ",
            file=sys.stderr,
            flush=True,
        )


def _keep(finding: Diagnosis, answers: dict[int, RankStatus], folder: Path) -> None:
    """Writes the finding and the status of every rank into the run folder, if it is writable."""
    facts = {
        "finding": dataclasses.asdict(finding),
        "ranks": [json.loads(t.to_json()) for t in answers.values()],
    }
    with contextlib.suppress(OSError):
        (folder / RANK_STATUS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
