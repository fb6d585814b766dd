"""What `compare` asks of its ranks and what they answer; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.measure import Cost

ENGINES = ("fsdp2", "shardgrad")
CONTESTANTS = (*ENGINES, "compute", "collectives")


@dataclass(frozen=True)
class Task:
    """What every contestant does, the same for all.

    Attributes:
        preset: a model of `shardgrad.training.presets`.
        precision: `fp32`, or `bf16`: compute in bf16, reduce in fp32.
        accumulate: micro-batches per step; gradients are reduced after the last.
        reshard: `reshard_after_forward` of every unit; None for the engines' default.
        batch_size: sequences per rank and micro-batch.
        seq_len: tokens per sequence.
    """

    preset: str
    precision: str
    accumulate: int
    reshard: bool | None
    batch_size: int
    seq_len: int


@dataclass(frozen=True)
class Outcome:
    """Of one rank.

    Attributes:
        costs: per contestant and round, of one step.
        dtensors: per engine, DTensors constructed from Python in one steady step.
        loss_difference: largest relative difference between the engines' losses.
        ops_backend: `compiled` or `reference`.
    """

    costs: dict[str, list[Cost]]
    dtensors: dict[str, int]
    loss_difference: float
    ops_backend: str
