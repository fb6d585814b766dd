"""One rank: joins the process group, trains, and reports how it ended.

Only :func:`run_rank` imports PyTorch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.errors import CheckpointError
from shardgrad.programs.text import escaped
from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.failure import (
    CheckpointUnusable,
    PeerLost,
    TrainingError,
    UnexpectedError,
    UsageError,
    explain,
)
from shardgrad.programs.train.stop import StopRequest

_PATIENCE_S = 5.0  # for the launcher
_TELLERS = (0, 1)  # of the ranks that wait for another: if one of these is lost, the other tells it


def run_rank(config: TrainConfig, resume: bool) -> None:
    """Trains as the rank given by the environment (`RANK`, `WORLD_SIZE`, ...).

    A failure ends the process, with the exit status of the error, after this rank or another has
    said what happened.
    """
    stop = StopRequest().install()
    try:
        import torch.distributed as dist

        from shardgrad.programs.train.loop import Run
        from shardgrad.programs.train.parallel import join

        Run(config, join(config), resume=resume).until_done(stop)
        dist.destroy_process_group()
    except BaseException as error:  # CheckpointException of torch is not an Exception
        failure = explain(error)
        # A launcher that has seen another rank end says how, and terminates this one.
        is_told = isinstance(failure, PeerLost) and stop.terminated_within(_PATIENCE_S)
        stop.close()
        try:
            if isinstance(failure, UnexpectedError):
                for line in traceback.format_exc().splitlines():
                    print(escaped(line), file=sys.stderr)
            if not is_told:
                tell(_report(error, failure, int(os.environ["RANK"]), config.folder))
        finally:
            # Not sys.exit: the backends' threads may wait for ranks that have ended.
            os._exit(failure.exit_status)
    tell("")
    stop.finish()


def tell(report: str) -> None:
    """Prints a report, if there is one, after what waits to be printed."""
    with contextlib.suppress(OSError):  # what read the output may be gone
        sys.stdout.flush()
        if report:
            print(f"shardgrad train: {escaped(report)}", file=sys.stderr, flush=True)


def resume_hint(folder: Path) -> str:
    """Returns a sentence that says how to resume the run in `folder`."""
    from shardgrad.programs.checkpoint import Series

    try:
        newest = Series(folder / "checkpoints").latest()
    except OSError:  # nothing can be read: out of descriptors, or a network file system is gone
        return f"Resume with: shardgrad train --resume {folder}"
    if newest is None:
        return "There is no checkpoint: start the run again, with another --run-dir."
    return f"The newest checkpoint is {newest.name}; resume with: shardgrad train --resume {folder}"


def _report(error: BaseException, failure: TrainingError, rank: int, folder: Path) -> str:
    """Returns what this rank is to tell of a failure; nothing, if another rank tells it."""
    if isinstance(error, CheckpointError) and error.__cause__ is None:
        return ""  # the rank that could not do its part tells it
    if isinstance(error, TrainingError):  # all ranks have found it together
        text = "" if rank else str(failure)
    elif isinstance(failure, PeerLost) and rank not in _TELLERS:
        text = ""
    else:
        where = recorder.location
        text = f"Rank {rank} failed at {where}: {failure}"
    if not text or isinstance(failure, UsageError | CheckpointUnusable):
        return text
    return f"{text} {resume_hint(folder)}"
