"""Causal language models of `transformers`, with the interface of the built-in transformer."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from shardgrad.programs.plan.models import longest_module_list
from shardgrad.programs.train.failure import UsageError
from shardgrad.programs.train.model import next_token_loss


class CausalLM(nn.Module):
    """Adapts a model of `AutoModelForCausalLM`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._layers_path = longest_module_list(model)

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks of the decoder, found for any architecture as the largest module list."""
        # Looked up, not registered a second time: a parameter must not have two names.
        return cast(nn.ModuleList, self.model.get_submodule(self._layers_path))

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps integers `[batch, sequence]` to logits `[batch, sequence, vocab_size]`."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy in nats per token, a scalar."""
        return next_token_loss(self(tokens), targets)


def build_causal_lm(source: str, *, device: torch.device, seed: int) -> CausalLM:
    """Builds an unsharded model with random weights, the same on every rank.

    Args:
        source: path of a `config.json`, or a model type such as `gpt2`.
        device: device to build the model on.
        seed: seed of the weights.

    Raises:
        UsageError: `transformers` is not installed, or cannot build it.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM

        is_file = bool(Path(source).suffix)
        config = AutoConfig.from_pretrained(source) if is_file else AutoConfig.for_model(source)
        with torch.random.fork_rng(), device:
            torch.manual_seed(seed)
            return CausalLM(AutoModelForCausalLM.from_config(config).float())
    except Exception as error:  # each class of transformers refuses values in its own way
        reason = str(error).strip().split("\n")[0][:120]
        raise UsageError(f"--hf {source} cannot be built ({reason}): correct it.") from error
