"""The models that are measured, built part by part, with the same initial values on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shardgrad.programs.train.model import Transformer, count_parameters, materialise
from shardgrad.programs.train.presets import PRESETS

SEED = 0


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
    """A model without memory; `preset` is a key of `PRESETS`."""
    with torch.device("meta"):
        return Transformer(PRESETS[preset])


def build_model(
    preset: str,
    device: torch.device,
    *,
    wrap: Callable[[nn.Module], object] = lambda part: None,
) -> Transformer:
    """A model with its initial values on `device`, which bfloat16 has: engines that make their
    float32 parameters from a model in bfloat16 begin where the others do.

    Args:
        preset: a key of `PRESETS`.
        device: where parameters lie.
        wrap: called for each block, and last for the model, as soon as its values are there. A
            model that is sharded in this way never exists unsharded.
    """
    model = on_meta(preset)
    for part in (*model.layers, model):
        materialise(model, part, device=device, seed=SEED)
        for param in part.parameters():
            param.detach().copy_(param.bfloat16())
        wrap(part)
    return model


def facts_of(preset: str) -> ModelFacts:
    """Counts, without allocating the model."""
    model, config = on_meta(preset), PRESETS[preset]
    numel, layers = count_parameters(model), config.layers
    return ModelFacts(numel, layers + 1, layers * config.width, config.vocab_size)
