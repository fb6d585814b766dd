"""The files of a run folder: settings, environment, metrics, and the picture of the loss curve."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardgrad.train.config import TrainConfig
from shardgrad.train.parallel import World, available_cores


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of a step.

    Args:
        step: number of optimizer steps done.
        loss: mean loss of the step over its global batch, in nats per byte.
        lr: learning rate of the step.
        grad_norm: gradient norm before clipping.
        tokens_per_s: tokens per second of all ranks together, since the last metrics.
        memory_nbytes: memory of each rank.
        elapsed_s: seconds since this process started to train.
        remaining_s: estimate of the remaining seconds, from the mean speed so far.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    memory_nbytes: tuple[int, ...]
    elapsed_s: float
    remaining_s: float


class RunRecord:
    """Writes the run folder; exists on rank 0 only.

    - `config.json`: every setting, resolved; `--resume` reads it.
    - `environment.json`: versions and hardware.
    - `metrics.jsonl`: one JSON object per line; its `event` is start, step, validation or checkpoint.
    - `loss.png`: the loss curve.

    Args:
        folder: the run folder, created if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metrics = folder / "metrics.jsonl"

    def begin(self, config: TrainConfig, world: World, *, step: int, facts: dict[str, Any]) -> None:
        """Writes settings and environment, and removes the metrics of steps that will be repeated.

        Args:
            config: resolved settings.
            world: this rank.
            step: number of steps already done; 0 for a new run.
            facts: values about the corpus and the model, for the `start` event.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        _replace(self._folder / "config.json", config.to_json())
        _replace(self._folder / "environment.json", json.dumps(_environment(world), indent=2) + "\n")
        kept = [event for event in self.events() if event.get("step", 0) <= step]
        _replace(self._metrics, "".join(json.dumps(event) + "\n" for event in kept))
        self.write("start", step=step, time=time.strftime("%Y-%m-%dT%H:%M:%S%z"), **facts)

    def write(self, event: str, **values: Any) -> None:
        """Appends an event to `metrics.jsonl`."""
        with self._metrics.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"event": event, **values}) + "\n")

    def step(self, metrics: StepMetrics) -> None:
        """Appends a `step` event."""
        self.write("step", **dataclasses.asdict(metrics))

    def events(self) -> list[dict[str, Any]]:
        """Returns all events; a line truncated by a crash or a full disk is left out."""
        if not self._metrics.exists():
            return []
        events = []
        for line in self._metrics.read_text(encoding="utf-8").splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                continue
        return events

    def draw(self, *, unigram_entropy: float) -> Path | None:
        """Draws the loss curve and returns its file; None if matplotlib is not installed."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return None
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per byte)")
        events = self.events()
        for name, style in (("step", "-"), ("validation", "o")):
            points = [(event["step"], event["loss"]) for event in events if event["event"] == name]
            label = "training" if name == "step" else "validation"
            axes.plot([step for step, _ in points], [loss for _, loss in points], style, label=label)
        axes.axhline(unigram_entropy, linestyle="--", color="grey", label="byte-unigram entropy")
        axes.legend()
        path = self._folder / "loss.png"
        figure.savefig(path, dpi=120)
        return path


def _replace(path: Path, text: str) -> None:
    """Replaces a file atomically: after an interruption it has the old text or the new text."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def _environment(world: World) -> dict[str, Any]:
    device = world.device
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "host": platform.node(),
        "cores": available_cores(),
        "threads_per_rank": torch.get_num_threads(),
        "world_size": world.world_size,
        "device": device.type,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }
    if device.type != "cpu":
        facts["accelerator"] = torch.get_device_module(device).get_device_name(device)
    return facts
