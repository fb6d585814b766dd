"""Starts a run, new or resumed, in ranks on this machine: torchrun's agent, in this process.

Only :func:`launch_ranks` imports PyTorch, so that usage errors are reported at once.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import resource
import signal
import tempfile
import time
from collections.abc import Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardgrad.programs.extras import require
from shardgrad.programs.train.config import TrainConfig, read_settings, resumed
from shardgrad.programs.train.failure import Interrupted, TrainingError, UsageError, reason_of
from shardgrad.programs.train.rank import resume_hint, run_rank, tell
from shardgrad.programs.train.texts import read_text

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_LEAST_FILES = 48  # with fewer, torch's store may wait instead of failing


def prepare(given: Mapping[str, Any], *, resume: Path | None) -> TrainConfig:
    """Checks the settings of a run, and makes its folder.

    Args:
        given: the settings given by the user; others have their defaults, or the saved values.
        resume: folder of the run to resume; None for a new run.

    Raises:
        UsageError: the settings are invalid.
        PartnerUnavailableError: a setting needs a package that is not installed.
    """
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        raise UsageError(
            "RANK and WORLD_SIZE are set, as by torchrun, but this program starts its own ranks: "
            "run it without a launcher, or unset them; for several machines, copy "
            "examples/multi_node/train.py."
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < _LEAST_FILES:
        raise UsageError(
            f"A process may open only {limit} files: run ulimit -n 1024, and start again."
        )
    config = _new_run(given) if resume is None else _old_run(given, resume)
    if config.tensorboard:
        require("tensorboard", feature="--tensorboard")
    read_text(config.data, seq_len=config.seq_len)
    try:
        config.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.folder):
            pass
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{config.folder} cannot be written ({reason_of(error)}): make it writable, or choose "
            "another --run-dir."
        ) from error
    return config


def _new_run(given: Mapping[str, Any]) -> TrainConfig:
    config = TrainConfig(**given)
    if not config.run_dir:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.preset}"
        config = dataclasses.replace(config, run_dir=f"runs/{name}")
    if (config.folder / "config.json").exists():
        raise UsageError(
            f"{config.folder} already holds a run: resume it with --resume {config.folder}, or "
            "choose another --run-dir."
        )
    return config


def _old_run(given: Mapping[str, Any], folder: Path) -> TrainConfig:
    if "run_dir" in given:
        raise UsageError(f"--resume {folder} continues in that folder: omit --run-dir.")
    saved = TrainConfig(**read_settings(folder / "config.json"))
    if not any(folder.glob("checkpoints/*")):
        raise UsageError(
            f"{folder} has no checkpoint yet: start the run again, with another --run-dir."
        )
    return resumed(saved, {**given, "run_dir": str(folder)})


def launch_ranks(config: TrainConfig, *, resume: bool) -> int:
    """Trains in processes that torchrun's agent starts on this machine.

    Ctrl-C reaches the ranks themselves, once they are there; SIGTERM is forwarded to them, and they
    are killed if saving takes over an hour. When a rank fails, the others are asked to stop, and
    killed after 30 s.

    Returns:
        The exit status. The ranks have said what happened; what a rank could not say, this has.

    Raises:
        UsageError: there are more ranks than accelerators.
    """
    # How long ranks that were asked to stop may take to save, before the agent kills them.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")

    import torch
    from torch.distributed.elastic.multiprocessing import (
        DefaultLogsSpecs,
        LogsDest,
        SignalException,
    )
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    count = 0 if config.device == "cpu" else torch.accelerator.device_count()
    ranks = config.ranks or count or min(2, len(os.sched_getaffinity(0)))
    if 0 < count < ranks:
        raise UsageError(
            f"There are more ranks than this machine's {count} accelerators: use --ranks {count}."
        )
    config = dataclasses.replace(config, ranks=ranks)
    logging.disable()  # the agent reports each end of a rank with a traceback
    # A new interpreter is started with -c, which puts the working directory first on sys.path: a
    # threading.py there would be imported for the standard library's.
    os.environ["PYTHONSAFEPATH"] = "1"

    class Logs(DefaultLogsSpecs):
        """No logs. What the agent asks for last, before it starts the ranks."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            # Held back here and in new processes, which inherit that: no rank is interrupted before
            # it has its handlers. The start of multiprocessing's tracker of resources changes the
            # mask.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            signal.signal(signal.SIGINT, lambda *_: None)
            return super().reify(envs)

    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=Logs(log_dir=os.devnull),
        signals_to_handle="SIGTERM",
    )
    try:
        elastic_launch(launch, run_rank)(config, resume)
    except SignalException:
        return Interrupted.exit_status
    except ChildFailedError as error:
        return _status_of(*error.get_first_failure(), config.folder)
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
        why = ", as when the system runs out of memory" if status == -signal.SIGKILL else ""
        what = f"was ended by {failure.signal_name()}{why}"
    else:
        what = f"ended with status {status} without a report"
    tell(f"Rank {rank} {what}. {resume_hint(folder)}")
    return max(status, TrainingError.exit_status)
