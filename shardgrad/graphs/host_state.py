"""The state of the host from which a step starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from shardgrad.graphs.capturable import Capturable

__all__ = ["HostState"]


class HostState:
    """Snapshots of capturables, and the state of generators of random numbers: the host's, one
    device's, and further ones.
    """

    def __init__(
        self,
        capturables: Sequence[Capturable],
        device: torch.device,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._snapshots = [each.snapshot() for each in capturables]
        self._random: list[tuple[Callable[[torch.Tensor], object], torch.Tensor]]
        self._random = [(each.set_state, each.get_state()) for each in generators]
        self._random.append((torch.set_rng_state, torch.get_rng_state()))
        if device.type != "cpu":
            module = torch.get_device_module(device)
            put_back = partial(module.set_rng_state, device=device)
            self._random.append((put_back, module.get_rng_state(device)))

    def restore(self) -> None:
        """Makes the host what it was. Memory of the device is not touched."""
        for restore in self._snapshots:
            restore()
        for put_back, state in self._random:
            put_back(state)
