"""What a message is: in words for errors, and as a number that travels inside it.

[Note: Labels]
A transport that matches messages by their order alone would hand a rank whatever the other side sent next.
If one rank skipped a unit, the bytes of another unit of the same size would arrive in its place, and
nothing would be wrong but the numbers. Every chunk therefore ends in the label of what it is, and is
refused if it is not what was expected. Labels are three digits to the base 128, which every floating-point
dtype in use holds exactly.

A direct parameter has no room for a label; its message follows one that has one.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardgrad.sharding.layout import TAG_NUMEL

__all__ = ["TAG_NUMEL", "MessageTag", "words_for"]

_BASE = 128
_words: dict[int, str] = {}


@dataclass(frozen=True)
class MessageTag:
    """One kind of message.

    Attributes:
        what: for example "all-gather of layers.3".
        code: the same on every rank.
        digits: the code as numbers below 128, least significant first; none if the message carries none.
    """

    what: str
    code: int
    digits: tuple[float, ...]

    @classmethod
    def of(cls, what: str, code: int) -> MessageTag:
        """Makes a label, and remembers its words for `words_for`."""
        _words[code] = what
        return cls(what, code, tuple(float(code // _BASE**i % _BASE) for i in range(TAG_NUMEL)))

    @classmethod
    def unseen(cls, what: str) -> MessageTag:
        """Makes the label of a message that carries none."""
        return cls(what, -1, ())


def words_for(digits: list[float]) -> str:
    """Returns what a received label stands for on this rank."""
    code = sum(int(digit) * _BASE**i for i, digit in enumerate(digits) if digit == digit and digit >= 0)
    return _words.get(code, "something this rank does not know")
