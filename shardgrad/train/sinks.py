"""Other places for a run's metrics: TensorBoard, and Weights & Biases without a network."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from shardgrad.train.config import TrainConfig
from shardgrad.train.failure import UsageError

__all__ = ["Sink", "open_sinks", "wandb_mode"]

_WANDB_MODES = ("online", "offline", "disabled", "shared")


class Sink(Protocol):
    """Takes the numbers of each event that goes into `metrics.jsonl`."""

    def write(self, event: str, numbers: Mapping[str, float]) -> None:
        """Writes the numbers of an event; one of them is `step`."""

    def close(self) -> None:
        """Writes what is left."""


def open_sinks(config: TrainConfig, folder: Path) -> list[Sink]:
    """Returns the sinks that a run's settings ask for. Their packages are installed, which was
    checked.
    """
    sinks: list[Sink] = []
    if config.tensorboard:
        sinks.append(_TensorBoard(folder))
    if config.wandb:
        sinks.append(_WeightsAndBiases(config, folder))
    return sinks


def wandb_mode() -> str:
    """Returns WANDB_MODE, or "offline".

    Raises:
        UsageError: Weights & Biases has no such mode.
    """
    mode = os.environ.get("WANDB_MODE", "offline")
    if mode not in _WANDB_MODES:
        raise UsageError(
            f"WANDB_MODE can be {', '.join(_WANDB_MODES)}, not {mode!r:.50}: set it to one."
        )
    return mode


class _TensorBoard:
    """Writes event files into `tensorboard/` of the run folder."""

    def __init__(self, folder: Path) -> None:
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = writer(str(folder / "tensorboard"))

    def write(self, event: str, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            if name != "step":
                self._writer.add_scalar(f"{event}/{name}", value, int(numbers["step"]))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """Logs a run below the run folder; offline, unless WANDB_MODE says otherwise."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self._run: Any = import_module("wandb").init(
            project="shardgrad",
            name=folder.name,
            dir=str(folder),
            config=dataclasses.asdict(config),
            mode=wandb_mode(),
            settings={"console": "off", "quiet": True},  # the panel and the last lines are ours
        )

    def write(self, event: str, numbers: Mapping[str, float]) -> None:
        named = {f"{event}/{name}": value for name, value in numbers.items() if name != "step"}
        self._run.log(named, step=int(numbers["step"]))

    def close(self) -> None:
        self._run.finish()
