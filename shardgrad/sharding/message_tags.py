"""Tags, by which a rank sees that a message is the one it expects.

[Note: Message tags]
A transport that matches messages by order alone would, if one rank skipped a unit, deliver the
bytes of another unit of the same size, and only the numbers would be wrong. Where the host can read
what has arrived, every chunk therefore ends in the tag of its message, and is refused if the tag is
not the expected one. A layout reserves the room (`layout.py`); the message of a zero-copy parameter
has none, but follows one that has. A tag is three digits to the base 128, which every
floating-point dtype in use, and a byte, holds exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardgrad.sharding.layout import TAG_NUMEL

__all__ = ["MessageTag", "meaning"]

_BASE = 128
_known_tags: dict[int, str] = {}


@dataclass(frozen=True, eq=False)
class MessageTag:
    """A message's name ("all-gather of layers.3") and its tag. See [Note: Message tags].

    The digits are the same on every rank, least significant first; none if there is no room for a
    tag.
    """

    what: str
    digits: tuple[int, ...] = ()

    @classmethod
    def of(cls, what: str, code: int) -> MessageTag:
        """Makes the tag with a number, and remembers what it stands for."""
        _known_tags[code] = what
        return cls(what, tuple(code // _BASE**i % _BASE for i in range(TAG_NUMEL)))


def meaning(digits: list[float]) -> str:
    """Returns what a received tag stands for on this rank."""
    code = sum(
        int(digit) * _BASE**i for i, digit in enumerate(digits) if digit == digit and digit >= 0
    )
    return _known_tags.get(code, "something this rank does not know")
