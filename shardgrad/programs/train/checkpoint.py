"""The training program's checkpoints: the state of a run, and how it is saved and loaded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from shardgrad.errors import CheckpointError
from shardgrad.programs.checkpoint import Series, load, save
from shardgrad.programs.checkpoint.peers import Peers
from shardgrad.programs.train.failure import CheckpointUnusable, UsageError
from shardgrad.programs.train.model import Transformer


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


def lock(series: Series) -> None:
    """Locks the folder of a run's checkpoints until this process ends, so that only this run writes
    there. A collective.

    Raises:
        UsageError: another process writes there; on every rank.
    """
    try:
        Peers().broadcast("lock", series.acquire)
    except CheckpointError as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, CheckpointError):
            raise
        raise UsageError(f"{error.what} ({error.got}): {error.fix}.") from error


def save_state(series: Series, state: TrainState) -> Path:
    """Saves the state as the checkpoint of its step, which `latest` names from then on. A
    collective.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: on every rank if any rank could not write. Existing checkpoints are
            unchanged.
    """
    final = series.path_of(state.step)
    save(_gather_state(state), final, then=partial(series.publish, final))
    return final


def load_state(series: Series, state: TrainState) -> None:
    """Loads the newest checkpoint into `state`; the number of ranks may differ. A collective.

    Raises:
        TrainingError: the checkpoint is missing, is damaged or does not fit; `state` is unchanged.
    """
    path = series.latest()
    if path is None:
        raise UsageError(
            f"{series.folder} has no complete checkpoint: start the run again, with another "
            "--run-dir."
        )
    try:
        loaded = load(_gather_state(state), path)
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
    state.step, state.samples = loaded["step"], loaded["samples"]


def _gather_state(state: TrainState) -> dict[str, Any]:
    """Returns the state as nested dictionaries of tensors, which are saved from and loaded into.

    Random state is no part of it: a step draws no numbers.
    """
    model, optimizer = get_state_dict(state.model, state.optimizer)
    return {
        "model": model,
        "optimizer": optimizer,
        "step": state.step,
        "samples": state.samples,
    }
