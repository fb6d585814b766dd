"""The input of a plan: the model, and how it is sharded and trained."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardgrad.programs.train.config import mesh_shape
from shardgrad.programs.train.failure import UsageError
from shardgrad.programs.train.presets import PRESETS, Scalar, TransformerConfig

__all__ = [
    "MOST_RANKS",
    "PLAN_PRESETS",
    "PRECISIONS",
    "Request",
    "require_range",
    "require_share",
    "require_units",
    "units_of_preset",
]

# With a preset for plans only.
PLAN_PRESETS: Mapping[str, TransformerConfig] = {
    **PRESETS,
    "70b": TransformerConfig(
        width=8192,
        layers=80,
        heads=64,
        kv_heads=8,
        hidden=28_672,
        vocab_size=128_256,
        tied=False,
        rope_theta=500_000.0,
    ),
}
MOST_RANKS = 2**24
# Beyond these, torch could not count the elements of an activation.
_MOST = {"ranks": MOST_RANKS, "batch_size": 2**16, "seq_len": 2**22, "accumulate": 2**20}
PRECISIONS = ("fp32", "bf16-mixed", "bf16")
_DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class Request:
    """The training step to plan.

    Args:
        preset: name of a built-in model; ignored if `hf` or `model` is given.
        hf: Hugging Face configuration, as for `shardgrad train`.
        model: `module:function`, a function that returns a model.
        override: fields of the model's configuration to replace.
        ranks: number of ranks.
        mesh: "16" to shard over 16 ranks, "4x16" for 4 replicas of 16 shards; None for `ranks`
            shards.
        stage: "1", "2", "3" or "hfsdp", as `zero_stage` of `fully_shard`.
        reshard_to: reshard parameters after forward to groups of this many neighbouring ranks.
        units: names of classes or modules that `fully_shard` is applied to, besides the blocks.
        precision: "bf16-mixed" computes in bf16 and keeps fp32 weights; "bf16" keeps bf16 weights
            too.
        reduce_dtype: dtype of gradient reductions; None for fp32.
        gradient_dtype: dtype of stored gradients; None for that of the weights.
        wire_dtype: dtype that gradients travel in, "bf16"; None for the reduce dtype.
        activation_checkpointing: "full" recomputes the activations of each block in backward,
            "selective" all but those that cost most (`train/recompute.py`), "none" none.
        batch_size: sequences per rank and micro-batch.
        seq_len: tokens per sequence.
        accumulate: micro-batches per step.
        no_sync: accumulate unsharded gradients, and reduce them after the last micro-batch.
        optimizer: "adamw" or "sgd".
        on_host: plan for CPU ranks with gloo.
        blocks: plan with only so many of the longest run of blocks that are alike; None for all.
    """

    preset: str = "8b"
    hf: str | None = None
    model: str | None = None
    override: Mapping[str, Scalar] = field(default_factory=dict)
    ranks: int = 8
    mesh: str | None = None
    stage: str = "3"
    reshard_to: int | None = None
    units: tuple[str, ...] = ()
    precision: str = "bf16-mixed"
    reduce_dtype: str | None = None
    gradient_dtype: str | None = None
    wire_dtype: str | None = None
    activation_checkpointing: str = "none"
    batch_size: int = 1
    seq_len: int = 8192
    accumulate: int = 1
    no_sync: bool = False
    optimizer: str = "adamw"
    on_host: bool = False
    blocks: int | None = None

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            require_range("--" + name.replace("_", "-"), getattr(self, name), most)
        if self.override and self.model is not None:
            raise UsageError(
                f"--override is for --preset and --hf: change the function {self.model}."
            )
        shape = mesh_shape(self.mesh)
        if shape and math.prod(shape) != self.ranks:
            raise UsageError(
                f"--mesh {self.mesh} has room for {math.prod(shape)} ranks, not {self.ranks}: "
                "correct one."
            )
        _check("--stage", self.stage, ("1", "2", "3", "hfsdp"))
        if self.stage == "hfsdp" and self.replicas == 1:
            raise UsageError(
                "--stage hfsdp shards over two axes: give a mesh with both, such as --mesh 4x16."
            )
        if self.reshard_to is not None and self.stage != "3":
            raise UsageError(
                f"--reshard-to goes with --stage 3 only, not {self.stage}: leave one out."
            )
        if self.reshard_to is not None and (self.reshard_to < 1 or self.shards % self.reshard_to):
            raise UsageError(
                f"--reshard-to {self.reshard_to} does not divide the {self.shards} shards: use a "
                "divisor."
            )
        _check("--precision", self.precision, PRECISIONS)
        _check("--reduce-dtype", self.reduce_dtype, (None, *_DTYPES))
        _check("--gradient-dtype", self.gradient_dtype, (None, *_DTYPES))
        _check("--wire-dtype", self.wire_dtype, (None, "bf16"))
        if self.wire_dtype is not None and self.reduce_dtype == "bf16":
            raise UsageError("--wire-dtype goes with sums in fp32: leave --reduce-dtype out.")
        _check(
            "--activation-checkpointing",
            self.activation_checkpointing,
            ("none", "selective", "full"),
        )
        _check("--optimizer", self.optimizer, ("adamw", "sgd"))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the mesh: (shards,) or (replicas, shards)."""
        return mesh_shape(self.mesh) or (self.ranks,)

    @property
    def shards(self) -> int:
        """Number of ranks that a parameter is sharded over."""
        return self.shape[-1]

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return self.ranks // self.shards

    @property
    def tokens(self) -> int:
        """Tokens of one rank in a step."""
        return self.batch_size * self.seq_len * self.accumulate

    def but(self, **changes: object) -> Request:
        """Returns the same request with some fields replaced."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def require_share(request: Request, tokens_per_step: int) -> int:
    """Returns how many sequences of a step each rank takes; refuses tokens that the ranks cannot
    share.
    """
    share = request.seq_len * request.ranks
    if tokens_per_step < share or tokens_per_step % share:
        near = max(1, round(tokens_per_step / share)) * share
        raise UsageError(
            f"--search {tokens_per_step}: {request.ranks} ranks take sequences of "
            f"{request.seq_len} tokens in multiples of {share}; try {near}."
        )
    return tokens_per_step // share


def require_units(units: Sequence[str], known: Sequence[str]) -> None:
    """Refuses a unit that the model does not have; `known` are the names of those."""
    for unit in units:
        if unit not in known:
            raise UsageError(
                f"--unit {unit}: no module has this name or class; there are "
                f"{', '.join(known) or 'none'}."
            )


def units_of_preset(config: TransformerConfig) -> list[str]:
    """Returns what `--unit` can name for a preset, sorted."""
    known = ["Attention", "FeedForward", "Projection", "RMSNorm", "embedding", "head", "norm"]
    return [name for name in known if not (name == "head" and config.tied)]


def require_range(flag: str, value: float | None, most: float) -> None:
    """Refuses a number that is not positive, is not finite, or is larger than `most`; None is the
    default.
    """
    if value is None:
        return
    if not value > 0:  # nan included
        raise UsageError(f"{flag} is {value}: give a positive number.")
    if value > most:
        raise UsageError(f"{flag} is {value}: give at most {most}.")


def _check(flag: str, value: str | None, allowed: tuple[str | None, ...]) -> None:
    if value not in allowed:
        words = ", ".join(each for each in allowed if each)
        raise UsageError(f"{flag} can be {words}, not {value!r}.")
