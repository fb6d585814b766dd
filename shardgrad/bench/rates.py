"""From seconds to tokens and to the share of what the hardware could compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Peak", "flops_per_step", "peak_of"]

# Dense FLOP/s without sparsity, from NVIDIA's data sheets. fp32 is that of CUDA cores, as torch's default is.
_PUBLISHED: Mapping[str, Mapping[str, float]] = {
    "H200": {"fp32": 67e12, "bf16": 989e12, "fp16": 989e12},
    "H100 PCIe": {"fp32": 51e12, "bf16": 756e12, "fp16": 756e12},
    "H100 NVL": {"fp32": 60e12, "bf16": 835e12, "fp16": 835e12},
    "H100": {"fp32": 67e12, "bf16": 989e12, "fp16": 989e12},
    "B200": {"fp32": 75e12, "bf16": 2250e12, "fp16": 2250e12},
    "A100": {"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12},
    "L40S": {"fp32": 91.6e12, "bf16": 362e12, "fp16": 362e12},
    "L4": {"fp32": 30.3e12, "bf16": 121e12, "fp16": 121e12},
}


@dataclass(frozen=True)
class Peak:
    """What one rank's hardware could compute.

    Attributes:
        flops_per_s: of one rank.
        words: who says so.
    """

    flops_per_s: float
    words: str


def peak_of(hardware: Mapping[str, Any], precision: str) -> Peak:
    """The published peak of a known GPU; elsewhere the rate that matrix products had on all ranks at once.

    Args:
        hardware: what a rank found.
        precision: of the task.
    """
    device = str(hardware.get("device_name", ""))
    for name, rates in _PUBLISHED.items():
        if name in device:
            return Peak(rates[precision], f"NVIDIA's figure for the {name}, dense {precision}")
    return Peak(
        hardware["matmul_flops_per_s"],
        f"measured: a 1024 x 1024 product in {precision} on every rank at once",
    )


def flops_per_step(model: Mapping[str, int], *, tokens: int, seq_len: int) -> float:
    """What a step has to compute, however it is done: 6 N + 12 L H Q T for each token.

    N counts the parameters that a token meets, L H Q are layers times the width of attention, T is the length
    of the sequence. Recomputation does not count, nor does it help that half of causal attention is masked.

    Args:
        model: `active_numel` and `attention_numel`.
        tokens: of the step, on all ranks.
        seq_len: T.

    Source: PaLM (Chowdhery et al., 2022, arXiv:2204.02311), appendix B.
    """
    return float(tokens * (6 * model["active_numel"] + 12 * model["attention_numel"] * seq_len))
