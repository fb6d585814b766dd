"""The table of mistakes: what a user typed, what they see, and what that names as the cure.

Each mistake is a program at the top of one of the modules next to this one, run as it is on two
ranks. `python -m tests.mistakes` writes the table into docs/how_to/read_an_error.md.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.support.apart import text_of

WITHIN_S = 10.0

Program = Callable[[], None]


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        program: makes it.
        typed: what the user typed, in a line.
        says: how the error or warning begins, with its class in front.
        cure: what it names, word for word.
        on: how it begins on each rank that names it, where ranks differ.
    """

    program: Program
    typed: str
    says: str
    cure: str
    on: Mapping[int, str]

    def is_named(self, rank: int, text: str) -> bool:
        """Returns whether a text is what the rank was to say."""
        return text.startswith(self.on[rank]) and self.cure in text


MISTAKES: dict[str, Mistake] = {}


def mistake(
    *, typed: str, says: str, cure: str, on: Mapping[int, str] | None = None
) -> Callable[[Program], Program]:
    """Enters a program into the table."""

    def enter(program: Program) -> Program:
        name = program.__name__
        assert name not in MISTAKES, name
        MISTAKES[name] = Mistake(program, typed, says, cure, on or {0: says, 1: says})
        return program

    return enter


def committed(program: Program) -> tuple[list[str], float]:
    """Makes a mistake on this rank; returns the warnings and the error that it led to, and the
    seconds.
    """
    begun_s = time.monotonic()
    errors = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            program()
        except Exception as error:
            errors.append(text_of(error))
    texts = [text_of(str(each.message), each.category) for each in caught]
    return texts + errors, time.monotonic() - begun_s
