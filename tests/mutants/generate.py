"""Draws mutants over all files: statements taken out, and changes by the operators of cosmic-ray.

Annotations, docstrings, messages and `__all__` are left alone: no test should look at them. How
many a file gets follows its length; which, a seed.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.mutants.mutant import PACKAGE, Mutant, StaleError, innermost

LINES_FOR_EACH = 85  # of a file; every file with a function gets one mutant
_SHARE_TAKEN_OUT = 0.45


@dataclass(frozen=True)
class _Change:
    first: int  # lines, from 1
    last: int
    text: str  # of these lines, with the change


def draw(path: str, count: int, seed: int) -> list[Mutant]:
    """Returns up to `count` mutants of a file, at different lines."""
    source = (PACKAGE / path).read_text(encoding="utf-8")
    chance = random.Random(f"{path}/{seed}")
    taken_out = list(_statements_taken_out(source))
    replaced = _replacements(source)
    found: dict[int, Mutant] = {}
    for _ in range(40 * count):
        if len(found) == count:
            break
        if chance.random() < _SHARE_TAKEN_OUT or not replaced:
            change = chance.choice(taken_out) if taken_out else None
        else:
            change = _replaced(source, chance.choice(replaced[chance.choice(sorted(replaced))]))
        if change is not None and change.first not in found:
            mutant = _mutant(path, source, change)
            if mutant is not None:
                found[change.first] = mutant
    return [found[line] for line in sorted(found)]


def wanted() -> dict[str, int]:
    """Returns how many mutants each file gets."""
    counts = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "\ndef " in text or "\nclass " in text:
            counts[str(path.relative_to(PACKAGE))] = max(
                1, round(text.count("\n") / LINES_FOR_EACH)
            )
    return counts


def _mutant(path: str, source: str, change: _Change) -> Mutant | None:
    before = "\n".join(source.splitlines()[change.first - 1 : change.last])
    function = innermost(source, change.first)
    mark = hashlib.sha256(f"{function}\n{before}\n{change.text}".encode()).hexdigest()[:6]
    mutant = Mutant(f"{path} {function or 'module'} {mark}", path, function, before, change.text)
    try:
        mutant.applied(source)
    except (StaleError, SyntaxError):
        return None
    return mutant


# -- statements taken out
# -----------------------------------------------------------------------------------


def _statements_taken_out(source: str) -> Iterator[_Change]:
    lines = source.splitlines()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in _own_statements(function):
            is_call = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
            is_store = isinstance(node, ast.AugAssign) or (
                isinstance(node, ast.Assign)
                and not any(isinstance(each, ast.Name) for each in node.targets)
            )
            is_end = (
                isinstance(node, ast.Return)
                and node is not function.body[-1]
                and node.value is None
            )
            if (
                is_call
                or is_store
                or is_end
                or isinstance(node, ast.Raise | ast.Continue | ast.Delete)
            ):
                indent = lines[node.lineno - 1][: node.col_offset]
                if not indent.strip():
                    assert node.end_lineno is not None
                    yield _Change(node.lineno, node.end_lineno, f"{indent}pass")


def _own_statements(function: ast.FunctionDef) -> Iterator[ast.stmt]:
    remaining: list[ast.AST] = list(function.body)
    while remaining:
        node = remaining.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.stmt):
            yield node
        remaining.extend(ast.iter_child_nodes(node))


# -- operators of cosmic-ray
# --------------------------------------------------------------------------------

# Of the replacements of an operator: its opposite, and its neighbour at the boundary.
_TELLING = {
    *(
        "Eq_NotEq",
        "NotEq_Eq",
        "Is_IsNot",
        "IsNot_Is",
        "Lt_LtE",
        "LtE_Lt",
        "Gt_GtE",
        "GtE_Gt",
        "Lt_GtE",
        "Gt_LtE",
    ),
    *("Add_Sub", "Sub_Add", "Mul_Add", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul"),
    *("BitOr_BitAnd", "BitAnd_BitOr", "RShift_LShift", "LShift_RShift"),
}
_Place = tuple[str, int]  # operator, occurrence


def _replacements(source: str) -> dict[str, list[_Place]]:
    """Returns the places of each kind of operator."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import Visitor, get_ast

    tree = ast.parse(source)
    left_out = list(_left_out(tree))
    functions = [
        (node.lineno, node.end_lineno or 0)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ]
    found: dict[str, list[_Place]] = {}

    class Positions(Visitor):
        def __init__(self, operator: object) -> None:
            self.operator = operator
            self.starts: list[tuple[int, int]] = []

        def visit(self, node: object) -> object:
            self.starts += [start for start, _ in self.operator.mutation_positions(node)]  # type: ignore[attr-defined]
            return node

    parsed = get_ast(source)
    for name in plugins.operator_names():
        kind = _kind(name)
        if kind is None:
            continue
        positions = Positions(plugins.get_operator(name)())
        positions.walk(parsed)
        for occurrence, start in enumerate(positions.starts):
            if not any(first <= start < last for first, last in left_out) and any(
                first <= start[0] <= last for first, last in functions
            ):
                found.setdefault(kind, []).append((name, occurrence))
    return found


def _kind(operator: str) -> str | None:
    name = operator.removeprefix("core/")
    kind, _, change = name.removeprefix("Replace").partition("Operator_")
    if kind in ("Comparison", "Binary"):
        return kind if change in _TELLING else None
    # Types see a variable in another's place; imports, a missing decorator.
    return None if name.startswith(("Variable", "RemoveDecorator")) else kind


def _left_out(tree: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yields where annotations, messages of errors, types of `isinstance`, and `strict=` of `zip`
    are.
    """
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.arg):
            parts = [node.annotation]
        elif isinstance(node, ast.FunctionDef):
            parts = [node.returns]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.Raise):
            parts = [node.exc]
        elif isinstance(node, ast.JoinedStr):
            parts = [node]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "isinstance"
        ):
            parts = list(node.args[1:])
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            parts = [node.value]
        elif isinstance(node, ast.Assign) and any(
            isinstance(each, ast.Name) and each.id == "__all__" for each in node.targets
        ):
            parts = [node]
        for part in parts:
            if part is not None:
                place = part  # type: ignore[assignment]
                yield (place.lineno, place.col_offset), (place.end_lineno, place.end_col_offset)  # type: ignore[attr-defined]


def _replaced(source: str, place: _Place) -> _Change | None:
    from cosmic_ray import plugins
    from cosmic_ray.mutating import mutate_code

    name, occurrence = place
    changed = mutate_code(source, plugins.get_operator(name)(), occurrence)
    if changed is None:
        return None
    ours, theirs = source.splitlines(), changed.splitlines()
    blocks = difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()
    edits = [block for block in blocks if block[0] != "equal"]
    if len(edits) != 1 or edits[0][0] != "replace":
        return None
    _, first, last, begin, end = edits[0]
    return _Change(first + 1, last, "\n".join(theirs[begin:end]))
