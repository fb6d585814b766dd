"""Issues: what keeps a training step from being one graph, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Issue", "explain"]


@dataclass(frozen=True)
class Issue:
    """One thing that a graph cannot record, or would repeat wrongly.

    Attributes:
        kind: a few words, the same for all issues of a kind; docs/how_to/migrate_to_graphed_step.md
            lists them.
        what: one sentence, which names the operation or the value.
        module: qualified name of the innermost module that was running, in a backward of the one
            whose gradient was computed; "" outside of modules.
        location: "file.py:12 in function", the innermost line outside of torch, this package and
            the standard library; "" if there is none.
        fix: what to type next.
    """

    kind: str
    what: str
    module: str = ""
    location: str = ""
    fix: str = ""

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.module and f"module {self.module}", self.location)))
        lines = [f"{self.what} [{where}]" if where else self.what]
        return "\n".join([*lines, f"  try: {self.fix}"] if self.fix else lines)


def explain(issues: Sequence[Issue], *, limit: int = 12) -> str:
    """Returns a numbered list of issues, for an error message; "" if there are none.

    Args:
        issues: in the order to be read.
        limit: how many are written out; the others are counted.
    """
    lines = [
        f"{number}. {issue}".replace("\n", "\n   ")
        for number, issue in enumerate(issues[:limit], start=1)
    ]
    if len(issues) > limit:
        lines.append(f"and {len(issues) - limit} more")
    return "\n".join(lines)
