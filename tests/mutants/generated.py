"""Random mistakes in consequential files: in Python, operators that cosmic-ray replaces and calls
left out; in C++, patterns.

Each is tried against the tests of its folder, the quickest first.
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

ROOT = Path(__file__).parents[2]
TESTS = {
    "shardgrad/engine": (
        "tests/engine/test_random_programs.py tests/engine/test_kept_programs.py"
        " tests/engine/test_gradients_kept.py tests/engine tests/test_module.py tests/checks"
        " tests/features tests/optim/test_clips_and_zeroes.py tests/sharding tests/mistakes"
    ),
    "shardgrad/sharding": (
        "tests/sharding tests/mistakes tests/engine/test_kept_programs.py tests/features"
    ),
    "shardgrad/optim": "tests/optim tests/engine/test_random_programs.py",
    "shardgrad/graphs": "tests/graphs",
    "csrc/cpu": "tests/ops tests/optim tests/engine/test_random_programs.py",
}
_IN_CPP = {
    " < ": " <= ",
    " <= ": " < ",
    " + ": " - ",
    " - ": " + ",
    " * ": " + ",
    " / ": " * ",
    " += ": " = ",
    " == ": " != ",
    " != ": " == ",
    " && ": " || ",
    " || ": " && ",
    " ? ": " ? !",
    "max(": "min(",
    "min(": "max(",
    "true": "false",
    "false": "true",
    "return ": "return -",
}
# Annotations are full of them, and nothing runs there.
_LEFT_ALONE = "ReplaceBinaryOperator_BitOr"


@dataclass(frozen=True)
class Mutant:
    """What is broken, a file of the project, its text then, and tests that should notice."""

    name: str
    path: str
    text: str
    tests: list[str]


def drawn(count: int, seed: int) -> Iterator[Mutant]:
    """Draws mutants, as many of each folder, each on a line of its own."""
    chance = random.Random(seed)
    for folder, tests in TESTS.items():
        found = [
            (file, *each)
            for file in sorted((ROOT / folder).rglob("*.*"))
            if file.suffix in (".py", ".h", ".cpp")
            for each in (_mutants(file) if file.suffix == ".py" else _mutants_of_cpp(file))
        ]
        chance.shuffle(found)
        by_line = {(file, line): make for file, line, make in found}
        lines = chance.sample(sorted(by_line), min(len(by_line), count // len(TESTS)))
        for file, line in lines:
            before, path = file.read_text(encoding="utf-8"), str(file.relative_to(ROOT))
            after = by_line[file, line]()
            texts = before.splitlines(), after.splitlines()
            difference = "\n".join(difflib.unified_diff(*texts, path, path, n=0, lineterm=""))
            yield Mutant(difference, path, after, tests.split())


def _mutants(file: Path) -> Iterator[tuple[int, Callable[[], str]]]:
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


def _mutants_of_cpp(file: Path) -> Iterator[tuple[int, Callable[[], str]]]:
    """Yields lines and what makes a mutant there: a pattern, replaced."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    for index, line in enumerate(lines):
        for before, after in _IN_CPP.items():
            if before in line and not line.strip().startswith(("//", "#")):
                changed = line.replace(before, after, 1)
                yield index + 1, partial("".join, [*lines[:index], changed, *lines[index + 1 :]])
