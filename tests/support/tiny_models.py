"""Models of Hugging Face Transformers, a few thousand parameters each, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.parity import Tensors
from tests.support.under_patch import whole

VOCABULARY = 64
ROWS = 3
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(*, tied: bool = False, **options: Any) -> nn.Module:
    import transformers as hf

    config = hf.LlamaConfig(**{**_DECODER, "tie_word_embeddings": tied, **options})
    return hf.LlamaForCausalLM(config)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that Transformers says must not be split."""
    names = set(model._no_split_modules)
    return [module for module in model.modules() if type(module).__name__ in names]


def generator_of(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 * step + dist.get_rank())


def batch(model: nn.Module, step: int) -> dict[str, Tensor]:
    """Returns this rank's inputs and labels of a step."""
    tokens = torch.randint(3, VOCABULARY, (ROWS, 7), generator=generator_of(step))
    return {"input_ids": tokens, "labels": tokens}


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sixteen of them, for programs that bring their own loop."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(3, VOCABULARY, (7,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def sharded(
    model: nn.Module, units: Iterable[nn.Module] | None = None, **options: Any
) -> nn.Module:
    """Shards each unit, by default each block, and the rest, with what is torch's `fully_shard` at
    this moment.
    """
    from torch.distributed.fsdp import fully_shard

    for unit in blocks(model) if units is None else units:
        fully_shard(unit, **options)
    return fully_shard(model, **options)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    clip: Callable[..., Any] = torch.nn.utils.clip_grad_norm_,
    *,
    loss_of: Callable[[torch.Generator], Tensor] | None = None,
    first: int = 0,
    steps: int = 2,
) -> Tensors:
    """The loop of a tutorial; returns its losses and gradient norms.

    Args:
        model: a sharded one.
        optimizer: by default AdamW.
        clip: called with parameters and the largest norm.
        loss_of: a random batch of this rank; by default that of a language model.
        first: the number of the first step.
        steps: how many.
    """
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    notes: Tensors = {}
    for step in range(first, first + steps):
        loss = loss_of(generator_of(step)) if loss_of else model(**batch(model, step)).loss
        loss.backward()
        norm = clip(model.parameters(), 1.0)
        notes[f"norm of step {step}"] = whole(
            norm if isinstance(norm, Tensor) else torch.tensor(norm)
        )
        optimizer.step()
        optimizer.zero_grad()
        notes[f"loss of step {step}"] = loss.detach()
    return notes
