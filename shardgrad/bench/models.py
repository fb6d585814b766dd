"""The models of `shardgrad bench`: built part by part, with the same initial values on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardgrad.bench.shapes import SHAPES, MixtureConfig, numel_of
from shardgrad.bench.task import Task
from shardgrad.train.huggingface import CausalLM, build_causal_lm
from shardgrad.train.model import Transformer, count_parameters, materialise

__all__ = ["LanguageModel", "Mixture", "ModelFacts", "build_model", "facts_of"]

SEED = 0

LanguageModel = Transformer | CausalLM


class Experts(nn.Module):
    """Feed-forwards side by side; the token at place `i` of the batch visits expert `i` modulo their number.

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
        """Draw the weights anew from the default generator of their device."""
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=self.std)

    def forward(self, inputs: Tensor) -> Tensor:
        """`[batch, sequence, width]` to the same; their product is a multiple of the experts."""
        count, width = self.gate.shape[:2]
        tokens = inputs.reshape(-1, count, width).transpose(0, 1)  # [experts, tokens of each, width]
        inner = functional.silu(torch.bmm(tokens, self.gate)) * torch.bmm(tokens, self.up)
        return torch.bmm(inner, self.down).transpose(0, 1).reshape(inputs.shape)


class Mixture(Transformer):
    """A :class:`Transformer` with `Experts` for feed-forwards."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        for block in self.layers:
            block.feed_forward = Experts(config)


@dataclass(frozen=True)
class ModelFacts:
    """What rates are computed from.

    Attributes:
        numel: numbers in the parameters.
        active_numel: those that one token meets.
        units: modules that an engine shards: the blocks and the model.
        attention_numel: layers times the width of attention, as in the cost of scores; 0 where not known.
        vocab_size: tokens that the model knows.
    """

    numel: int
    active_numel: int
    units: int
    attention_numel: int
    vocab_size: int


def build_model(
    task: Task, device: torch.device, *, wrap: Callable[[nn.Module], object] = lambda part: None
) -> LanguageModel:
    """A model with its initial values on `device`.

    Args:
        task: for the preset or the Hugging Face configuration.
        device: where parameters lie.
        wrap: called for each block, and last for the model, as soon as its values are there. A built-in
            model that is sharded in this way never exists whole.
    """
    model: LanguageModel
    if task.hf is not None:
        model = build_causal_lm(task.hf, {}, device=device, seed=SEED)
    else:
        shape = SHAPES[task.preset]
        with torch.device("meta"):
            model = Mixture(shape) if isinstance(shape, MixtureConfig) else Transformer(shape)
    for part in (*model.layers, model):
        if isinstance(model, Transformer):
            materialise(model, part, device=device, seed=SEED)
        wrap(part)
    return model


def facts_of(task: Task) -> ModelFacts:
    """Counts, without allocating the model."""
    if task.hf is None:
        shape = SHAPES[task.preset]
        return ModelFacts(
            numel_of(shape),
            numel_of(shape, active=True),
            shape.layers + 1,
            shape.layers * shape.width,
            shape.vocab_size,
        )
    model = build_causal_lm(task.hf, {}, device=torch.device("meta"), seed=SEED)
    config = cast(Any, model.model).config
    numel, layers = count_parameters(model), len(model.layers)
    return ModelFacts(
        numel, numel, layers + 1, layers * getattr(config, "hidden_size", 0), int(config.vocab_size)
    )
