"""A decoder-only transformer: RoPE, RMSNorm, SwiGLU, grouped-query attention, tied or untied
head.
"""

from __future__ import annotations

import math
from functools import partial
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardgrad.programs.train.presets import TransformerConfig

_projection = partial(nn.Linear, bias=False)
_norm = partial(nn.RMSNorm, eps=1e-5)
_INIT_STD = 0.02  # of weights; of projections into the residual stream, over sqrt(2 * layers)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        kv_width = config.kv_heads * config.head_width
        self.query = _projection(config.width, config.width)
        self.key = _projection(config.width, kv_width)
        self.value = _projection(config.width, kv_width)
        self.output = _projection(config.width, config.width)

    def forward(self, inputs: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Maps `[batch, sequence, width]` to the same shape; the tables are `[sequence, head_width
        / 2]`.
        """
        query, key, value = (
            projection(inputs).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(
            rotate(query, cosine, sine),
            rotate(key, cosine, sine),
            value,
            is_causal=True,
            enable_gqa=key.shape != query.shape,
        )
        merged: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return merged


class FeedForward(nn.Module):
    """SwiGLU: a gate through SiLU times a linear path, projected back."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate = _projection(config.width, config.hidden)
        self.up = _projection(config.width, config.hidden)
        self.down = _projection(config.hidden, config.width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps `[..., width]` to the same shape."""
        outputs: Tensor = self.down(functional.silu(self.gate(inputs)) * self.up(inputs))
        return outputs


class Block(nn.Module):
    """Attention and feed-forward, each normalized before and added to the residual stream after."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = _norm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, stream: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Maps `[batch, sequence, width]` to the same shape."""
        stream = stream + self.attention(self.attention_norm(stream), cosine, sine)
        outputs: Tensor = stream + self.feed_forward(self.feed_forward_norm(stream))
        return outputs


class Transformer(nn.Module):
    """The language model. `layers` holds the blocks, which an engine shards one by one.

    It is built under `torch.device("meta")`, and :func:`materialise` gives its modules memory and
    initial values, one after another.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        # Of a tied model, the head too.
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = _norm(config.width)
        self.head = None if config.tied else _projection(config.width, config.vocab_size)

    @property
    def ends(self) -> tuple[str, ...]:
        """Names of modules that are units beside the blocks: embedding and head, unless tied."""
        return () if self.head is None else ("embedding", "head")

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps integers `[batch, sequence]` to logits `[batch, sequence, vocab_size]`."""
        stream = self.embedding(tokens)
        cosine, sine = rotary_tables(tokens.shape[1], self.config, stream)
        for block in self.layers:
            stream = block(stream, cosine, sine)
        stream = self.norm(stream)
        if self.head is None:
            return functional.linear(stream, self.embedding.weight)
        logits: Tensor = self.head(stream)
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy in nats per token, for integers `[batch, sequence]`."""
        # self(tokens), not self.forward(tokens): the engine's hooks unshard the parameters.
        return next_token_loss(self(tokens), targets)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy in nats, computed in fp32.

    Args:
        logits: `[batch, sequence, vocab_size]`, any floating dtype.
        targets: integers `[batch, sequence]`.
    """
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def count_parameters(model: nn.Module) -> int:
    """Returns the number of elements of all parameters; shared ones count once, sharded ones in
    full.
    """
    return sum(parameter.numel() for parameter in model.parameters())


def materialise(model: Transformer, part: nn.Module, *, device: torch.device, seed: int) -> None:
    """Allocates and initializes the meta parameters of a submodule.

    Each module draws from a generator of its own, seeded by `seed` and the module's name in
    `model`, so the values do not depend on the rank, on the number of ranks or on the order of
    calls: a caller may materialize a block, shard it, and then materialize the next.

    Args:
        model: the whole model.
        part: the submodule, or `model` itself.
        device: device of the parameters.
        seed: seed of the initial values.
    """
    inside = set(part.modules())
    for name, module in model.named_modules():
        if module not in inside or not any(p.is_meta for p in module.parameters(recurse=False)):
            continue
        module.to_empty(device=device, recurse=False)
        std = _INIT_STD
        if name.endswith((".output", ".down")):
            # 2 * layers projections are added to the residual stream: its initial variance does not
            # grow with depth.
            std /= math.sqrt(2 * model.config.layers)
        generator = torch.Generator(device).manual_seed(crc32(f"{seed}/{name}".encode()))
        for param in module.parameters(recurse=False):
            if param.ndim < 2:
                nn.init.ones_(param)
            else:
                nn.init.normal_(param, std=std, generator=generator)


def rotary_tables(sequence: int, config: TransformerConfig, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines `[sequence, head_width / 2]` in the dtype of `like`.

    Computed in every forward, not kept as buffers: the cost is small compared with a block, and a
    model without buffers can be built on the meta device without special cases.
    """
    half = config.head_width // 2
    exponents = torch.arange(half, device=like.device, dtype=torch.float32) / half
    frequencies = torch.exp(exponents * -math.log(config.rope_theta))
    positions = torch.arange(sequence, device=like.device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates each pair (i, i + head_width / 2) of `[batch, heads, sequence, head_width]` by its
    angle.
    """
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
