"""Every setting of a run: one frozen record that the command line, a file and the run folder all speak."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardgrad.training.failure import UsageError
from shardgrad.training.presets import PRESETS, Scalar, as_float, suggestion, transformer_config

# A resumed run must find the tensors it saved.
MODEL_FIELDS = ("preset", "hf", "override")
_LARGEST = 2**63 - 1  # of any integer, as torch counts
_FILE_NBYTES = 2**20  # of a file of settings
_MESH_DIGITS = 9


def _setting(
    default: Any,
    words: str,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """A dataclass field that carries its help and its limits; the command line is generated from them."""
    return field(default=default, metadata=_facts(words, choices, least, most))


def _facts(
    words: str, choices: tuple[str, ...] = (), least: float | None = None, most: float | None = None
) -> dict[str, Any]:
    return {"help": words, "choices": choices, "least": least, "most": most}


@dataclass(frozen=True)
class TrainConfig:
    """All that decides a run. Sizes are counts, times are seconds, `None` means "decide for me"."""

    preset: str = _setting("tiny", "Size of the built-in transformer.", choices=tuple(PRESETS))
    hf: str | None = _setting(
        None, "Train a Hugging Face causal LM instead: a config.json, or a model type such as gpt2."
    )
    override: dict[str, Scalar] = field(
        default_factory=dict, metadata=_facts("Replace one field of the model's shape; may be repeated.")
    )
    data: str | None = _setting(
        None, "Folder or file to train on, as bytes.  [default: Python's standard library]"
    )
    data_limit_mib: int = _setting(16, "Read at most this many MiB of it.", least=1)
    validation_fraction: float = _setting(
        0.05, "Part of the bytes, at the end, held out.", least=0.001, most=0.5
    )

    ranks: int | None = _setting(
        None,
        "Processes to start.  [default: one per accelerator, else 2; torchrun decides under torchrun]",
        least=1,
    )
    mesh: str | None = _setting(
        None, "4: shard over 4 ranks; 2x2: HSDP, 2 replicas of 2 shards.  [default: shard over all]"
    )
    device: str = _setting("auto", "Where to compute.", choices=("auto", "cpu", "accelerator"))
    engine: str = _setting(
        "shardgrad", "Who shards; none: one plain process.", choices=("shardgrad", "fsdp2", "none")
    )
    precision: str = _setting(
        "fp32", "bf16-mixed computes in bf16, reduces and updates in fp32.", choices=("fp32", "bf16-mixed")
    )
    activation_checkpointing: bool = _setting(
        False, "Recompute each block's activations in backward instead of keeping them."
    )
    graph: str = _setting(
        "auto",
        "Capture a step as one graph, with the same numbers; auto: with --engine shardgrad, where a device "
        "has graphs.",
        choices=("auto", "on", "off"),
    )
    timeout: float = _setting(120.0, "Seconds after which a collective gives up.", least=1, most=1e8)

    steps: int = _setting(400, "Optimizer steps.", least=1)
    batch_size: int = _setting(8, "Sequences per rank and micro-batch.", least=1, most=2**20)
    accumulate: int = _setting(1, "Micro-batches per step.", least=1)
    sync_every_microbatch: bool = _setting(
        False, "Reduce gradients after every micro-batch, not only the last: less memory, more traffic."
    )
    seq_len: int = _setting(128, "Bytes per sequence.", least=2)
    seed: int = _setting(0, "Seed of the initial weights and of the order of the data.", least=0)

    optimizer: str = _setting("adamw", "Who updates.", choices=("adamw", "sgd"))
    lr: float = _setting(3e-3, "Peak learning rate.", least=0)
    warmup_steps: int = _setting(40, "Steps over which the rate rises to its peak.", least=0)
    final_lr_ratio: float = _setting(0.1, "Rate at the last step, as a part of the peak.", least=0, most=1)
    weight_decay: float = _setting(0.1, "Decoupled decay of matrices (not of norms).", least=0)
    clip: float = _setting(1.0, "Largest gradient norm; 0 does not clip.", least=0)

    log_every: int = _setting(10, "Steps between metrics.", least=1)
    eval_every: int = _setting(100, "Steps between validations; the last step always has one.", least=1)
    eval_samples: int = _setting(64, "Held-out sequences in a validation.", least=1)
    check_every: int = _setting(
        100,
        "Steps between checks for faults that make no noise: ranks that left the common order of "
        "collectives, replicas that differ, parameters that do not move; 0: only before checkpoints.",
        least=0,
    )
    on_nonfinite: str = _setting(
        "stop",
        "After a step whose loss or gradients are not finite, and which updates nothing: stop; skip goes on "
        "with the next; dump stops and leaves its numbers in the run folder.",
        choices=("stop", "skip", "dump"),
    )
    checkpoint_every: int = _setting(100, "Steps between checkpoints; the last step always has one.", least=1)
    checkpoint_async: bool = _setting(
        False, "Write checkpoints while training goes on, from a copy in host memory."
    )
    keep: int = _setting(2, "Checkpoints kept.", least=1)
    run_dir: str | None = _setting(None, "Folder of the run.  [default: runs/<time>-<preset>]")
    plot: bool = _setting(True, "Do not draw the loss curve.")

    def __post_init__(self) -> None:
        kinds = typing.get_type_hints(TrainConfig)
        for one in dataclasses.fields(self):
            value = _checked_kind(one.name, getattr(self, one.name), kinds[one.name])
            _check_limits(one, value)
            object.__setattr__(self, one.name, value)
        if self.hf is None:
            transformer_config(self.preset, self.override)
        mesh = mesh_shape(self.mesh)
        if self.ranks is not None and mesh and self.ranks != math.prod(mesh):
            raise UsageError(
                f"--mesh {self.mesh} has room for {math.prod(mesh)} ranks, not {self.ranks}: correct one."
            )
        if self.engine == "none" and (self.ranks or math.prod(mesh)) > 1:
            raise UsageError("--engine none trains in one process: use --ranks 1, or an engine that shards.")
        if self.on_nonfinite == "skip" and self.engine == "fsdp2":
            raise UsageError(
                "--on-nonfinite skip is for --engine shardgrad or none, whose optimizers leave out such "
                "steps: choose one of them, or stop."
            )
        if self.graph == "on" and self.engine == "fsdp2":
            raise UsageError(
                "--graph on is for --engine shardgrad or none, whose steps can be one graph as a whole: "
                "choose one of them, or leave --graph out."
            )

    def global_batch(self, world_size: int) -> int:
        """Sequences that one step consumes on all ranks together."""
        return self.batch_size * self.accumulate * world_size

    def to_json(self) -> str:
        """The text of `config.json`."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def mesh_shape(text: str | None) -> tuple[int, ...]:
    """`2x2` to (2, 2), `4` to (4,), nothing to (); anything else is a :class:`UsageError`."""
    if text is None:
        return ()
    parts = text.lower().split("x")
    # The length first: Python refuses to convert thousands of digits.
    if len(parts) > 2 or not all(
        len(part) <= _MESH_DIGITS and part.isascii() and part.isdigit() and int(part) > 0 for part in parts
    ):
        raise UsageError(
            f"--mesh {text[:50]} is not a mesh: write 4 for four shards or 2x2 for two replicas of two."
        )
    return tuple(int(part) for part in parts)


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a TOML or JSON file, by field name; names may be written with dashes."""
    try:
        with path.open("rb") as stream:
            content = stream.read(_FILE_NBYTES + 1)
        if len(content) > _FILE_NBYTES:
            raise UsageError(
                f"{path} has more than {_FILE_NBYTES} bytes, as no settings have: correct the path."
            )
        text = content.decode("utf-8")
        raw = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): correct the path.") from error
    except (ValueError, RecursionError) as error:  # both decoders' errors are ValueErrors
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise UsageError(f"{path} is not valid {kind} ({error}): correct it there.") from error
    if not isinstance(raw, dict):
        raise UsageError(f"{path} holds no table of settings: write one `name = value` for each.")
    settings = {name.replace("-", "_"): value for name, value in raw.items()}
    known = [one.name for one in dataclasses.fields(TrainConfig)]
    for name in settings:
        if name not in known:
            raise UsageError(f"{path} sets {name!r}, which does not exist: {suggestion(name, known)}")
    return settings


def resumed(saved: TrainConfig, changes: Mapping[str, Any], *, world_size: int | None) -> TrainConfig:
    """The configuration of a resumed run: what was saved, with `changes`, fitted to the ranks there are now.

    On another number of ranks the global batch, and with it the loss curve, stays: the sequences per rank are
    divided anew into micro-batches no larger than before.

    Args:
        saved: what `config.json` holds; its `ranks` is the number that wrote it.
        changes: settings given this time.
        world_size: ranks a launcher has already started, or None where `ranks` (or `mesh`) decides.
    """
    for name in MODEL_FIELDS:
        if name in changes and changes[name] != getattr(saved, name):
            raise UsageError(
                f"--{name} would change the model that was saved: leave it out to resume, or start a new run."
            )
    before = saved.ranks or 1
    mesh = mesh_shape(changes.get("mesh"))
    ranks = world_size or changes.get("ranks") or (math.prod(mesh) if mesh else before)
    settings = {**dataclasses.asdict(saved), "ranks": ranks}
    if ranks != before:
        settings["mesh"] = None
        if not {"batch_size", "accumulate"} & set(changes):
            settings |= _same_global_batch(saved, ranks)
    return TrainConfig(**{**settings, **changes})


def _same_global_batch(saved: TrainConfig, ranks: int) -> dict[str, int]:
    total = saved.global_batch(saved.ranks or 1)
    per_rank, rest = divmod(total, ranks)
    if rest or not per_rank:
        raise UsageError(
            f"The run's {total} sequences per step cannot be shared by {ranks} ranks: use a number of ranks "
            "that divides it, or give --batch-size and accept another loss curve."
        )
    batch_size = max(size for size in range(1, saved.batch_size + 1) if per_rank % size == 0)
    return {"batch_size": batch_size, "accumulate": per_rank // batch_size}


def _checked_kind(name: str, value: Any, kind: Any) -> Any:
    allowed = typing.get_args(kind) if type(None) in typing.get_args(kind) else (kind,)
    if value is None and type(None) in allowed:
        return None
    expected = next(one for one in allowed if one is not type(None))
    expected = typing.get_origin(expected) or expected
    if expected is float and type(value) is int:
        value = as_float(value, _flag(name))
    if type(value) is not expected:
        raise UsageError(f"{_flag(name)} needs a value of type {expected.__name__}, not {value!r:.100}.")
    if expected is float and not math.isfinite(value):
        raise UsageError(f"{_flag(name)} is {value}: give a finite number.")
    if expected is int and abs(value) > _LARGEST:
        raise UsageError(f"{_flag(name)} is a number of {value.bit_length()} bits: give one of at most 63.")
    return value


def _check_limits(one: dataclasses.Field[Any], value: Any) -> None:
    facts = one.metadata
    if value is None:
        return
    if facts["choices"] and value not in facts["choices"]:
        hint = ""
        if one.name == "precision" and value.startswith("fp16"):
            hint = " (fp16 would need loss scaling, which this program does not have)"
        raise UsageError(f"{_flag(one.name)} can be {', '.join(facts['choices'])}, not {value!r}{hint}.")
    if facts["least"] is not None and not value >= facts["least"]:
        raise UsageError(f"{_flag(one.name)} is {value}: give at least {facts['least']}.")
    if facts["most"] is not None and not value <= facts["most"]:
        raise UsageError(f"{_flag(one.name)} is {value}: give at most {facts['most']}.")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
