"""Models of Hugging Face Transformers, a few thousand parameters each, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
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
    config = hf.LlamaConfig(**{**_DECODER, "tie_word_embeddings": tied, **options})
    return hf.LlamaForCausalLM(config)


def qwen() -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_DECODER, head_dim=4))


def mixtral() -> nn.Module:
    """A mixture of experts: which parameters take part depends on each rank's tokens."""
    config = hf.MixtralConfig(
        **_DECODER, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    )
    return hf.MixtralForCausalLM(config)


def gpt2() -> nn.Module:
    """Learned positions, dropout, and a head that is the embedding."""
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=16,
            n_layer=2,
            n_head=4,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def vit() -> nn.Module:
    """Images in, classes out."""
    config = hf.ViTConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=8,
        patch_size=4,
        num_labels=5,
    )
    return hf.ViTForImageClassification(config)


def t5() -> nn.Module:
    """An encoder and a decoder that share their embedding, and relative positions in the first
    blocks.
    """
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=2,
    )
    return hf.T5ForConditionalGeneration(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    make.__name__: make for make in (llama, qwen, gpt2, mixtral, vit, t5)
}


def blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that Transformers says must not be split."""
    names = set(model._no_split_modules)
    return [module for module in model.modules() if type(module).__name__ in names]


def batch(model: nn.Module, step: int) -> dict[str, Tensor]:
    """Returns this rank's inputs and labels of a step."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    if model.main_input_name == "pixel_values":
        pixels = torch.randn(
            ROWS, 3, 8, 8, generator=generator, dtype=next(model.parameters()).dtype
        )
        return {"pixel_values": pixels, "labels": torch.randint(5, (ROWS,), generator=generator)}
    tokens = torch.randint(3, VOCABULARY, (ROWS, 7), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sixteen of them, for programs that bring their own loop."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(3, VOCABULARY, (7,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """Shards each block, and the rest, with what is torch's `fully_shard` at this moment."""
    from torch.distributed.fsdp import fully_shard

    for block in blocks(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    clip: Callable[..., Any] = torch.nn.utils.clip_grad_norm_,
    *,
    first: int = 0,
    steps: int = 2,
) -> Tensors:
    """The loop of a tutorial; returns its losses and gradient norms."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    notes: Tensors = {}
    for step in range(first, first + steps):
        loss = model(**batch(model, step)).loss
        loss.backward()
        norm = clip(model.parameters(), 1.0)
        notes[f"norm of step {step}"] = whole(
            norm if isinstance(norm, Tensor) else torch.tensor(norm)
        )
        optimizer.step()
        optimizer.zero_grad()
        notes[f"loss of step {step}"] = loss.detach()
    return notes
