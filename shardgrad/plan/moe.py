"""A mixture-of-experts transformer for plans, in which every expert computes a fixed number of
tokens.

Experts are batched matrices, in groups of equal size that can be units. Each expert gets `capacity`
tokens, as in the Switch Transformer (arXiv 2101.03961, section 2.2), so that no shape depends on
values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardgrad.train.model import (
    Attention,
    Embedding,
    FeedForward,
    Projection,
    TransformerConfig,
    next_token_loss,
    rotary_tables,
)

__all__ = ["MOE_PRESETS", "ExpertGroup", "MoeConfig", "MoeTransformer"]


@dataclass(frozen=True)
class MoeConfig:
    """A transformer whose later blocks have experts.

    Args:
        dense: widths, heads and vocabulary; `hidden` is that of the dense blocks.
        dense_layers: number of dense blocks before the first block with experts.
        experts: number of experts in a block.
        expert_hidden: inner width of an expert.
        top_k: number of experts for each token, in addition to the shared one.
        groups: number of modules that hold the experts of a block.
        capacity_factor: capacity of an expert, relative to an equal distribution of tokens.
    """

    dense: TransformerConfig
    dense_layers: int
    experts: int
    expert_hidden: int
    top_k: int
    groups: int
    capacity_factor: float = 1.0


MOE_PRESETS = {
    # DeepSeek-V3's widths, depth and experts (arXiv 2412.19437, section 4.2), with grouped-query
    # attention in place of its latent attention.
    "moe-670b": MoeConfig(
        TransformerConfig(
            width=7168,
            layers=61,
            heads=56,
            kv_heads=8,
            hidden=18_432,
            vocab_size=129_280,
            tied=False,
        ),
        dense_layers=3,
        experts=256,
        expert_hidden=2048,
        top_k=8,
        groups=8,
    ),
}


class ExpertGroup(nn.Module):
    """Some of a block's experts, SwiGLU each, with their matrices concatenated along rows.

    Parameters are sharded by rows, and there may be more ranks than experts: of a parameter
    `[experts, width, hidden]` most ranks would hold only padding.
    """

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.count = count = config.experts // config.groups
        width, hidden = config.dense.width, config.expert_hidden
        self.gate = nn.Parameter(torch.empty(count * width, hidden))
        self.up = nn.Parameter(torch.empty(count * width, hidden))
        self.down = nn.Parameter(torch.empty(count * hidden, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps `[experts, capacity, width]` to the same shape."""
        gate, up, down = (
            rows.unflatten(0, (self.count, -1)) for rows in (self.gate, self.up, self.down)
        )
        inner = functional.silu(torch.bmm(tokens, gate)) * torch.bmm(tokens, up)
        return torch.bmm(inner, down)


class Experts(nn.Module):
    """Routes each token to its `top_k` experts and to the shared expert."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Projection(config.dense.width, config.experts, std=config.dense.init_std)
        self.shared = _shared(config)
        self.groups = nn.ModuleList(ExpertGroup(config) for _ in range(config.groups))

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps `[batch, sequence, width]` to the same shape."""
        config, tokens = self.config, inputs.flatten(0, 1)
        scores = functional.softmax(self.router(tokens).float(), dim=-1)
        weights, chosen = scores.topk(config.top_k, dim=-1)
        capacity = math.ceil(config.capacity_factor * len(tokens) * config.top_k / config.experts)
        # The first `experts * capacity` tokens in the order of experts; others pass by the residual
        # stream only.
        order = chosen.flatten().argsort(stable=True)
        place = (
            order[: config.experts * capacity] if len(order) >= config.experts * capacity else order
        )
        source = place // config.top_k
        room = tokens.new_zeros(config.experts * capacity, tokens.shape[1])
        room = room.index_add(
            0, torch.arange(len(place), device=room.device), tokens.index_select(0, source)
        )
        parts = room.view(config.experts, capacity, -1).chunk(config.groups)
        done = torch.cat([group(part) for group, part in zip(self.groups, parts, strict=True)])
        share = weights.flatten().index_select(0, place).to(tokens.dtype).unsqueeze(1)
        mixed: Tensor = self.shared(tokens).index_add(
            0, source, done.flatten(0, 1)[: len(place)] * share
        )
        return mixed.view_as(inputs)


class MoeBlock(nn.Module):
    """Attention, then a dense feed-forward or experts, each normalised before and added after."""

    def __init__(self, config: MoeConfig, *, is_dense: bool) -> None:
        super().__init__()
        dense = config.dense
        self.attention_norm = nn.RMSNorm(dense.width, eps=dense.norm_eps)
        self.attention = Attention(dense)
        self.feed_forward_norm = nn.RMSNorm(dense.width, eps=dense.norm_eps)
        self.feed_forward: nn.Module = FeedForward(dense) if is_dense else Experts(config)

    def forward(self, stream: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Maps `[batch, sequence, width]` to the same shape."""
        stream = stream + self.attention(self.attention_norm(stream), cosine, sine)
        outputs: Tensor = stream + self.feed_forward(self.feed_forward_norm(stream))
        return outputs


class MoeTransformer(nn.Module):
    """The language model; `layers` holds the blocks."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.config = config
        dense = config.dense
        self.embedding = Embedding(dense)
        self.layers = nn.ModuleList(
            MoeBlock(config, is_dense=number < config.dense_layers)
            for number in range(dense.layers)
        )
        self.norm = nn.RMSNorm(dense.width, eps=dense.norm_eps)
        self.head = Projection(dense.width, dense.vocab_size, std=dense.init_std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps integers `[batch, sequence]` to logits `[batch, sequence, vocab_size]`."""
        stream = self.embedding(tokens)
        cosine, sine = rotary_tables(tokens.shape[1], self.config.dense, stream)
        for block in self.layers:
            stream = block(stream, cosine, sine)
        logits: Tensor = self.head(self.norm(stream))
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy in nats per token, a scalar."""
        return next_token_loss(self(tokens), targets)


def _shared(config: MoeConfig) -> FeedForward:
    """Returns the shared expert, which computes every token."""
    dense = config.dense
    return FeedForward(
        TransformerConfig(
            width=dense.width,
            layers=dense.layers,
            heads=dense.heads,
            kv_heads=dense.kv_heads,
            hidden=config.expert_hidden,
            init_std=dense.init_std,
        )
    )
