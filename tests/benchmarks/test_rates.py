"""The arithmetic of rates."""

from __future__ import annotations

from benchmarks.engines.summary import flops_per_step


def test_flops_are_those_of_the_palm_paper() -> None:
    # Its own example, table 21: PaLM 540B, 118 layers of 48 heads of 256, 2,048 tokens.
    model = {"numel": 540_350_000_000, "attention_numel": 118 * 48 * 256}
    per_token = flops_per_step(model, tokens=1, seq_len=2048)
    assert per_token == 6 * 540.35e9 + 12 * 118 * 48 * 256 * 2048
