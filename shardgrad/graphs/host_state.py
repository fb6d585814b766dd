"""The state of the host from which a step starts."""

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
    """Returns a function that makes the host what it is now; memory of the device is not touched.

    Args:
        capturables: whose snapshots are taken.
        device: whose random numbers are put back, as the host's are.
        generators: of further random numbers.
    """
    restores: list[Callable[[], object]] = [each.snapshot() for each in capturables]
    restores += [partial(each.set_state, each.get_state()) for each in generators]
    restores.append(partial(torch.set_rng_state, torch.get_rng_state()))
    if device.type != "cpu":
        module = torch.get_device_module(device)
        restores.append(partial(module.set_rng_state, module.get_rng_state(device), device))

    def restore() -> None:
        for each in restores:
            each()

    return restore
