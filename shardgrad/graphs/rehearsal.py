"""The last eager steps before the first capture, watched for what a capture would refuse or get wrong."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from shardgrad.graphs.interludes import taken_over
from shardgrad.graphs.obstacles import Obstacle
from shardgrad.graphs.preflight import Recording, differences, watch
from shardgrad.graphs.surroundings import surroundings

__all__ = ["Rehearsal"]

_T = TypeVar("_T")

# A capture with one of these succeeds, and its replays are wrong. The others it refuses by itself.
_SILENT = frozenset(
    ("another operation", "another shape", "changed number", "moved tensor", "seed", "unregistered generator")
)
_WATCHED = 2


class Rehearsal:
    """Watches the last two of the first `warmup` eager steps.

    Args:
        modules: for the names in what is found.
        optimizers: whether they can be captured.
        outside: optimizers whose steps will not be part of the graph; they are not watched.
        generators: that a graph will know.
        device: of the steps.
        warmup: eager steps before the first capture.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        outside: Sequence[Optimizer],
        generators: Sequence[torch.Generator],
        device: torch.device,
        warmup: int,
    ) -> None:
        self._generators = list(generators)
        self._modules: Mapping[str, nn.Module] = (
            {"": modules[0]}
            if len(modules) == 1
            else {f"{type(module).__name__} {i}": module for i, module in enumerate(modules)}
        )
        self._optimizers = list(optimizers)
        self._outside = list(outside)
        self._device = device
        self._warmup = warmup
        self._seen: list[tuple[Hashable, Recording]] = []

    def run(
        self,
        step: Callable[[], _T],
        situation: Hashable,
        earlier: int,
        persistent: Callable[[], Iterable[torch.Tensor]],
    ) -> _T:
        """Takes an eager step, watched if it is one of the last before a capture.

        Args:
            step: the step.
            situation: steps in the same one are compared.
            earlier: eager steps so far.
            persistent: asked for the memory that stays from step to step.
        """
        # In the very first step things are made that later are there.
        if not max(1, self._warmup - _WATCHED) <= earlier < self._warmup:
            return step()
        with taken_over(self._outside, _unwatched):
            result, recording = watch(
                step, self._modules, self._device, persistent=persistent(), generators=self._generators
            )
        self._seen.append((situation, recording))
        return result

    def obstacles(self, situation: Hashable) -> list[Obstacle]:
        """Returns what stands in the way of capturing a step in this situation, as far as it was watched."""
        seen = [recording for known, recording in self._seen if known == situation]
        found = list(surroundings(self._device, self._optimizers))
        if seen:
            found += seen[-1].obstacles
        if len(seen) == _WATCHED:
            found += differences(*seen)
        return found

    def silent(self, situation: Hashable) -> list[Obstacle]:
        """Returns those with which a capture would succeed, and replays be wrong."""
        return [obstacle for obstacle in self.obstacles(situation) if obstacle.kind in _SILENT]

    def forget(self) -> None:
        """Begins anew."""
        self._seen.clear()


def _unwatched(call: Callable[[], Any]) -> None:
    with _disable_current_modes():
        call()
