"""The models that are measured, built part by part, with the same initial values on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from benchmarks.hugging_face import CausalLM, build_causal_lm
from shardgrad.programs.train.model import Transformer, count_parameters, materialise
from shardgrad.programs.train.presets import PRESETS, TransformerConfig

SEED = 0

LanguageModel = Transformer | CausalLM


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
        attention_numel: layers times the width of attention, as in the cost of scores; 0 where not
            known.
        vocab_size: tokens that the model knows.
    """

    numel: int
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
        return build_causal_lm(hf, device=torch.device("meta"), seed=SEED)
    with torch.device("meta"):
        return Transformer(MODELS[preset])


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
    model = build_causal_lm(hf, device=device, seed=seed) if hf else on_meta(preset)
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
        return ModelFacts(numel, layers + 1, layers * config.width, config.vocab_size)
    theirs = cast(Any, model.model).config
    width = getattr(theirs, "hidden_size", 0)
    return ModelFacts(numel, layers + 1, layers * width, int(theirs.vocab_size))
