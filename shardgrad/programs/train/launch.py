"""Starts a run, new or resumed, in ranks on this machine.

This module does not import PyTorch, so that usage errors are reported at once.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardgrad.extras import require
from shardgrad.programs.train.config import TrainConfig, read_settings, resumed
from shardgrad.programs.train.failure import UsageError, reason_of
from shardgrad.programs.train.launcher import launch_ranks, require_no_launcher, require_room
from shardgrad.programs.train.rank import Job
from shardgrad.programs.train.texts import text_of

RUNS = Path("runs")


def prepare(given: Mapping[str, Any], *, resume: Path | None, debug: bool) -> Job:
    """Checks the settings of a run, and returns what is to be run. Nothing is started or written.

    Args:
        given: the settings given by the user; others have their defaults, or the saved values.
        resume: folder of the run to resume; None for a new run.
        debug: print tracebacks.

    Raises:
        UsageError: the settings are invalid.
        PartnerUnavailableError: a setting needs a package that is not installed.
    """
    require_no_launcher()
    if resume is None:
        config, folder = _new_run(given)
    else:
        config, folder = _old_run(given, resume), resume
    _check_inputs(config)
    require_room(config.ranks or 1)
    config = dataclasses.replace(config, run_dir=str(folder))
    return Job(config, folder, resume is not None, debug)


def start(job: Job) -> int:
    """Trains, and returns the exit status."""
    _make_writable(job.folder)
    ranks = job.config.ranks
    if ranks is None:
        from shardgrad.programs.train.parallel import default_ranks  # imports PyTorch

        ranks = default_ranks(job.config)
    config = dataclasses.replace(job.config, ranks=ranks)
    return launch_ranks(dataclasses.replace(job, config=config), ranks)


def _make_writable(folder: Path) -> None:
    """Makes a run folder; refuses one that cannot be made, or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder} cannot be written ({reason_of(error)}): make it writable, or choose another "
            "--run-dir."
        ) from error


def newest_run() -> Path:
    """Returns the folder in `runs/` that was started last."""
    configs = sorted(RUNS.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if not configs:
        raise UsageError(
            f"There is no run in {RUNS}/ to resume: give its folder, --resume RUN_DIR."
        )
    return configs[-1].parent


def _new_run(given: Mapping[str, Any]) -> tuple[TrainConfig, Path]:
    config = TrainConfig(**given)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.preset}"
    folder = Path(config.run_dir) if config.run_dir is not None else RUNS / name
    if (folder / "config.json").exists():
        raise UsageError(
            f"{folder} already holds a run: resume it with --resume {folder}, or choose another "
            "--run-dir."
        )
    return config, folder


def _old_run(given: Mapping[str, Any], folder: Path) -> TrainConfig:
    saved = _saved_config(folder)
    if given.get("run_dir") is not None and Path(given["run_dir"]).absolute() != folder.absolute():
        raise UsageError(
            f"--resume {folder} goes on in that folder: leave out --run-dir {given['run_dir']}."
        )
    return resumed(saved, given)


def _check_inputs(config: TrainConfig) -> None:
    if config.tensorboard:
        require("tensorboard", feature="--tensorboard")
    text_of(config)


def _saved_config(folder: Path) -> TrainConfig:
    if not (folder / "config.json").exists():
        raise UsageError(
            f"There is no run in {folder} (no config.json): correct the folder given to --resume."
        )
    config = TrainConfig(**read_settings(folder / "config.json"))
    if not any(folder.glob("checkpoints/*")):
        raise UsageError(
            f"{folder} has no checkpoint yet: start the run again, with another --run-dir."
        )
    return config
