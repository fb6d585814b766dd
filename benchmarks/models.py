"""The models that are measured, built part by part, with the same initial values on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardgrad.programs.train.huggingface import CausalLM, build_causal_lm
from shardgrad.programs.train.model import Transformer, count_parameters, materialise
from shardgrad.programs.train.presets import PRESETS, TransformerConfig

SEED = 0

LanguageModel = Transformer | CausalLM


@dataclass(frozen=True)
class MixtureConfig(TransformerConfig):
    """A transformer whose feed-forwards are many experts side by side, each token visiting one.

    Args:
        experts: per block. A token's place in the batch decides which one it visits, so shapes
            never depend on data and every engine can run it, captured or not.
    """

    experts: int = 16


# The training program's, a size between 124 million and 1.2 billion, and two shapes that are hard
# on engines.
MODELS: Mapping[str, TransformerConfig] = {
    **PRESETS,
    "300m": TransformerConfig(
        width=1024, layers=20, heads=16, kv_heads=16, hidden=2816, vocab_size=50_257
    ),
    "many-small": TransformerConfig(width=64, layers=96, heads=2, kv_heads=2, hidden=128),
    "wide-moe": MixtureConfig(width=256, layers=4, heads=4, kv_heads=4, hidden=512),
}


class Experts(nn.Module):
    """Feed-forwards side by side; the token at place `i` of the batch visits expert `i` modulo
    their number.

    Args:
        config: of the model.
    """

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.std = config.init_std
        count, width, hidden = config.experts, config.width, config.hidden
        self.gate = nn.Parameter(torch.empty(count, width, hidden))
        self.up = nn.Parameter(torch.empty(count, width, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights again from the default generator of their device."""
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=self.std)

    def forward(self, inputs: Tensor) -> Tensor:
        """`[batch, sequence, width]` to the same; batch x sequence is a multiple of the experts."""
        count, width = self.gate.shape[:2]
        # [experts, tokens of each, width].
        tokens = inputs.reshape(-1, count, width).transpose(0, 1)
        inner = functional.silu(torch.bmm(tokens, self.gate)) * torch.bmm(tokens, self.up)
        return torch.bmm(inner, self.down).transpose(0, 1).reshape(inputs.shape)


class Mixture(Transformer):
    """A :class:`Transformer` with `Experts` for feed-forwards."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        for block in self.layers:
            block.feed_forward = Experts(config)


class Chain(nn.Module):
    """Many small units in a row.

    Args:
        count: units.
        layers: square linear layers with bias in each; more than one get a scale as well.
    """

    width = 16

    def __init__(self, count: int, layers: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(_Link(self.width, layers) for _ in range(count))

    def forward(self, inputs: Tensor) -> Tensor:
        for unit in self.units:
            inputs = unit(inputs)
        return inputs


class _Link(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(width)) if layers > 1 else None

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs if self.scale is None else inputs * self.scale


@dataclass(frozen=True)
class ModelFacts:
    """What rates are computed from.

    Attributes:
        numel: numbers in the parameters.
        active_numel: those that one token meets.
        units: modules that an engine shards: the blocks and the model.
        attention_numel: layers times the width of attention, as in the cost of scores; 0 where not
            known.
        vocab_size: tokens that the model knows.
    """

    numel: int
    active_numel: int
    units: int
    attention_numel: int
    vocab_size: int


def on_meta(preset: str, hf: str | None = None) -> LanguageModel:
    """A model without memory.

    Args:
        preset: a key of `MODELS`; of no meaning where `hf` is given.
        hf: a Hugging Face configuration: a `config.json`, or a model type such as gpt2.
    """
    if hf is not None:
        return build_causal_lm(hf, {}, device=torch.device("meta"), seed=SEED)
    config = MODELS[preset]
    with torch.device("meta"):
        return Mixture(config) if isinstance(config, MixtureConfig) else Transformer(config)


def build_model(
    preset: str,
    device: torch.device,
    *,
    hf: str | None = None,
    wrap: Callable[[nn.Module], object] = lambda part: None,
    seed: int = SEED,
) -> LanguageModel:
    """A model with its initial values on `device`.

    Args:
        preset: see `on_meta`.
        device: where parameters lie.
        hf: see `on_meta`.
        wrap: called for each block, and last for the model, as soon as its values are there. A
            built-in model that is sharded in this way never exists unsharded.
        seed: of the initial values.
    """
    model = build_causal_lm(hf, {}, device=device, seed=seed) if hf else on_meta(preset)
    for part in (*model.layers, model):
        if isinstance(model, Transformer):
            materialise(model, part, device=device, seed=seed)
        wrap(part)
    return model


def facts_of(preset: str, hf: str | None = None) -> ModelFacts:
    """Counts, without allocating the model."""
    model = on_meta(preset, hf)
    numel, layers = count_parameters(model), len(model.layers)
    if isinstance(model, Transformer):
        config = model.config
        idle = 0
        if isinstance(config, MixtureConfig):
            experts = sum(param.numel() for param in model.layers[0].feed_forward.parameters())
            idle = layers * (experts - experts // config.experts)
        return ModelFacts(numel, numel - idle, layers + 1, layers * config.width, config.vocab_size)
    theirs = cast(Any, model.model).config
    width = getattr(theirs, "hidden_size", 0)
    return ModelFacts(numel, numel, layers + 1, layers * width, int(theirs.vocab_size))
