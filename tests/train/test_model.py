"""The transformer: its sizes, its initial values, and that it is a Llama."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardgrad.programs.train.model import (
    Transformer,
    count_parameters,
    materialise,
)
from shardgrad.programs.train.presets import PRESETS, TransformerConfig
from tests.support.under_patch import skip_without

SMALL = TransformerConfig(width=16, layers=2, heads=2, kv_heads=2, hidden=24)
CPU = torch.device("cpu")


def built(config: TransformerConfig = SMALL, *, seed: int = 0) -> Transformer:
    with torch.device("meta"):
        model = Transformer(config)
    materialise(model, model, device=CPU, seed=seed)
    return model


@pytest.mark.parametrize(
    ("preset", "size"),
    [
        ("tiny", 1e6),
        ("small", 10e6),
        ("gpt2", 124e6),
        ("1b", 1.24e9),
        ("8b", 8.03e9),
    ],
)
def test_a_preset_has_the_size_of_its_name(preset: str, size: float) -> None:
    with torch.device("meta"):
        model = Transformer(PRESETS[preset])
    assert count_parameters(model) == pytest.approx(size, rel=0.08)


def test_initial_values_do_not_depend_on_the_order_of_filling_nor_on_other_draws() -> None:
    with torch.device("meta"):
        by_parts = Transformer(SMALL)
    for block in reversed(by_parts.layers):
        torch.rand(3)
        materialise(by_parts, block, device=CPU, seed=0)
    materialise(by_parts, by_parts, device=CPU, seed=0)
    together = built().state_dict()
    assert by_parts.state_dict().keys() == together.keys()
    for name, value in by_parts.state_dict().items():
        assert torch.equal(value, together[name]), name
        if value.ndim == 2:  # those that add to the residual stream are smaller, by its depth
            adds = name.endswith(("output.weight", "down.weight"))
            std = 0.02 / (2 * SMALL.layers) ** (adds / 2)
            assert value.std().item() == pytest.approx(std, rel=0.1), name


NAMES = {
    **{"self_attn.q": "attention.query", "self_attn.k": "attention.key"},
    **{"self_attn.v": "attention.value", "self_attn.o": "attention.output"},
    **{"_proj": "", "mlp": "feed_forward", "input_layernorm": "attention_norm"},
    **{"post_attention_layernorm": "feed_forward_norm", "embed_tokens": "embedding"},
    **{"lm_head": "head", "model.": ""},
}


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_the_llama_of_transformers(tied: bool) -> None:
    """Which shows what attention sees, rotations, queries that share keys, and a tied head."""
    skip_without("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = replace(SMALL, heads=4, kv_heads=2, tied=tied)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            rms_norm_eps=1e-5,
            rope_theta=config.rope_theta,
            tie_word_embeddings=tied,
        )
    )
    model, state = built(config), {}
    for name, value in theirs.named_parameters():
        for there, here in NAMES.items():
            name = name.replace(there, here)
        state[name] = value
    model.load_state_dict(state)
    tokens = torch.randint(256, (2, 9))
    torch.testing.assert_close(model(tokens), theirs(tokens).logits)
    assert count_parameters(model) == count_parameters(theirs)
