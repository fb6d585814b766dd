"""The training program's checkpoints: what a run consists of, and how its parts go in and out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR

from shardgrad.checkpoint import Saving, Series, load, open_checkpoint, save, save_async
from shardgrad.checkpoint.boxes import Box
from shardgrad.checkpoint.peers import Peers
from shardgrad.errors import CheckpointError, CheckpointSaveError
from shardgrad.training.failure import CheckpointUnusable, TrainingError, UsageError
from shardgrad.training.parallel import Place
from shardgrad.training.sharding import LanguageModel

# Each rank has its own generator; on another number of ranks, some are missing or left over.
_OPTIONAL = ("rng_*",)
_QUICKLY_READ_NBYTES = 2 * 2**30  # a checkpoint that is read to give advice


@dataclass
class TrainState:
    """All that a step changes.

    Args:
        model: the (sharded) model.
        optimizer: over its parameters.
        schedule: of the optimizer's learning rate.
        step: optimizer steps done.
        samples: sequences consumed by all ranks together; the position in the data.
    """

    model: LanguageModel
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    step: int = 0
    samples: int = 0


class Checkpoints:
    """The checkpoints of a run folder: a `Series`, with the program's state and the program's words.

    At every instant, whatever is interrupted or killed, `latest` names a whole checkpoint or there is none.

    Args:
        folder: `checkpoints` in the run folder; all ranks must see it.
        keep: how many to keep.
        is_async: write while training goes on, from a copy; a checkpoint is there when the next one begins,
            or after :meth:`finish`.
        timeout_s: after which ranks that write meanwhile give each other up.
    """

    def __init__(self, folder: Path, *, keep: int, is_async: bool = False, timeout_s: float = 120.0) -> None:
        self._folder = folder
        self._series = Series(folder, keep=keep)
        self._is_async = is_async
        self._timeout = timedelta(seconds=timeout_s)
        self._group: dist.ProcessGroup | None = None
        self._saving: Saving | None = None

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or the one that somebody has named."""
        return self._series.latest()

    def acquire(self, place: Place) -> None:
        """Make this run the only one that writes into the folder; all ranks call it together.

        Raises:
            UsageError: another process writes there; on every rank.
        """
        try:
            Peers(place.control).together("lock", self._series.acquire if place.leads else _nothing)
        except CheckpointSaveError as error:
            if error.__cause__ is not None and not isinstance(error.__cause__, CheckpointSaveError):
                raise error.__cause__ from None
            raise UsageError(f"{error.what} ({error.got}): {error.fix}.") from error

    def release(self) -> None:
        """Let another run write into the folder, unless a save goes on until this process ends."""
        if self._saving is None or self._saving.done():
            self._series.release()

    def save(self, state: TrainState, place: Place) -> Path:
        """Write and publish the state, or begin to; all ranks call it together.

        Raises:
            TrainingError: on every rank if any could not write, now or in the save before; what was
                published before is untouched.
        """
        self.finish()
        final = self._series.path_of(state.step)
        with _told():
            what = _gather_state(state, place)
            if self._is_async:
                group = self._own_group(place)
                self._saving = save_async(what, final, group=group, then=lambda: self._series.publish(final))
            else:
                save(what, final, group=place.control, then=lambda: self._series.publish(final))
        return final

    def finish(self) -> None:
        """Wait for a save that is under way; all ranks call it.

        Raises:
            TrainingError: it failed.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            with _told():
                saving.wait()

    def load(self, state: TrainState, place: Place) -> None:
        """Fill `state` from the newest checkpoint, whatever ranks wrote it; all ranks call it together.

        Raises:
            TrainingError: it is damaged or does not fit; `state` is what it was.
        """
        path = self.latest()
        if path is None:
            raise UsageError(
                f"There is no checkpoint in {self._folder}: start the run again without --resume."
            )
        try:
            loaded = load(_gather_state(state, place), path, optional=_OPTIONAL, group=place.control)
        except CheckpointError as error:
            # Other ranks do not wait for the first one to read; it is the one that is told to the user.
            advice = self._advice(path, error) if place.leads else self._any_older
            raise CheckpointUnusable(
                f"{path} cannot be used ({error.what}; {error.got}, at {error.where}): {advice}."
            ) from error
        _scatter_state(loaded, state, place)

    def _advice(self, path: Path, error: CheckpointError) -> str:
        """What to do instead of loading a checkpoint: nothing that would load a damaged one."""
        older = [other for other in self._series.complete() if other.name < path.name]
        if any(_nbytes(one) > _QUICKLY_READ_NBYTES for one in (path, *older)):
            return self._any_older
        if is_whole(path):
            return error.fix or "correct the settings"
        whole = next((other for other in reversed(older) if is_whole(other)), None)
        if whole is None:
            return "no older checkpoint is whole, so start the run again, with another --run-dir"
        return f"write {whole.name}, which is whole, into {self._folder / 'latest'}, and resume again"

    @property
    def _any_older(self) -> str:
        return (
            f"write the name of an older checkpoint, which `shardgrad checkpoint verify` finds whole, into "
            f"{self._folder / 'latest'}, and resume again"
        )

    def discard_unfinished(self) -> None:
        """Put right what an interrupted save left behind; rank 0 calls it before training."""
        self._series.recover()

    def _own_group(self, place: Place) -> dist.ProcessGroup | None:
        # Made once, by all ranks together: saves go on while `place.control` is used by the steps.
        if self._group is None and place.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        return self._group


def _nbytes(path: Path) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(path))


def is_whole(path: Path) -> bool:
    """Whether every byte of a checkpoint is what was written. Reads all of it."""
    try:
        with open_checkpoint(path) as source:
            for name, entry in source.tensors.items():
                source.check(name, Box.whole(entry.shape))
    except (CheckpointError, OSError):
        return False
    return True


def _nothing() -> None:
    """What the other ranks do while the first one works."""


@contextmanager
def _told() -> Iterator[None]:
    """Turns the errors of a save into the program's."""
    try:
        with warnings.catch_warnings():
            # torch's remarks about its own internals would tear the progress display.
            warnings.filterwarnings("ignore", module=r"torch\.distributed.*")
            yield
    except (CheckpointSaveError, CheckpointError) as error:
        if error.__cause__ is not None:  # this rank's own: told as what it is, with the rank and the place
            raise error.__cause__ from None
        raise TrainingError(
            f"The checkpoint was not written ({error.what}; {error.got}, at {error.where})."
        ) from error


def _gather_state(state: TrainState, place: Place) -> dict[str, Any]:
    """The state as nested dictionaries of tensors, which are saved from, and loaded into, in place."""
    return {
        "model": get_model_state_dict(state.model),
        "optimizer": get_optimizer_state_dict(state.model, state.optimizer),
        "schedule": state.schedule.state_dict(),
        "progress": {"step": state.step, "samples": state.samples},
        _rng_key(place): _rng_state(place.device),
    }


def _scatter_state(loaded: dict[str, Any], state: TrainState, place: Place) -> None:
    set_model_state_dict(state.model, loaded["model"])
    set_optimizer_state_dict(state.model, state.optimizer, loaded["optimizer"])
    state.schedule.load_state_dict(loaded["schedule"])
    state.step, state.samples = loaded["progress"]["step"], loaded["progress"]["samples"]
    _set_rng_state(loaded[_rng_key(place)], place.device)


def _rng_key(place: Place) -> str:
    # One entry per rank: generators are not sharded state, each rank has its own.
    return f"rng_{place.rank}"


def _rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def _set_rng_state(states: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type], device)
