"""The models that `shardgrad bench` knows, as plain numbers that need no PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardgrad.train.presets import PRESETS, TransformerConfig

__all__ = ["SHAPES", "MixtureConfig", "numel_of"]


@dataclass(frozen=True)
class MixtureConfig(TransformerConfig):
    """A transformer whose feed-forwards are many experts side by side, each token visiting one.

    Args:
        experts: per block. A token's place in the batch decides which one it visits, so shapes never depend
            on data and every engine can run it, captured or not.
    """

    experts: int = 16


# Beside the trainer's: a size between 124 million and 1.2 billion, and two shapes that are hard on engines.
SHAPES: Mapping[str, TransformerConfig] = {
    **PRESETS,
    "300m": TransformerConfig(width=1024, layers=20, heads=16, kv_heads=16, hidden=2816, vocab_size=50_257),
    "many-small": TransformerConfig(width=64, layers=96, heads=2, kv_heads=2, hidden=128),
    "wide-moe": MixtureConfig(width=256, layers=4, heads=4, kv_heads=4, hidden=512),
}


def numel_of(shape: TransformerConfig, *, active: bool = False) -> int:
    """Numbers in the model's parameters.

    Args:
        shape: of the model.
        active: count only what one token meets: of each block's experts, one.
    """
    experts = shape.experts if isinstance(shape, MixtureConfig) and not active else 1
    attention = 2 * shape.width * (shape.width + shape.kv_heads * shape.head_width)
    feed_forward = 3 * shape.width * shape.hidden * experts
    block = attention + feed_forward + 2 * shape.width
    embeddings = shape.vocab_size * shape.width * (1 if shape.tied else 2)
    return shape.layers * block + shape.width + embeddings
