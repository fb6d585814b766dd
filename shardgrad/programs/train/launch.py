"""Starts a run, new or resumed, in ranks started here or as one of torchrun's ranks.

This module does not import PyTorch, so that usage errors are reported at once.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardgrad.extras import require
from shardgrad.programs.train.config import TrainConfig, mesh_shape, read_settings, resumed
from shardgrad.programs.train.failure import UsageError, reason_of
from shardgrad.programs.train.launcher import launch_ranks, require_room, torchrun_world_size
from shardgrad.programs.train.rank import Job, run_rank
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
    world_size = torchrun_world_size()
    ranks = given.get("ranks")
    if world_size is not None and ranks not in (None, world_size):
        raise UsageError(
            f"torchrun started {world_size} ranks, not the {ranks} of --ranks: drop --ranks."
        )
    if resume is None:
        config, folder = _new_run(given, world_size)
    else:
        config, folder = _old_run(given, resume, world_size), resume
    _check_inputs(config)
    if world_size is None:
        require_room(config.ranks or 1)
    config = dataclasses.replace(config, run_dir=str(folder))
    return Job(config, folder, resume is not None, debug)


def start(job: Job) -> int:
    """Trains, and returns the exit status."""
    _require_writable(job.folder)
    if torchrun_world_size() is not None:
        run_rank(job)
        return 0
    job.folder.mkdir(parents=True, exist_ok=True)
    ranks = job.config.ranks
    if ranks is None:
        from shardgrad.programs.train.parallel import default_ranks  # imports PyTorch

        ranks = default_ranks(job.config)
    config = dataclasses.replace(job.config, ranks=ranks)
    return launch_ranks(dataclasses.replace(job, config=config), ranks)


def _require_writable(folder: Path) -> None:
    """Refuses a run folder that cannot be written, or made. Makes none: torchrun's ranks may name
    several.
    """
    try:
        there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        with tempfile.TemporaryFile(dir=there):
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


def _new_run(given: Mapping[str, Any], world_size: int | None) -> tuple[TrainConfig, Path]:
    config = TrainConfig(**given)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.preset}"
    folder = Path(config.run_dir) if config.run_dir is not None else RUNS / name
    # On every rank: torchrun waits half a minute for those that another has left alone. The first
    # one writes the file when all have joined, after this.
    if (folder / "config.json").exists():
        raise UsageError(
            f"{folder} already holds a run: resume it with --resume {folder}, or choose another "
            "--run-dir."
        )
    mesh = mesh_shape(config.mesh)
    ranks = world_size or config.ranks or (math.prod(mesh) if mesh else None)
    return dataclasses.replace(config, ranks=ranks), folder


def _old_run(given: Mapping[str, Any], folder: Path, world_size: int | None) -> TrainConfig:
    saved = _saved_config(folder)
    if given.get("run_dir") is not None and Path(given["run_dir"]).absolute() != folder.absolute():
        raise UsageError(
            f"--resume {folder} goes on in that folder: leave out --run-dir {given['run_dir']}."
        )
    return resumed(saved, given, world_size=world_size)


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
