"""The state of the random number generators that a step may draw from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["RandomState"]


class RandomState:
    """A copy of the state of the host's generator, of one device's, and of further ones."""

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator] = ()) -> None:
        self._others = [(generator, generator.get_state()) for generator in generators]
        self._device = device
        self._host = torch.get_rng_state()
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._state = None if self._module is None else self._module.get_rng_state(device)

    def restore(self) -> None:
        """Puts all of them back into this state."""
        for generator, state in self._others:
            generator.set_state(state)
        torch.set_rng_state(self._host)
        if self._module is not None:
            self._module.set_rng_state(self._state, self._device)
