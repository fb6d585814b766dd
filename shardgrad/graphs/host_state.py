"""A snapshot of the host state from which a step starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from shardgrad.graphs.capturable import Capturable

__all__ = ["host_snapshot"]


def host_snapshot(
    capturables: Sequence[Capturable],
    device: torch.device,
    generators: Sequence[torch.Generator],
) -> Callable[[], None]:
    """Returns a function that restores the present host state and random generators without
    touching other device memory.

    Args:
        capturables: the objects whose snapshots are taken.
        device: the device whose default generator is restored, besides the CPU's.
        generators: further generators to restore.
    """
    restores: list[Callable[[], object]] = [each.snapshot() for each in capturables]
    known = torch.default_generator, *generators
    restores += [partial(each.set_state, each.get_state()) for each in known]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        restores.append(partial(module.set_rng_state, module.get_rng_state(device), device))

    def restore() -> None:
        for each in restores:
            each()

    return restore
