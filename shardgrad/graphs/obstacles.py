"""What keeps a training step from being one graph, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Obstacle", "explain"]


@dataclass(frozen=True)
class Obstacle:
    """One thing that a graph cannot record, or would repeat wrongly.

    Attributes:
        kind: a few words, the same for all of its kind; docs/how_to/migrate_to_graphed_step.md lists them.
        what: one sentence, which names the operation or the value.
        module: qualified name of the innermost module that was running, in a backward of the one whose
            gradient was computed; "" outside of modules.
        place: "file.py:12 in function", the innermost line that is neither torch's, nor this package's, nor
            the standard library's; "" if there is none.
        fix: what to type next.
    """

    kind: str
    what: str
    module: str = ""
    place: str = ""
    fix: str = ""

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.module and f"module {self.module}", self.place)))
        lines = [f"{self.what} [{where}]" if where else self.what]
        return "\n".join([*lines, f"  try: {self.fix}"] if self.fix else lines)


def explain(obstacles: Sequence[Obstacle], *, limit: int = 12) -> str:
    """Returns a numbered list of obstacles, for an error message; "" if there are none.

    Args:
        obstacles: in the order to be read.
        limit: how many are written out; the others are counted.
    """
    lines = [
        f"{number}. {obstacle}".replace("\n", "\n   ")
        for number, obstacle in enumerate(obstacles[:limit], start=1)
    ]
    if len(obstacles) > limit:
        lines.append(f"and {len(obstacles) - limit} more")
    return "\n".join(lines)
