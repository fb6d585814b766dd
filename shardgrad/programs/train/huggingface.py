"""Causal language models of the `transformers` package, built from a configuration."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardgrad.extras import require
from shardgrad.programs.train.config import read_text
from shardgrad.programs.train.failure import UsageError
from shardgrad.programs.train.model import next_token_loss
from shardgrad.programs.train.presets import BYTE_VALUES, Scalar, suggestion


class CausalLM(nn.Module):
    """Adapts a `transformers` model to the interface of
    :class:`~shardgrad.programs.train.model.Transformer`.

    Args:
        model: a model from `AutoModelForCausalLM.from_config`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._layers_path = longest_module_list(model)

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks of the decoder, found for any architecture as the largest module list."""
        # Looked up, not registered a second time: a parameter must not have two names.
        found = self.model.get_submodule(self._layers_path)
        if not isinstance(found, nn.ModuleList):
            raise TypeError(
                f"{self._layers_path} is no longer a ModuleList but {type(found).__name__}"
            )
        return found

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps integers `[batch, sequence]` to logits `[batch, sequence, vocab_size]`."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy in nats per token, a scalar."""
        return next_token_loss(self(tokens), targets)


def build_causal_lm(
    source: str, overrides: Mapping[str, Scalar], *, device: torch.device, seed: int
) -> CausalLM:
    """Builds an unsharded model with random weights, the same on every rank.

    Args:
        source: path of a `config.json`, or a model type such as `gpt2`.
        overrides: fields of the configuration to replace.
        device: device to build the model on.
        seed: seed of the weights.

    Raises:
        UsageError: the configuration cannot be read, or `transformers` cannot build a model from
            it.
        PartnerUnavailableError: `transformers` is not installed.
    """
    config = read_model_config(source, overrides)
    from transformers import AutoModelForCausalLM

    try:
        with torch.random.fork_rng(), device:
            torch.manual_seed(seed)
            build: Any = AutoModelForCausalLM.from_config  # typed in some versions only
            model = build(config)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise _unusable(source, error) from error
    if model.config.vocab_size < BYTE_VALUES:
        raise UsageError(
            f"{source} has {model.config.vocab_size} tokens: bytes need at least {BYTE_VALUES}."
        )
    return CausalLM(model.float())


def require_buildable(source: str, overrides: Mapping[str, Scalar]) -> None:
    """Refuses what :func:`build_causal_lm` would refuse, without the memory of a model."""
    try:
        build_causal_lm(source, overrides, device=torch.device("meta"), seed=0)
    except RuntimeError as error:  # sizes below zero, or more than torch can count
        raise _unusable(source, error) from error


def read_model_config(source: str, overrides: Mapping[str, Scalar]) -> Any:
    """Returns the configuration of a model, of the class that `transformers` has for its type.

    Args:
        source: as for `build_causal_lm`.
        overrides: fields to replace.

    Raises:
        UsageError: it cannot be read, or `transformers` refuses it.
        PartnerUnavailableError: `transformers` is not installed.
    """
    require("transformers", feature="--hf")
    from transformers import AutoConfig

    settings = _settings_in(source) | dict(overrides)
    kind = settings.pop("model_type")
    try:
        config = AutoConfig.for_model(kind, **settings)
        known = AutoConfig.for_model(kind)
    except Exception as error:  # each class of transformers refuses values in its own way
        raise _unusable(source, error) from error
    for name in overrides:
        if not hasattr(known, name):  # it would be kept, and read by nothing
            fields = textwrap.shorten(suggestion(name, list(known.to_dict())), 200)
            raise UsageError(f"The configuration of {kind!r} has no field {name!r}: {fields}")
    heads = getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(shared, int) and (shared < 1 or heads % shared):
        raise UsageError(
            f"--hf {source}: num_attention_heads is {heads}, which num_key_value_heads, {shared}, "
            "does not divide: correct one of them."
        )
    return config


def _settings_in(source: str) -> dict[str, Any]:
    """Returns the settings in a `config.json`, or those of a model type: its name."""
    path = Path(source)
    if not path.suffix:
        return {"model_type": source}
    try:
        settings = json.loads(read_text(path))
    except UsageError as error:
        raise UsageError(f"--hf {error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--hf {source} is not valid JSON ({error}): correct it there.") from error
    if not isinstance(settings, dict) or not isinstance(settings.get("model_type"), str):
        raise UsageError(
            f"--hf {source} names no model_type: use the config.json of a transformers model."
        )
    return settings


def _unusable(source: str, error: Exception) -> UsageError:
    # It may list every architecture.
    reason = textwrap.shorten(str(error) or type(error).__name__, 120)
    return UsageError(f"transformers cannot build a causal LM from {source!r}: {reason}")


def longest_module_list(model: nn.Module) -> str:
    """Returns the path of the module list with the most parameters, which holds the decoder's
    blocks.
    """
    sizes: dict[str, int] = {
        name: sum(parameter.numel() for parameter in part.parameters())
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList)
    }
    if not sizes:
        raise UsageError(
            f"{type(model).__name__} keeps no list of blocks to shard: choose another model."
        )
    return max(sizes, key=lambda name: sizes[name])
