"""Verification of replays: does a replay give what an eager step gives, and the same when it is
repeated?
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from shardgrad.errors import ReplayMismatchError
from shardgrad.graphs.capturable import Capturable
from shardgrad.graphs.random_state import RandomState

__all__ = ["compare_runs"]


class _InitialState:
    """A copy of everything a step starts from: device memory, host state, random numbers."""

    def __init__(
        self,
        capturables: Sequence[Capturable],
        device: torch.device,
        generators: Sequence[torch.Generator],
    ) -> None:
        self._snapshots = [each.snapshot() for each in capturables]
        self._memory = [
            (tensor, tensor.clone()) for each in capturables for _, tensor in each.tensors()
        ]
        self._random = RandomState(device, generators)

    def restore(self) -> None:
        """Makes the next step start from this state."""
        with torch.no_grad():
            for tensor, value in self._memory:
                tensor.copy_(value)
        for restore in self._snapshots:
            restore()
        self._random.restore()


def compare_runs(
    first: Callable[[], Any],
    second: Callable[[], Any],
    capturables: Sequence[Capturable],
    device: torch.device,
    generators: Sequence[torch.Generator] = (),
    *,
    names: tuple[str, str],
) -> Any:
    """Runs a step in two ways from the same state, and compares outputs and state bit for bit.

    Args:
        first: runs the step; its effects are undone.
        second: runs the step again; its effects stay.
        capturables: whose state is compared.
        device: whose random numbers are drawn.
        generators: that the step draws from in addition.
        names: of the two ways, for an error.

    Returns:
        What `second` returned.

    Streams: everything on the current stream; the host waits for the comparison.
    Capture: not safe.

    Raises:
        ReplayMismatchError: naming the first tensor that differs.
    """
    initial = _InitialState(capturables, device, generators)
    expected = {name: tensor.clone() for name, tensor in _results(first(), capturables)}
    initial.restore()
    outputs = second()
    for name, tensor in _results(outputs, capturables):
        if name in expected and not _same_bits(expected[name], tensor):
            differing = int((expected[name] != tensor).sum())
            raise ReplayMismatchError(
                f"{names[0]} and {names[1]} from the same state differ in {name}",
                expected="the same bits",
                got=f"{differing} of {tensor.numel()} elements differ in value",
                fix="does the step use state that graphed_step was not given, do something else "
                "while it is "
                "captured, or use a kernel whose sums have no fixed order? if none, suspect the "
                "hardware",
            )
    return outputs


def _results(outputs: Any, capturables: Sequence[Capturable]) -> list[tuple[str, torch.Tensor]]:
    """Returns (name, tensor) for the outputs of a step, then for the state."""
    leaves, _ = tree_flatten_with_path(outputs)
    found = [
        (f"output{keystr(path)}", leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)
    ]
    for number, each in enumerate(capturables):
        for name, tensor in each.tensors():
            found.append(
                (name if len(capturables) == 1 else f"{name} (capturable {number})", tensor)
            )
    return found


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Compares bytes, so that two NaNs are equal and two zeros of different sign are not."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    flat = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (first, second))
    return bool(torch.equal(*flat))
