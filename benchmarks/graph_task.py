"""What `graphed` asks of its contestants; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardgrad.training.presets import PRESETS, TransformerConfig

BASE = "fsdp2"
GRAPHED = "shardgrad graphed"
HAND_WRITTEN = "hand-written"
# In the order of interest: if memory does not hold all of them at once, neighbours are measured together.
CONTESTANTS = (BASE, GRAPHED, HAND_WRITTEN, "shardgrad", "fsdp2+compile", "ddp", "fsdp2 graph")
ON_CPU = (BASE, GRAPHED, "shardgrad", "ddp")

# The trainer's presets have nothing between 124 million parameters and 1.2 billion.
SHAPES: Mapping[str, TransformerConfig] = {
    **PRESETS,
    "300m": TransformerConfig(width=1024, layers=20, heads=16, kv_heads=16, hidden=2816, vocab_size=50_257),
}


def shape_of(preset: str) -> TransformerConfig:
    """Returns the model's shape."""
    return SHAPES[preset]


@dataclass(frozen=True)
class GraphTask:
    """What every contestant does, the same for all.

    Attributes:
        preset: a key of `SHAPES`.
        precision: `fp32`, or `bf16`: compute in bf16, update in fp32.
        batch_size: sequences per step.
        seq_len: tokens per sequence.
        device: `cpu` or `cuda`.
    """

    preset: str
    precision: str
    batch_size: int
    seq_len: int
    device: str


def groups(peaks: Mapping[str, int], room_nbytes: float) -> list[list[str]]:
    """Divides contestants into groups that fit into memory together, the base in each of them.

    Args:
        peaks: bytes that each needs, in the order of interest, the base first.
        room_nbytes: for a group. A contestant that leaves none beside the base is measured with it all the
            same: what happens then is the answer.
    """
    found: list[list[str]] = []
    for name in (name for name in peaks if name != BASE):
        if found and _total(peaks, [*found[-1], name]) <= room_nbytes:
            found[-1].append(name)
        else:
            found.append([BASE, name])
    return found or [[BASE]]


def _total(peaks: Mapping[str, int], names: Sequence[str]) -> int:
    return sum(peaks[name] for name in names)
