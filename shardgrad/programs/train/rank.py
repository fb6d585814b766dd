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
from pathlib import Path
from typing import TYPE_CHECKING

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.diagnosis.rank_status import Diagnosis, RankStatus, describe_location
from shardgrad.errors import CheckpointError, CheckpointSaveError
from shardgrad.programs.text import escaped
from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.failure import (
    CheckpointUnusable,
    PeerLost,
    TrainingError,
    UsageError,
    explain,
)
from shardgrad.programs.train.stop import StopRequest
from shardgrad.programs.train.texts import text_of

if TYPE_CHECKING:
    from shardgrad.diagnosis.watchdog import Watchdog

RANK_STATUS = "rank_status.json"  # in the run folder: the status of every rank when a run failed
_PATIENCE_S = 10.0  # how long to wait for the other ranks' status


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


def run_rank(job: Job) -> None:
    """Trains as the rank given by the environment (`RANK`, `WORLD_SIZE`, ...).

    A failure ends the process, with the exit status of the error, after this rank or another has
    said what happened.

    Args:
        job: what to run, the same on every rank.
    """
    stop = StopRequest().install()
    folder = job.folder
    rank = int(os.environ["RANK"])
    watchdog: Watchdog | None = None
    try:
        import torch.distributed as dist

        from shardgrad.diagnosis.watchdog import watch_ranks
        from shardgrad.programs.train.corpus import load_corpus
        from shardgrad.programs.train.loop import train
        from shardgrad.programs.train.parallel import join, require_same_settings

        world = join(job.config)
        watchdog = watch_ranks(world.device)
        corpus = load_corpus(text_of(job.config))
        folder = require_same_settings(world, job.config, folder, corpus.digest, resume=job.resume)
        config = dataclasses.replace(job.config, run_dir=str(folder))
        train(config, world, folder, corpus, stop, resume=job.resume)
        if watchdog is not None:
            watchdog.close()
        dist.destroy_process_group()
    except BaseException as error:  # CheckpointException of torch is not an Exception
        stop.close()
        if job.debug:
            traceback.print_exc()
        failure = explain(error)
        try:
            tell(*_report(error, failure, rank, folder, watchdog))
            if watchdog is not None:
                watchdog.close()
        finally:
            # Not sys.exit: the backends' threads may wait for ranks that have ended.
            os._exit(failure.exit_status)
    stop.close()


def tell(*lines: str) -> None:
    """Prints a report, if there is one: a sentence, and the frames of a stack."""
    with contextlib.suppress(OSError):  # what read the output may be gone
        sys.stdout.flush()
        for number, line in enumerate(lines):
            prefix = "  " if number else "shardgrad train: "
            print(f"{prefix}{escaped(line)}", file=sys.stderr, flush=True)


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


def _report(
    error: BaseException,
    failure: TrainingError,
    rank: int,
    folder: Path,
    watchdog: Watchdog | None,
) -> list[str]:
    """Returns what this rank is to tell of a failure; nothing, if another rank tells it."""
    hint = [] if isinstance(failure, UsageError | CheckpointUnusable) else [resume_hint(folder)]
    if isinstance(error, CheckpointSaveError | CheckpointError) and error.__cause__ is None:
        return []  # the rank that could not do its part tells it
    if isinstance(error, TrainingError):  # all ranks have found it together, once they have met
        return [" ".join([str(failure), *hint])] if rank == 0 or watchdog is None else []
    if watchdog is None or not isinstance(failure, PeerLost):
        if watchdog is not None:
            watchdog.end(error)
        where = describe_location(recorder.step, recorder.phase, recorder.unit)
        return [" ".join([f"Rank {rank} failed at {where}: {failure}", *hint])]
    finding, answers = watchdog.query_ranks(timeout_s=_PATIENCE_S)
    culprits = set(finding.culprits)
    if rank != min(set(answers) - culprits, default=rank):
        return []
    _keep(finding, answers, folder)
    if any(answers[culprit].error for culprit in culprits & set(answers)):
        return []  # a rank that failed by itself tells it
    what = finding.what if culprits else f"Rank {rank}: {failure} {finding.what}"
    return [" ".join(filter(None, [what, finding.waits, *hint])), *finding.stack]


def _keep(finding: Diagnosis, answers: dict[int, RankStatus], folder: Path) -> None:
    """Writes the finding and the status of every rank into the run folder, if it is writable."""
    facts = {
        "finding": dataclasses.asdict(finding),
        "ranks": list(map(dataclasses.asdict, answers.values())),
    }
    with contextlib.suppress(OSError):
        (folder / RANK_STATUS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
