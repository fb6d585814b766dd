"""Text from a trained model: at the end of a run, and `shardgrad generate`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardgrad.errors import CheckpointError
from shardgrad.programs.checkpoint import Series, load
from shardgrad.programs.checkpoint.text import escaped
from shardgrad.programs.train.config import TrainConfig, read_settings
from shardgrad.programs.train.failure import TrainingError, UsageError
from shardgrad.programs.train.huggingface import build_causal_lm
from shardgrad.programs.train.model import Transformer
from shardgrad.programs.train.presets import BYTE_VALUES, transformer_config

__all__ = ["continued", "load_run", "shown"]


@torch.no_grad()
def continued(
    model: nn.Module,
    prompt: bytes,
    *,
    count: int,
    window: int,
    temperature: float,
    seed: int,
    device: torch.device,
) -> bytes:
    """Returns a prompt and the bytes that a model continues it with. A collective if the model is
    sharded.

    Args:
        model: maps integers `[1, sequence]` to logits `[1, sequence, vocab_size]`.
        prompt: at least one byte.
        count: number of bytes to add.
        window: largest number of bytes that the model sees, the last ones.
        temperature: divides the logits; 0 takes the most likely byte.
        seed: seed of the choice. All ranks choose alike.
        device: device of the model.

    Raises:
        TrainingError: the model's logits are not finite, on all ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    text = bytearray(prompt)
    was_training = model.training
    model.eval()
    for _ in range(count):
        # Always of the same length, so that a compiled model is not compiled again: attention is
        # causal, and what follows the last byte has no effect on it.
        seen = list(text[-window:])
        tokens = torch.tensor([seen + [0] * (window - len(seen))], device=device)
        logits: Tensor = model(tokens)[0, len(seen) - 1, :BYTE_VALUES].double().cpu()
        if not logits.isfinite().all():
            raise TrainingError("The model's logits are not finite: take an earlier checkpoint.")
        if temperature:
            shares = torch.softmax((logits - logits.max()) / temperature, dim=-1)
            text.append(int(torch.multinomial(shares, 1, generator=generator)))
        else:
            text.append(int(logits.argmax()))
    model.train(was_training)
    return bytes(text)


def shown(text: bytes) -> str:
    """Returns bytes as lines of text, in which other control characters are escaped."""
    lines = text.decode("utf-8", errors="backslashreplace").replace("\t", "    ").split("\n")
    return "\n".join(map(escaped, lines))


def load_run(folder: Path) -> tuple[nn.Module, TrainConfig]:
    """Builds the model of a run on the CPU, unsharded, with the weights of its newest checkpoint.

    Raises:
        UsageError: the folder has no run, or no checkpoint, or there is no memory for the model.
        CheckpointError: the checkpoint is damaged.
    """
    settings = folder / "config.json"
    if not settings.exists():
        raise UsageError(f"There is no run in {folder} (no config.json): correct the folder.")
    config = TrainConfig(**read_settings(settings))
    model: nn.Module
    if config.hf is not None:
        model = build_causal_lm(config.hf, config.override, device=torch.device("cpu"), seed=0)
    else:
        with torch.device("meta"):
            model = Transformer(transformer_config(config.preset, config.override))
        try:
            model.to_empty(device="cpu")  # every element is loaded
        except RuntimeError as error:
            raise UsageError(
                f"There is no memory for the model of {folder}: correct config.json."
            ) from error
    state: Mapping[str, Any] = {"model": model.state_dict()}
    while (newest := Series(folder / "checkpoints").latest()) is not None:
        try:
            load(state, newest, optional=("optimizer.*", "schedule.*", "progress.*", "rng_*"))
        except CheckpointError:
            if newest.exists():
                raise
            continue  # a training that goes on has removed it, and saved another
        return model, config
    raise UsageError(f"{folder} has no checkpoint yet: train until the first one.")
