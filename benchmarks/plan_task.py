"""What `plan` asks of its ranks; nothing here imports torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A training step.

    Attributes:
        preset: of `shardgrad.train.presets`.
        override: fields of it, replaced.
        precision: `fp32`, or `bf16`: compute in bf16, reduce in fp32.
        stage: of ZeRO: "1", "2", "3", or "hfsdp", for which every two ranks are a replica.
        accumulate: micro-batches.
        batch_size: sequences per rank and micro-batch.
        seq_len: tokens per sequence.
    """

    preset: str
    override: tuple[tuple[str, int], ...]
    precision: str
    stage: str
    accumulate: int
    batch_size: int
    seq_len: int

    def mesh_shape(self, ranks: int) -> tuple[int, ...]:
        """Returns the ranks along each axis, the shards' axis last."""
        return (ranks // 2, 2) if self.stage == "hfsdp" else (ranks,)

    def small(self) -> Task:
        """Returns the same task on one narrow block."""
        narrow = (("layers", 1), ("width", 64), ("heads", 1), ("kv_heads", 1), ("hidden", 64))
        return dataclasses.replace(self, override=narrow, batch_size=1, seq_len=16)
