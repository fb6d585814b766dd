"""The models that are measured, built part by part, with the same initial values on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from shardgrad.programs.train.model import Transformer, count_parameters, materialise
from shardgrad.programs.train.presets import PRESETS, TransformerConfig

SEED = 0

# The training program's, a size between 124 million and 1.2 billion, and a shape that is hard on
# engines.
MODELS: Mapping[str, TransformerConfig] = {
    **PRESETS,
    "300m": TransformerConfig(
        width=1024, layers=20, heads=16, kv_heads=16, hidden=2816, vocab_size=50_257
    ),
    "many-small": TransformerConfig(width=64, layers=96, heads=2, kv_heads=2, hidden=128),
}


@dataclass(frozen=True)
class ModelFacts:
    """What rates are computed from.

    Attributes:
        numel: numbers in the parameters.
        units: modules that an engine shards: the blocks and the model.
        attention_numel: layers times the width of attention, as in the cost of scores.
        vocab_size: tokens that the model knows.
    """

    numel: int
    units: int
    attention_numel: int
    vocab_size: int


def on_meta(preset: str) -> Transformer:
    """A model without memory; `preset` is a key of `MODELS`."""
    with torch.device("meta"):
        return Transformer(MODELS[preset])


def build_model(
    preset: str,
    device: torch.device,
    *,
    wrap: Callable[[nn.Module], object] = lambda part: None,
) -> Transformer:
    """A model with its initial values on `device`.

    Args:
        preset: a key of `MODELS`.
        device: where parameters lie.
        wrap: called for each block, and last for the model, as soon as its values are there. A
            model that is sharded in this way never exists unsharded.
    """
    model = on_meta(preset)
    for part in (*model.layers, model):
        materialise(model, part, device=device, seed=SEED)
        wrap(part)
    return model


def facts_of(preset: str) -> ModelFacts:
    """Counts, without allocating the model."""
    model, config = on_meta(preset), MODELS[preset]
    numel, layers = count_parameters(model), config.layers
    return ModelFacts(numel, layers + 1, layers * config.width, config.vocab_size)
