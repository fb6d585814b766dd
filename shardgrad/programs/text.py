"""Escapes text from files, so that it cannot control a terminal."""

from __future__ import annotations

from collections.abc import Collection

from shardgrad import errors

_LONGEST = 200


def escaped(text: object) -> str:
    """Returns text with non-printable characters escaped."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text)
    )


def printable(text: object) -> str:
    """Returns escaped text, truncated to 200 characters."""
    try:
        whole = str(text)
    except (
        ValueError,
        RecursionError,
    ):  # an integer of thousands of digits, lists nested too deeply
        return f"{type(text).__name__} that is too long to show"
    shown = escaped(whole[: _LONGEST + 1])
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 3] + "..."


def listed(names: Collection[object]) -> str:
    """Returns the first names in sorted order, and the number of the others."""
    return errors.listed([printable(name) for name in sorted(names, key=str)], 8)
