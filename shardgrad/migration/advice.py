"""One thing that would change, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Advice", "Weight"]

Weight = Literal["change", "check", "drop"]


@dataclass(frozen=True, order=True)
class Advice:
    """One thing that would change.

    Attributes:
        where: a line of a script, or the name of a parameter or module.
        weight: "change": the program has to; "check": it works, perhaps otherwise; "drop": no longer needed.
        what: what was found.
        do: what to type instead.
    """

    where: str
    weight: Weight
    what: str
    do: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}\n  {self.weight + ':':<10}{self.do}"
