"""Mutants: one change each in the text of one file of the package, and the files that list them.

| file | holds | written |
|---|---|---|
| `by_hand.toml` | changes that a person could make: order, recovery, files | by hand |
| `generated.jsonl` | changes drawn over all files | by `python -m tests.mutants renew` |
| `noticed_by.jsonl` | for each mutant, a fast test that fails with it | by `python -m tests.mutants try` |
| `equivalent.toml` | mutants that change nothing a test could see, each with the reason | by hand |
"""

from __future__ import annotations

import ast
import functools
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "shardgrad"
HERE = Path(__file__).parent
BY_HAND = HERE / "by_hand.toml"
GENERATED = HERE / "generated.jsonl"
NOTICED_BY = HERE / "noticed_by.jsonl"
EQUIVALENT = HERE / "equivalent.toml"


class StaleError(ValueError):
    """The text that a mutant changes is not in its file, or not once."""


@dataclass(frozen=True)
class Mutant:
    """A change of one place.

    Attributes:
        name: unique; a sentence for those by hand.
        path: the file, from the root of the package, such as `engine/unit.py`; or in `csrc/`.
        function: qualified name of the function or class that has the place; "" for anywhere in the
            file.
        before: the text, which occurs once there.
        after: what takes its place.
    """

    name: str
    path: str
    function: str
    before: str
    after: str

    @property
    def room(self) -> str:
        """The folder of the package, or the file where there is none."""
        return self.path.split("/")[0]

    @property
    def module(self) -> str:
        """The name under which the file is imported."""
        parts = Path("shardgrad", self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def start(self, source: str) -> int:
        """Returns where in the file's text the change begins.

        Raises:
            StaleError: `before` is not there, or more than once.
        """
        first, last = _span(source, self.function)
        if source.count(self.before, first, last) != 1:
            times = source.count(self.before, first, last)
            raise StaleError(
                f"{self.name}: {self.before!r} is {times} times in {self.function or 'all'} of "
                f"{self.path}"
            )
        return source.index(self.before, first, last)

    def line(self, source: str) -> int:
        """Returns the number of the first line that differs, from 1."""
        same = 0
        for ours, theirs in zip(self.before.splitlines(), self.after.splitlines(), strict=False):
            if ours != theirs:
                break
            same += 1
        return source.count("\n", 0, self.start(source)) + 1 + same

    def applied(self, source: str) -> str:
        """Returns the file's text with the change.

        Raises:
            StaleError: see `start`.
            SyntaxError: the result is not Python.
        """
        start = self.start(source)
        changed = source[:start] + self.after + source[start + len(self.before) :]
        if not self.is_native:
            ast.parse(changed)
        return changed

    @property
    def is_native(self) -> bool:
        """Whether the file is one of the compiled ops."""
        return self.room == "csrc"

    def source(self) -> str:
        """Returns the file's text as it is."""
        return ((ROOT if self.is_native else PACKAGE) / self.path).read_text(encoding="utf-8")


@functools.cache
def _spans(source: str) -> Mapping[str, tuple[int, int]]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: dict[str, tuple[int, int]] = {"": (0, len(source))}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                assert child.end_lineno is not None
                found.setdefault(name, (starts[first - 1], starts[child.end_lineno]))
                walk(child, f"{name}.")
            else:
                walk(child, prefix)

    walk(ast.parse(source), "")
    return found


def _span(source: str, function: str) -> tuple[int, int]:
    if not function:
        return 0, len(source)
    spans = _spans(source)
    if function not in spans:
        raise StaleError(f"there is no {function}")
    return spans[function]


def innermost(source: str, line: int) -> str:
    """Returns the qualified name of the innermost function or class around a line; "" outside."""
    offset = sum(len(text) for text in source.splitlines(keepends=True)[: line - 1])
    around = [
        (last - first, name)
        for name, (first, last) in _spans(source).items()
        if first <= offset < last
    ]
    return min(around, default=(0, ""))[1]


def body_around(source: str, line: int) -> frozenset[int]:
    """Returns the line; outside of the bodies of functions, the lines of those that it may
    concern.
    """
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    around = [node for node in functions if node.lineno <= line <= (node.end_lineno or 0)]
    if not around:
        inside = [range(node.body[0].lineno, (node.end_lineno or 0) + 1) for node in functions]
        return frozenset(number for lines in inside for number in lines)
    innermost_one = max(around, key=lambda node: node.lineno)
    if line >= innermost_one.body[0].lineno:
        return frozenset([line])
    return frozenset(range(innermost_one.body[0].lineno, (innermost_one.end_lineno or 0) + 1))


# -- lists
# --------------------------------------------------------------------------------------------------


def all_mutants() -> list[Mutant]:
    """Returns the mutants by hand, then those that were generated.

    Raises:
        StaleError: one by hand does not fit the code. Generated ones that do not are left out.
    """
    by_hand = list(_by_hand())
    for mutant in by_hand:
        mutant.applied(mutant.source())
    return [*by_hand, *(mutant for mutant in generated() if fits(mutant))]


def fits(mutant: Mutant) -> bool:
    """Whether the code still has the place that a mutant changes."""
    try:
        mutant.applied(mutant.source())
    except (StaleError, FileNotFoundError, SyntaxError):
        return False
    return True


def _by_hand() -> Iterator[Mutant]:
    for name, facts in tomllib.loads(BY_HAND.read_text(encoding="utf-8")).items():
        yield Mutant(name, facts["path"], facts.get("in", ""), facts["before"], facts["after"])


def generated() -> list[Mutant]:
    """Returns the mutants of `generated.jsonl`, stale ones included."""
    return [Mutant(**facts) for facts in _lines(GENERATED)]


def write_generated(mutants: list[Mutant]) -> None:
    """Replaces `generated.jsonl`."""
    _write(GENERATED, [asdict(mutant) for mutant in mutants])


def equivalent() -> dict[str, str]:
    """Returns the reasons of mutants that no test could notice, by name."""
    return dict(tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Noticed:
    """A test that fails with a mutant.

    Attributes:
        name: of the mutant.
        test: pytest's id.
        cpu_s: seconds of CPU that the trial took, with the import of the package and all ranks.
    """

    name: str
    test: str
    cpu_s: float


def noticed_by() -> dict[str, Noticed]:
    """Returns the known tests, by the mutant's name."""
    return {facts["name"]: Noticed(**facts) for facts in _lines(NOTICED_BY)}


def write_noticed_by(known: Mapping[str, Noticed]) -> None:
    """Replaces `noticed_by.jsonl`."""
    _write(NOTICED_BY, [asdict(known[name]) for name in sorted(known)])


def _lines(path: Path) -> list[dict[str, str]]:
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if path.exists()
        else []
    )


def _write(path: Path, facts: list[dict[str, object]]) -> None:
    text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in facts)
    path.write_text(text, encoding="utf-8")
