"""The launcher of a run: torchrun's agent, in this process.

Only :func:`launch_ranks` imports PyTorch.
"""

from __future__ import annotations

import logging
import os
import signal
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING

from shardgrad.programs.train.failure import Interrupted, TrainingError, UsageError
from shardgrad.programs.train.rank import Job, resume_hint, run_rank, tell

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_RANKS_PER_CORE = 16  # more only wait for each other
_WHY: dict[int, str] = {
    signal.SIGKILL: ", as the system does when memory runs out",
    signal.SIGABRT: ", as gloo does to a rank that is sent more than it expects",
}


def launch_ranks(job: Job, ranks: int) -> int:
    """Trains in `ranks` processes that torchrun's agent starts on this machine.

    Ctrl-C reaches the ranks themselves; SIGTERM is forwarded to them.
    When a rank fails, the others are asked to stop, and killed after 30 seconds.

    Returns:
        The exit status. The ranks have said what happened; what a rank could not say, this has.
    """
    # How long ranks that were asked to stop may take to save, before the agent kills them.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if not job.debug:
        logging.disable()  # the agent reports each end of a rank with a traceback
    # A new interpreter is started with -c, which puts the working directory first on sys.path: a
    # threading.py there would be imported for the standard library's.
    os.environ["PYTHONSAFEPATH"] = "1"
    # Held back here and in new processes, which inherit that: no rank is interrupted before it has
    # its handlers. The start of multiprocessing's tracker of resources changes the mask.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    signal.signal(signal.SIGINT, lambda *_: None)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle="SIGTERM",
    )
    try:
        elastic_launch(config, run_rank)(job)
    except SignalException:
        return Interrupted.exit_status
    except ChildFailedError as error:
        return _status_of(*error.get_first_failure(), job.folder)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the report is still to be printed
    return 0


def _status_of(rank: int, failure: ProcessFailure, folder: Path) -> int:
    """Returns the exit status of a run of which a rank failed, and says how, if the rank could
    not.
    """
    status = failure.exitcode
    if status in (TrainingError.exit_status, UsageError.exit_status, Interrupted.exit_status):
        return status
    if status < 0:
        what = f"was ended by {failure.signal_name()}{_WHY.get(-status, '')}"
    else:
        what = f"ended with status {status} without a report"
    tell(f"Rank {rank} {what}. {resume_hint(folder)}")
    return max(status, TrainingError.exit_status)


def available_cores() -> int:
    """Returns the number of cores this process may use; in a container, fewer than the machine
    has.
    """
    return len(os.sched_getaffinity(0))


def require_room(ranks: int) -> None:
    """Refuses to start more ranks than this machine can run.

    Raises:
        UsageError: there are too many.
    """
    most = _RANKS_PER_CORE * available_cores()
    if ranks > most:
        raise UsageError(
            f"{ranks} ranks are to start on this machine, which has {available_cores()} cores: "
            f"start at most {most} with --ranks."
        )


def require_no_launcher() -> None:
    """Refuses to be one of several ranks, each of which would start a run.

    Raises:
        UsageError: the environment is that of a rank.
    """
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        raise UsageError(
            "RANK and WORLD_SIZE are set, as by torchrun, and this program starts its own ranks: "
            "leave the launcher out, or unset them; for several machines, copy "
            "examples/multi_node/train.py."
        )
