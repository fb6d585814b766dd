"""Random mistakes in consequential files: operators that cosmic-ray replaces, calls left out.

Each is tried against the tests of its folder, the quickest first, for as long as `LIMIT_S`.
"""

from __future__ import annotations

import ast
import difflib
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

TESTS = {
    "engine": (
        "tests/engine/test_gradients_kept.py tests/test_module.py tests/engine tests/checks"
        " tests/features tests/fuzz/test_programs.py"
    ),
    "sharding": "tests/sharding tests/engine/test_training_parity.py tests/features",
    "optim": "tests/optim tests/fuzz/test_programs.py",
    "graphs": "tests/graphs tests/simulated/test_simulated_graphed_calls.py"
    " tests/simulated/test_simulated_graphed_step.py",
}
LIMIT_S = 180
# Annotations are full of them, and nothing runs there.
_LEFT_ALONE = "ReplaceBinaryOperator_BitOr"


@dataclass(frozen=True)
class Mutant:
    """A file of the package, its text with the mistake, and which tests should notice."""

    path: Path
    text: str
    tests: tuple[str, ...]

    def difference(self, original: str) -> str:
        """Returns the lines that differ."""
        lines = difflib.unified_diff(
            original.splitlines(), self.text.splitlines(), n=0, lineterm=""
        )
        return "\n".join(line for line in lines if not line.startswith(("---", "+++")))


def drawn(root: Path, count: int, seed: int) -> list[Mutant]:
    """Draws mutants, as many of each folder, each on a line of its own."""
    chance = random.Random(seed)
    found: list[Mutant] = []
    for folder, tests in TESTS.items():
        by_line: dict[tuple[Path, int], list[Callable[[], str | None]]] = {}
        for file in sorted((root / "shardgrad" / folder).rglob("*.py")):
            for line, make in _mutants(file):
                by_line.setdefault((file, line), []).append(make)
        lines = chance.sample(sorted(by_line), min(len(by_line), count // len(TESTS)))
        for file, line in lines:
            text = chance.choice(by_line[file, line])()
            if text is not None:
                found.append(Mutant(file, text, tuple(tests.split())))
    return found


def _mutants(file: Path) -> Iterator[tuple[int, Callable[[], str | None]]]:
    """Yields lines and what makes a mutant there: an operator of cosmic-ray, or a call left out."""
    from cosmic_ray.commands import init
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator
    from cosmic_ray.work_db import use_db

    code = file.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, use_db(f"{folder}/work.sqlite") as work:
        init([file], work, {})
        mutations = [mutation for item in work.work_items for mutation in item.mutations]
    for each in mutations:
        if _LEFT_ALONE not in each.operator_name:
            operator = get_operator(each.operator_name)(**each.operator_args)
            yield each.start_pos[0], partial(mutate_code, code, operator, each.occurrence)
    lines = code.splitlines(keepends=True)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            indent = lines[node.lineno - 1][: node.col_offset]
            left = [*lines[: node.lineno - 1], f"{indent}pass\n", *lines[node.end_lineno :]]
            yield node.lineno, partial("".join, left)
