"""The files of a run folder: settings, metrics, and the picture of the loss curve."""

from __future__ import annotations

import dataclasses
import json
import platform
import time
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from shardgrad.programs.checkpoint.files import make_folder, named_in_errors, replace_synced
from shardgrad.programs.train.config import TrainConfig
from shardgrad.version import described


class RunRecord:
    """Writes the run folder.

    - `config.json`: every setting, resolved; `--resume` reads it.
    - `metrics.jsonl`: one JSON object per line; its `event` is start, step or checkpoint. A start
      has versions, the commit of shardgrad, and the device.
    - `loss.png`: the loss curve.

    Args:
        folder: the run folder, created if it is missing.
        leads: whether this rank writes.
        tensorboard: write the numbers of the events into `tensorboard/` too.
    """

    def __init__(self, folder: Path, *, leads: bool = True, tensorboard: bool = False) -> None:
        self._folder, self._leads = folder, leads
        self._metrics = folder / "metrics.jsonl"
        self._board: Any = None
        if leads and tensorboard:
            board = import_module("torch.utils.tensorboard")  # needs an optional package
            self._board = board.SummaryWriter(str(folder / "tensorboard"))

    def begin(self, config: TrainConfig, *, step: int, **facts: Any) -> None:
        """Writes the settings, and removes the metrics of steps that will be repeated.

        Args:
            config: resolved settings.
            step: number of steps already done; 0 for a new run.
            **facts: values about the ranks, for the `start` event.
        """
        if not self._leads:
            return
        make_folder(self._folder)
        settings = json.dumps(dataclasses.asdict(config), indent=2)
        replace_synced(self._folder / "config.json", settings + "\n")
        kept = (json.dumps(event) for event in self.events() if event["step"] <= step)
        replace_synced(self._metrics, "".join(line + "\n" for line in kept))
        facts |= {"shardgrad": described(), "torch": torch.__version__, "host": platform.node()}
        self.write("start", step=step, time=time.strftime("%Y-%m-%dT%H:%M:%S%z"), **facts)

    def write(self, event: str, **values: Any) -> None:
        """Appends an event to `metrics.jsonl`."""
        if not self._leads:
            return
        with named_in_errors(self._metrics), self._metrics.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"event": event, **values}) + "\n")
        if self._board is not None:
            for name, value in values.items():
                if name != "step" and type(value) in (int, float):
                    self._board.add_scalar(f"{event}/{name}", value, values["step"])
            self._board.flush()

    def events(self) -> list[dict[str, Any]]:
        """Returns the events; a line that a crash cut short is none."""
        events = []
        if self._metrics.is_file():
            text = self._metrics.read_text(encoding="utf-8", errors="backslashreplace")
            for line in text.splitlines():
                with suppress(ValueError):
                    events.append(json.loads(line))
        return events

    def draw(self) -> None:
        """Draws the loss curve, if matplotlib is installed."""
        if not self._leads or find_spec("matplotlib") is None:
            return
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per byte)")
        steps = [event for event in self.events() if event["event"] == "step"]
        axes.plot([event["step"] for event in steps], [event["loss"] for event in steps])
        figure.savefig(self._folder / "loss.png", dpi=120)
