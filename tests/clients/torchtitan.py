"""torchtitan's trainer on CPU ranks, for its own `scripts/loss_compare.py`; 0.2.2 was compared.

In a folder with torchtitan's sources, and text under `tests/assets/c4_test`:

    PYTHONPATH=.:CLONE python scripts/loss_compare.py . . --assert-equal --steps=40 \
        --no-seed-checkpoint --baseline-ngpus=2 --test-ngpus=2 \
        --baseline-train-file=tests.clients.torchtitan \
        --test-train-file=tests.clients.torchtitan_with_shardgrad

The trainer is unmodified. What it asks of a GPU's module, the CPU's has not; gloo has no weighted
sums, for which FSDP2 has a switch; and kernels of its mixtures of experts need Triton. The script
compares losses as they are printed; every bit of them and of gradient norms is printed too.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


def main() -> None:
    """Trains as the command line says."""
    _make_a_device_of_the_cpu()
    _sum_where_gloo_cannot_scale()
    kernels: Any = ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None
    sys.modules[kernels.__name__] = kernels
    _print_bits()
    from torchtitan import train

    train.main(train.Trainer)


def _make_a_device_of_the_cpu() -> None:
    cpu: Any = torch.cpu
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu.get_device_name = lambda _=None: "cpu"
    cpu.get_device_properties = lambda _=None: SimpleNamespace(total_memory=1 << 34)
    cpu.memory_stats = lambda _=None: defaultdict(int)
    cpu.empty_cache = cpu.reset_peak_memory_stats = lambda: None
    barrier = dist.barrier
    dist.barrier = lambda *args, device_ids=None, **options: barrier(*args, **options)


def _sum_where_gloo_cannot_scale() -> None:
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_of_sums(self: FSDPModule, factor: float) -> None:
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_factor_of_sums


def _print_bits() -> None:
    from torchtitan.components.metrics import MetricsProcessor

    log = MetricsProcessor.log

    def log_bits(
        self: Any, step: int, loss: float, highest: float, norm: float, **options: Any
    ) -> Any:
        print(f"bits of step {step}: {float(loss).hex()} {float(norm).hex()}", flush=True)
        return log(self, step, loss, highest, norm, **options)

    MetricsProcessor.log = log_bits


if __name__ == "__main__":
    main()
