"""Looking again: does a replay give what an eager step gives, and does it give the same twice?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from shardgrad.errors import ReplayMismatchError
from shardgrad.graphs.capturable import Capturable
from shardgrad.graphs.random_state import RandomState

__all__ = ["taken_twice"]


class _Before:
    """What a step starts from: memory, the host's side, and random numbers. Costs a copy of the state."""

    def __init__(
        self,
        capturables: Sequence[Capturable],
        device: torch.device,
        generators: Sequence[torch.Generator],
    ) -> None:
        self._images = [each.image() for each in capturables]
        self._memory = [(tensor, tensor.clone()) for each in capturables for _, tensor in each.tensors()]
        self._random = RandomState(device, generators)

    def put_back(self) -> None:
        """Makes the next step start from there again."""
        with torch.no_grad():
            for tensor, value in self._memory:
                tensor.copy_(value)
        for restore in self._images:
            restore()
        self._random.put_back()


def taken_twice(
    first: Callable[[], Any],
    second: Callable[[], Any],
    capturables: Sequence[Capturable],
    device: torch.device,
    generators: Sequence[torch.Generator] = (),
    *,
    sides: tuple[str, str],
) -> Any:
    """Takes a step in two ways from the same state, and compares what they leave, bit for bit.

    Args:
        first: takes the step; what it leaves is undone.
        second: takes it again; what it leaves stays.
        capturables: whose state is compared.
        device: whose random numbers are drawn.
        generators: whose are drawn besides.
        sides: what the two ways are called in an error.

    Returns:
        What `second` returned.

    Streams: everything on the current stream; the host waits for the comparison.
    Capture: not safe.

    Raises:
        ReplayMismatchError: naming the first tensor that differs.
    """
    before = _Before(capturables, device, generators)
    left = {name: tensor.clone() for name, tensor in _seen(first(), capturables)}
    before.put_back()
    outputs = second()
    for name, tensor in _seen(outputs, capturables):
        if name in left and not _same_bits(left[name], tensor):
            differing = int((left[name] != tensor).sum())
            raise ReplayMismatchError(
                f"{sides[0]} and {sides[1]} from the same state differ in {name}",
                expected="the same bits",
                got=f"{differing} of {tensor.numel()} elements differ in value",
                fix="does the step use state that graphed_step was not given, or a kernel whose sums have no "
                "fixed order? if neither, suspect the hardware",
            )
    return outputs


def _seen(outputs: Any, capturables: Sequence[Capturable]) -> list[tuple[str, torch.Tensor]]:
    """Returns what a step has left, with names: outputs first, then state."""
    leaves, _ = tree_flatten_with_path(outputs)
    found = [(f"output{keystr(path)}", leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
    for number, each in enumerate(capturables):
        for name, tensor in each.tensors():
            found.append((name if len(capturables) == 1 else f"{name} (capturable {number})", tensor))
    return found


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Compares bytes, so that two NaNs are equal and two zeros of different sign are not."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    flat = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (first, second))
    return bool(torch.equal(*flat))
