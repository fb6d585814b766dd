"""The training program's checkpoints: the state of a run, and how it is saved and loaded."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from shardgrad.errors import CheckpointError, CheckpointSaveError
from shardgrad.programs.checkpoint import Series, load, save
from shardgrad.programs.checkpoint.peers import Peers
from shardgrad.programs.train.failure import CheckpointUnusable, UsageError
from shardgrad.programs.train.model import Transformer
from shardgrad.programs.train.parallel import World

# Each rank has its own generator. On another number of ranks, entries are missing or unused.
_OPTIONAL = ("rng_*",)


@dataclass
class TrainState:
    """The state that a training step changes.

    Args:
        model: the model, sharded or not.
        optimizer: optimizer over the model's parameters.
        step: number of optimizer steps done.
        samples: number of sequences consumed by all ranks together, which is the position in the
            data.
    """

    model: Transformer
    optimizer: torch.optim.Optimizer
    step: int = 0
    samples: int = 0


def lock(series: Series, world: World) -> None:
    """Locks the folder of a run's checkpoints until this process ends, so that only this run writes
    there. A collective.

    Raises:
        UsageError: another process writes there; on every rank.
    """
    try:
        Peers(world.control).broadcast("lock", series.acquire)
    except CheckpointSaveError as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, CheckpointSaveError):
            raise
        raise UsageError(f"{error.what} ({error.got}): {error.fix}.") from error


def save_state(series: Series, state: TrainState, world: World) -> Path:
    """Saves the state as the checkpoint of its step, which `latest` names from then on. A
    collective.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointSaveError: on every rank if any rank could not write. Existing checkpoints are
            unchanged.
    """
    final = series.path_of(state.step)
    with warnings.catch_warnings():
        # torch's warnings about its own internals would break the progress display.
        warnings.filterwarnings("ignore", module=r"torch\.distributed.*")
        publish = partial(series.publish, final)
        save(_gather_state(state, world), final, group=world.control, then=publish)
    return final


def load_state(series: Series, state: TrainState, world: World) -> None:
    """Loads the newest checkpoint into `state`; the number of ranks may differ. A collective.

    Raises:
        TrainingError: the checkpoint is damaged or does not fit; `state` is unchanged.
    """
    path = series.latest()
    if path is None:
        raise UsageError(
            f"There is no checkpoint in {series.folder}: start the run again without --resume."
        )
    try:
        loaded = load(_gather_state(state, world), path, optional=_OPTIONAL, group=world.control)
    except CheckpointError as error:
        raise CheckpointUnusable(
            f"{path} cannot be used ({error.what}; {error.got}, at {error.where}): {error.fix}. "
            f"Training resumes from the checkpoint that is named in {series.folder / 'latest'}."
        ) from error
    set_state_dict(
        state.model,
        state.optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    state.step, state.samples = loaded["progress"]["step"], loaded["progress"]["samples"]
    generators = loaded[f"rng_{world.rank}"]
    torch.set_rng_state(generators["cpu"])
    if world.device.type != "cpu":
        module = torch.get_device_module(world.device)
        module.set_rng_state(generators[world.device.type], world.device)


def _gather_state(state: TrainState, world: World) -> dict[str, Any]:
    """Returns the state as nested dictionaries of tensors, which are saved from and loaded into."""
    model, optimizer = get_state_dict(state.model, state.optimizer)
    generators = {"cpu": torch.get_rng_state()}
    if world.device.type != "cpu":
        module = torch.get_device_module(world.device)
        generators[world.device.type] = module.get_rng_state(world.device)
    return {
        "model": model,
        "optimizer": optimizer,
        "progress": {"step": state.step, "samples": state.samples},
        f"rng_{world.rank}": generators,  # one entry per rank: generators are not sharded
    }
