"""Checkpoints that are whole or absent: written aside, published by a rename, loadable on any ranks."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.optim.lr_scheduler import LambdaLR

from shardgrad.training.failure import PeerLost, TrainingError, UsageError, explain, operating_system_reason
from shardgrad.training.parallel import Place
from shardgrad.training.sharding import LanguageModel

_POINTER = "latest"


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
    """The checkpoints of a run folder: `step_000200/` for each, and `latest`, which names the one to resume.

    A checkpoint is written under a name that ends in `.tmp`. Only when every rank has written its part does
    rank 0 rename it, and only after that does `latest` change, so that at every instant, whatever is
    interrupted or killed, `latest` names a whole checkpoint or there is none.

    Args:
        folder: `checkpoints` in the run folder; all ranks must see it.
        keep: how many to keep.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def latest(self) -> Path | None:
        """The newest published checkpoint."""
        try:
            name = (self._folder / _POINTER).read_text(encoding="ascii").strip()
        except OSError:
            return None
        path = self._folder / name
        return path if name and path.is_dir() else None

    def save(self, state: TrainState, place: Place) -> Path:
        """Write and publish the state; all ranks call it together.

        Raises:
            TrainingError: on every rank if any could not write; what was published before is untouched.
        """
        final = self._folder / f"step_{state.step:06d}"
        aside = final.with_name(final.name + ".tmp")
        try:
            with _quiet_checkpointing():
                save_state_dict(_gather_state(state, place), storage_writer=_CandidWriter(aside))
            problem = None
        except CheckpointException as error:  # a BaseException; the same on all ranks
            problem = str(explain(_cause(error)))
        except Exception as error:  # whatever went wrong, the ranks must agree that it did
            problem = str(explain(error))
        self._agree(problem, place, aside)
        if place.leads:
            try:
                self._publish(aside, final)
            except OSError as error:
                problem = str(explain(error))
        self._agree(problem, place, aside)
        return final

    def load(self, state: TrainState, place: Place) -> None:
        """Fill `state` from the newest checkpoint, whatever ranks wrote it; all ranks call it together."""
        path = self.latest()
        if path is None:
            raise UsageError(
                f"There is no checkpoint in {self._folder}: start the run again without --resume."
            )
        try:
            known = set(FileSystemReader(path).read_metadata().state_dict_metadata)
        except (OSError, EOFError, ValueError) as error:
            raise TrainingError(
                f"{path} is damaged ({error}): write the name of an older checkpoint into "
                f"{self._folder / _POINTER}."
            ) from error
        wanted = _gather_state(state, place)
        if _rng_key(place) not in known:  # more ranks than when it was saved
            del wanted[_rng_key(place)]
        with _quiet_checkpointing():
            load_state_dict(wanted, checkpoint_id=path)
        _scatter_state(wanted, state, place)

    def discard_unfinished(self) -> None:
        """Remove what an interrupted save left behind; rank 0 calls it before training."""
        for leftover in self._folder.glob("*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _publish(self, aside: Path, final: Path) -> None:
        # The parts are already on the disk: the writer syncs each file. What remains are the names.
        _sync_folder(aside)
        if final.exists():  # an older attempt at the same step, after a resume from before it
            shutil.rmtree(final)
        aside.rename(final)
        _sync_folder(self._folder)
        pointer = self._folder / (_POINTER + ".new")
        with pointer.open("w", encoding="ascii") as stream:
            stream.write(final.name + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        pointer.replace(self._folder / _POINTER)
        _sync_folder(self._folder)
        others = sorted(path for path in self._folder.glob("step_*") if path not in (final, aside))
        for old in others[: max(0, len(others) - (self._keep - 1))]:
            shutil.rmtree(old, ignore_errors=True)

    def _agree(self, problem: str | None, place: Place, aside: Path) -> None:
        """Raise on all ranks if one has a problem, having removed the half-written files."""
        if not place.any(problem is not None):
            return
        if place.leads:
            shutil.rmtree(aside, ignore_errors=True)
        if problem is None:
            raise PeerLost("Another rank could not write its part of the checkpoint: see its message.")
        raise TrainingError(problem)


class _CandidWriter(FileSystemWriter):
    """Tells the system's reason for a failed write.

    PyTorch's archive writer, interrupted by a full disk, complains about its own position instead, and only
    the outermost exception reaches the other ranks.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            reason = operating_system_reason(error)
            if reason is not None:
                raise reason from None
            raise


def _cause(error: CheckpointException) -> BaseException:
    """What went wrong on the lowest rank that had a problem."""
    failures = error.failures
    return failures[min(failures)][0] if failures else error


def _gather_state(state: TrainState, place: Place) -> dict[str, Any]:
    """The state as nested dictionaries of tensors, which DCP saves from, and loads into, in place."""
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
    if _rng_key(place) in loaded:
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


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _quiet_checkpointing() -> Iterator[None]:
    """Without DCP's remarks about its own internals, which would tear the progress display."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.distributed.*")
        yield
