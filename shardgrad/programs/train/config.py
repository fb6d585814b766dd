"""The settings of a run: one dataclass, from which options, file format and checks follow."""

from __future__ import annotations

import dataclasses
import json
import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from shardgrad.programs.train.failure import UsageError, reason_of
from shardgrad.programs.train.presets import PRESETS
from shardgrad.programs.train.settings import Number, converted, setting, whole

_MOST_NBYTES = 2**20  # of a file of settings


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a training run. Times are in seconds; `None` selects a default at start."""

    preset: str = setting(
        "tiny",
        "Size of the built-in transformer.",
        click.Choice(tuple(PRESETS)),
    )
    data: str | None = setting(
        None, "File to train on, read as bytes.  [default: Python's standard library]"
    )
    seed: int = setting(0, "Seed of the initial weights and of the order of the data.", whole(0))

    ranks: int | None = setting(
        None,
        "Number of ranks to start.  [default: one per accelerator, else 2]",
        whole(1, 256),
    )
    device: str = setting(
        "auto",
        "Device type to train on; auto uses the accelerator if there is one.",
        click.Choice(("auto", "cpu")),
    )
    stage: str = setting(
        "3",
        "ZeRO stage, as `zero_stage` of fully_shard.",
        click.Choice(("1", "2", "3", "auto")),
    )
    precision: str = setting(
        "fp32",
        "Precision; bf16-mixed computes in bf16, and reduces gradients and updates weights in "
        "fp32.",
        click.Choice(("fp32", "bf16-mixed")),
    )
    activation_checkpointing: bool = setting(
        False, "Recompute the activations of each block in backward instead of keeping them."
    )
    graph: bool = setting(
        True, "Do not capture each step as one CUDA graph, where the device has graphs."
    )
    timeout: float = setting(120.0, "Timeout of collectives, in seconds.", Number(1, 1e8))

    steps: int = setting(400, "Number of optimizer steps.", whole(1))
    batch_size: int = setting(8, "Sequences per rank in each micro-batch.", whole(1, 2**20))
    accumulate: int = setting(
        1, "Micro-batches per step, whose gradients are accumulated.", whole(1)
    )
    seq_len: int = setting(128, "Length of a sequence in bytes.", whole(2))

    lr: float = setting(3e-3, "Peak learning rate.", Number(0))

    log_every: int = setting(10, "Steps between two lines of metrics.", whole(1))
    tensorboard: bool = setting(
        False, "Write the metrics for TensorBoard too, into the run folder."
    )
    sample_bytes: int = setting(
        60,
        "Length of the text that the trained model writes at the end; 0 for none.",
        whole(0, 2**20),
    )

    run_dir: str | None = setting(
        None,
        "Folder of the run.  [default: runs/<time>-<preset>]",
    )
    checkpoint_every: int = setting(
        100, "Steps between two checkpoints; the last step is always saved.", whole(1)
    )
    keep: int = setting(2, "Number of checkpoints to keep.", whole(1))

    @property
    def folder(self) -> Path:
        """Folder of the run, once it is chosen."""
        return Path(self.run_dir or "")

    def global_batch(self, world_size: int) -> int:
        """Returns the number of sequences that one step consumes on all ranks together."""
        return self.batch_size * self.accumulate * world_size


def read_settings(path: Path) -> dict[str, Any]:
    """Reads the settings in a `config.json`.

    Returns:
        The values by field name, without those that are null.

    Raises:
        UsageError: the file cannot be read or parsed, has an unknown name, or a value that makes no
            sense.
    """
    known = {one.name: one for one in dataclasses.fields(TrainConfig)}
    try:
        found = path.stat()  # before it is opened: a pipe would be waited for
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_NBYTES:
            raise ValueError("not a file of at most 1 MiB")
        settings = json.loads(path.read_text(encoding="utf-8"))
        for name in settings.keys() - known.keys():
            raise ValueError(f"there is no setting {name!r}")
        given = {name: value for name, value in settings.items() if value is not None}
        return {name: converted(known[name], value) for name, value in given.items()}
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise UsageError(
            f"{path} cannot be read ({reason_of(error)}): correct it, or the folder given to "
            "--resume."
        ) from error


def resumed(saved: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    """Returns the settings of a resumed run: the saved ones with `changes`, for the present number
    of ranks.

    On another number of ranks the global batch size, and with it the loss curve, is kept: the
    sequences of a rank are divided into micro-batches that are no larger than before.

    Args:
        saved: the settings in `config.json`; `ranks` is the number of ranks of the saved run.
        changes: settings given for the resumed run.

    Raises:
        UsageError: `changes` changes the model, or the ranks cannot share the global batch.
    """
    if changes.get("preset", saved.preset) != saved.preset:
        raise UsageError(
            "--preset would change the model that was saved: leave it out to resume, or start a "
            "new run."
        )
    before = saved.ranks or 1
    settings = {**dataclasses.asdict(saved), "ranks": before, **changes}
    if not {"batch_size", "accumulate"} & set(changes):
        total, ranks = saved.global_batch(before), settings["ranks"]
        if total % ranks:
            raise UsageError(
                f"The run's steps of {total} sequences cannot be divided among {ranks} ranks: use "
                "a number of ranks that divides it, or give --batch-size and accept another loss "
                "curve."
            )
        batch_size = math.gcd(total // ranks, saved.batch_size)
        settings |= {"batch_size": batch_size, "accumulate": total // ranks // batch_size}
    return TrainConfig(**settings)
