"""The transformer: its sizes, its initial values, and what attention may and may not see."""

from __future__ import annotations

import pytest
import torch

from shardgrad.programs.train.model import (
    Transformer,
    count_parameters,
    materialise,
    rotary_tables,
    rotate,
)
from shardgrad.programs.train.presets import PRESETS, TransformerConfig

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


def test_a_token_changes_no_earlier_logits_but_its_own_and_later_ones() -> None:
    model = built()
    tokens = torch.randint(256, (1, 9))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.isclose(before[:, 5:], after[:, 5:]).all(dim=-1).any()


def test_rotated_queries_and_keys_know_their_distance_and_not_their_places() -> None:
    cosine, sine = rotary_tables(12, SMALL, torch.empty(0))
    query, key = (torch.randn(8).expand(1, 1, 12, 8) for _ in range(2))
    scores = (rotate(query, cosine, sine) @ rotate(key, cosine, sine).transpose(-1, -2))[0, 0]
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert len({round(float(score), 4) for score in scores[0]}) == 12


def test_grouped_queries_equal_full_heads_with_repeated_keys_and_values() -> None:
    grouped_config = TransformerConfig(width=16, layers=1, heads=4, kv_heads=2, hidden=24)
    grouped, full = (
        built(grouped_config),
        built(TransformerConfig(width=16, layers=1, heads=4, kv_heads=4, hidden=24)),
    )
    state = grouped.state_dict()
    for name in ("layers.0.attention.key.weight", "layers.0.attention.value.weight"):
        state[name] = state[name].view(2, 4, 16).repeat_interleave(2, dim=0).view(16, 16)
    full.load_state_dict(state)
    tokens = torch.randint(256, (2, 7))
    torch.testing.assert_close(grouped(tokens), full(tokens))


def test_a_tied_head_is_the_embedding_and_an_untied_one_is_its_own() -> None:
    untied = TransformerConfig(width=16, layers=2, heads=2, kv_heads=2, hidden=24, tied=False)
    assert count_parameters(built(untied)) == count_parameters(built()) + 256 * 16
    model = built()
    model.loss(torch.tensor([[1, 2]]), torch.tensor([[2, 3]])).backward()
    # Rows that were never an input get a gradient too: as outputs.
    assert model.embedding.weight.grad is not None
    assert model.embedding.weight.grad[200].abs().sum() > 0
