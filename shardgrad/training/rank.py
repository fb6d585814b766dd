"""One rank from joining the others to leaving them, and the word it leaves behind.

Nothing here imports PyTorch before :func:`run_rank` does.
"""

from __future__ import annotations

import dataclasses
import os
import traceback
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from shardgrad.checkpoint import Series
from shardgrad.training.config import TrainConfig
from shardgrad.training.failure import PeerLost, TrainingError, UsageError, explain
from shardgrad.training.stop import StopRequest


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
        sentence: what happened and what to do.
        blame: how near it is to the cause.
    """

    rank: int
    exit_status: int
    sentence: str = ""
    blame: Blame = Blame.SHARED


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
    try:
        import torch.distributed as dist

        from shardgrad.training.loop import train
        from shardgrad.training.parallel import join

        place = join(order.config, init_method=init_method)
        # torchrun's ranks each looked at their own clock to name the folder: the first one's counts.
        folder = Path(place.tell_all(str(folder)))
        train(
            dataclasses.replace(order.config, run_dir=str(folder)), place, folder, stop, resume=order.resume
        )
        dist.destroy_process_group()
    except Exception as error:
        if order.debug:
            traceback.print_exc()
        return _failed(error, int(os.environ["RANK"]), folder)
    return Report(int(os.environ["RANK"]), 0)


def resume_hint(folder: Path) -> str:
    """How to go on with the run in `folder`, as a sentence."""
    newest = Series(folder / "checkpoints").latest()
    if newest is None:
        return "No checkpoint had been written yet, so start the run again."
    return f"The newest checkpoint is {newest.name}; resume with: shardgrad train --resume {folder}"


def _failed(error: Exception, rank: int, folder: Path) -> Report:
    failure = explain(error)
    blame = Blame.SHARED if isinstance(error, TrainingError) else Blame.OWN
    if isinstance(failure, PeerLost):
        blame = Blame.CONSEQUENCE
    where = "" if blame is Blame.SHARED else f"Rank {rank}: "
    hint = "" if isinstance(failure, UsageError) else f" {resume_hint(folder)}"
    return Report(rank, failure.exit_status, f"{where}{failure}{hint}", blame)
