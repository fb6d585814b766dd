"""The input of a plan: the model, and how it is sharded and trained."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import click

from shardgrad.programs.train.failure import UsageError
from shardgrad.programs.train.presets import PRESETS
from shardgrad.programs.train.settings import setting, whole

MOST_RANKS = 2**20
_MESH = re.compile(r"([1-9][0-9]{0,8})(?:x([1-9][0-9]{0,8}))?")


@dataclass(frozen=True)
class Request:
    """The training step to plan."""

    preset: str = setting(
        "8b",
        "Built-in model.",
        click.Choice(tuple(PRESETS)),
    )
    model: str | None = setting(
        None, "Plan the model that a function returns, MODULE:FUNCTION, instead of a built-in one."
    )
    ranks: int = setting(
        8,
        "Number of ranks.  [default: the size of --mesh, or 8]",
        whole(1, MOST_RANKS),
    )
    mesh: str | None = setting(
        None,
        "Device mesh: 16 shards over 16 ranks; 4x16 is 4 replicas of 16 shards.  [default: shard "
        "over all]",
    )
    stage: str = setting(
        "3",
        "ZeRO stage, as `zero_stage` of fully_shard.",
        click.Choice(("1", "2", "3", "hfsdp")),
    )
    precision: str = setting(
        "bf16-mixed",
        "bf16-mixed computes in bf16 with fp32 weights, and reduces gradients in fp32.",
        click.Choice(("fp32", "bf16-mixed")),
    )
    wire_dtype: str | None = setting(
        None,
        "Dtype that gradients travel in.  [default: fp32]",
        click.Choice(("bf16",)),
    )
    activation_checkpointing: str = setting(
        "none",
        "Recompute the activations of each block in backward: all, or all but those that cost "
        "most.",
        click.Choice(("none", "selective", "full")),
    )

    # Beyond the limits, torch could not count the elements of an activation, and a plan, which runs
    # every micro-batch, would take an hour.
    batch_size: int = setting(1, "Sequences per rank in each micro-batch.", whole(1, 2**16))
    seq_len: int = setting(8192, "Tokens per sequence.", whole(1, 2**22))
    accumulate: int = setting(1, "Micro-batches per step.", whole(1, 2**10))
    no_sync: bool = setting(False, "Reduce gradients only after the last micro-batch.")

    def __post_init__(self) -> None:
        mesh_shape(self.mesh, self.ranks)
        if self.stage == "hfsdp" and self.replicas == 1:
            raise UsageError(
                "--stage hfsdp shards over two axes: give a mesh with both, such as --mesh 4x16."
            )

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.model or self.preset

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


def mesh_shape(text: str | None, ranks: int | None = None) -> tuple[int, ...]:
    """Parses `2x2` into (2, 2), `4` into (4,) and None into ().

    Raises:
        UsageError: the text is not a mesh of one or two dimensions, or not one of `ranks` ranks.
    """
    if text is None:
        return ()
    found = _MESH.fullmatch(text.lower())
    if found is None:
        raise UsageError(
            f"--mesh {text[:50]} is not a mesh: write 4 for four shards or 2x2 for two replicas of "
            "two."
        )
    shape = tuple(int(part) for part in found.groups() if part)
    total = math.prod(shape)
    if total > MOST_RANKS:
        raise UsageError(f"--mesh {text} has {total} ranks: use at most {MOST_RANKS}.")
    if ranks not in (None, total):
        raise UsageError(f"--mesh {text} has {total} ranks, but --ranks is {ranks}: correct one.")
    return shape
