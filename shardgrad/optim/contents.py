"""What a program may edit by hand: the groups and the state of an optimizer.

torch's optimizers look both up at every step, so programs edit them: `optimizer.state.clear()`
resets the moments, `del optimizer.param_groups[1]` stops training a part, `group["params"] = ...`
replaces it. A flat optimizer updates buffers that it laid out earlier, so it compares before each
step and follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

__all__ = ["Contents"]

_END = (object(),)


class Contents:
    """Groups and state as the optimizer left them. A comparison is a few passes in C.

    Args:
        groups: `optimizer.param_groups`.
        state: `optimizer.state`.
    """

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, dict[str, Any]]
    ) -> None:
        self._groups = list(groups)
        self._params = [list(group["params"]) for group in groups]
        self._values = list(_values(state))

    def same_groups(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Returns whether these are the same groups with the same parameters."""
        return _same(groups, self._groups) and all(
            _same(group["params"], params)
            for group, params in zip(groups, self._params, strict=True)
        )

    def same_state(self, state: Mapping[Any, dict[str, Any]]) -> bool:
        """Returns whether this state has the same tensors, in the same order."""
        return all(map(is_, _values(state), self._values))


def _values(state: Mapping[Any, dict[str, Any]]) -> Iterator[Any]:
    """Yields all of a state; the end, too, so that one with more or fewer values differs."""
    return chain(chain.from_iterable(map(dict.values, state.values())), _END)


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(is_, left, right))
