"""Habits of a program that a graph makes costly, and that nothing else would tell: a warning for
each.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Hashable, Sequence

import torch

__all__ = ["Habits"]

_NEW_KEYS = 7  # calls in a row, each with shapes or numbers that were never seen
# Calls in a row, each with another tensor where the step reads one that it is not given.
_REPLACED = 7
_NEW_GUARDS = 10  # calls in a row, each with host state that was never seen


class Habits:
    """Watches the calls of a step.

    Args:
        warn: function that is called with what to say about the step, and the depth of the
            program's call.
    """

    def __init__(self, warn: Callable[..., None]) -> None:
        self._warn = warn
        self._new_keys = self._replaced = self._new_guards = 0
        self._key: Hashable = None  # of the last call, as the guards
        self._guards: Hashable = None

    def called(self, key: Hashable, *, is_new: bool) -> None:
        """Takes note of a call's inputs, by their key (`graphs/inputs.py`)."""
        before, self._key = self._key, key
        self._new_keys = self._new_keys + 1 if is_new else 0
        if self._new_keys == _NEW_KEYS:
            one, other = _difference(before, key)
            self._warn(
                "ran eagerly, and is not captured: it got shapes or numbers that it had not seen, "
                f"{_NEW_KEYS} calls in a row; in the last, {_said(one)} became {_said(other)}. Pad "
                "shapes and round numbers to a few values with bucket=, or pass a tensor for a "
                "number.",
                depth=5,
            )

    def guarded(self, guards: Hashable, *, is_new: bool) -> None:
        """Takes note of the guards of a call: new ones for shapes that were seen are counted."""
        before, self._guards = self._guards, guards
        self._new_guards = self._new_guards + 1 if is_new else 0
        if self._new_guards == _NEW_GUARDS:
            one, other = _difference(before, guards)
            self._warn(
                "ran eagerly, and is not captured: what a graph would freeze changed before each "
                f"of {_NEW_GUARDS} calls in a row; in the last, {reprlib.repr(one)} became "
                f"{reprlib.repr(other)}. For a number of an optimizer: an optimizer of "
                "shardgrad.optim, which keeps it on the device, or torch's Adam or AdamW with "
                "capturable=True for a learning rate.",
                depth=5,
            )

    def reached_capture(self, moved: Sequence[str]) -> None:
        """Takes note of a call that would be captured, but for tensors that were replaced before
        it.
        """
        self._replaced = self._replaced + 1 if moved else 0
        if self._replaced == _REPLACED:
            self._warn(
                f"reads {', '.join(moved)}, which it is not given, and the program has put another "
                f"tensor in its place before each of {_REPLACED} calls in a row, so it is not "
                "captured and runs eagerly. Pass it as an argument, or write into the tensor that "
                "is there.",
                depth=6,
            )

    def found_no_graphs(self, device: torch.device) -> None:
        """Says that no call will be captured."""
        self._warn(
            f"runs eagerly on every call: {device.type} has no graphs. The numbers are the same, "
            "and what keeps a step from being a graph shows on a device that has them.",
            depth=6,
        )


def _difference(one: Hashable, other: Hashable) -> tuple[Hashable, Hashable]:
    """Returns the innermost pair of guards that differ; a pair is (its name, its value)."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        for x, y in zip(one, other, strict=True):
            if x != y and isinstance(x, tuple) and isinstance(y, tuple):
                return _difference(x, y)
    return one, other


def _said(difference: Hashable) -> str:
    if isinstance(difference, torch.Size):
        return "x".join(map(str, difference)) or "a scalar"
    return reprlib.repr(difference)
