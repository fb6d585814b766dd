"""Text from a trained model, at the end of a run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardgrad.programs.train.presets import BYTE_VALUES

_TEMPERATURE = 0.8


@torch.no_grad()
def continued(
    model: nn.Module,
    prompt: bytes,
    *,
    count: int,
    window: int,
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
        seed: seed of the choice. All ranks choose alike.
        device: device of the model.
    """
    generator = torch.Generator().manual_seed(seed)
    text = bytearray(prompt)
    for _ in range(count):
        tokens = torch.tensor([list(text[-window:])], device=device)
        logits: Tensor = model(tokens)[0, -1, :BYTE_VALUES].double().cpu()
        shares = torch.softmax(logits / _TEMPERATURE, dim=-1)
        text.append(int(torch.multinomial(shares, 1, generator=generator)))
    return bytes(text)
