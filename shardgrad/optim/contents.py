"""Detects edits of an optimizer's groups and state by the program.

torch's optimizers read both at every step, so programs edit them: `optimizer.state.clear()` resets
the moments, `del optimizer.param_groups[1]` stops training its parameters, `group["params"] = ...`
replaces them. A flat optimizer updates buffers that it laid out earlier. So it compares groups and
state before each step, and applies the edits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

_END = (object(),)


class Contents:
    """The groups and state as the optimizer left them. Each comparison is a few passes in C.

    Args:
        groups: `optimizer.param_groups`.
        state: `optimizer.state`.
    """

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, dict[str, Any]]
    ) -> None:
        self._parts = list(_parts(groups))
        self._values = list(_values(state))

    def same_groups(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Returns whether these are the same groups with the same parameters."""
        return all(map(is_, _parts(groups), self._parts))

    def same_state(self, state: Mapping[Any, dict[str, Any]]) -> bool:
        """Returns whether this state has the same tensors, in the same order."""
        return all(map(is_, _values(state), self._values))


# Both end with `_END`, so that sequences of different length differ.


def _parts(groups: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Yields each group and its parameters."""
    return chain(chain.from_iterable((group, *group["params"]) for group in groups), _END)


def _values(state: Mapping[Any, dict[str, Any]]) -> Iterator[Any]:
    """Yields the values of a state."""
    # torch allows entries of the program's own, which are no parameter's.
    entries = [entry for entry in state.values() if isinstance(entry, dict)]
    return chain(chain.from_iterable(map(dict.values, entries)), _END)
