"""Configurations of the built-in models. This module does not import PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

BYTE_VALUES = 256


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only transformer.

    Args:
        width: width of the residual stream.
        layers: number of blocks.
        heads: number of query heads; divides `width`, and the head width is even, as RoPE rotates
            pairs.
        kv_heads: number of key and value heads; divides `heads` (grouped-query attention if
            smaller).
        hidden: inner width of the SwiGLU feed-forward.
        vocab_size: rows of the embedding. Bytes use the first 256; presets named after a known
            model have that model's vocabulary size, so that memory and communication are those of
            the model.
        tied: use the transposed embedding as output head.
        rope_theta: base of RoPE's wavelengths.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab_size: int = BYTE_VALUES
    tied: bool = True
    rope_theta: float = 10_000.0

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads


_LLAMA_3 = TransformerConfig(
    width=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    hidden=14_336,
    vocab_size=128_256,
    tied=False,
    rope_theta=500_000.0,
)
PRESETS: Mapping[str, TransformerConfig] = {
    "tiny": TransformerConfig(width=192, layers=2, heads=3, kv_heads=3, hidden=576),
    "small": TransformerConfig(width=384, layers=6, heads=6, kv_heads=6, hidden=1024),
    "gpt2": TransformerConfig(
        width=768, layers=12, heads=12, kv_heads=12, hidden=2048, vocab_size=50_257
    ),
    "1b": replace(_LLAMA_3, width=2048, layers=16, hidden=8192, tied=True),
    "8b": _LLAMA_3,
    "70b": replace(_LLAMA_3, width=8192, layers=80, heads=64, hidden=28_672),
}
