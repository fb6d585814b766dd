"""Reading a script, without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from shardgrad.migration.advice import Advice
from shardgrad.migration.rules import ATTRIBUTES, NAMES, Rule

__all__ = ["read_script"]


def read_script(path: Path) -> list[Advice]:
    """Returns what would change for a script, in the order of its lines.

    Only this file is read, and nothing of it is run.

    Raises:
        OSError: it cannot be read.
        SyntaxError: it is not Python of this version.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    found = {*_names(tree), *_attributes(tree), *_order(tree)}
    return [rule_at.advice(path) for rule_at in sorted(found)]


class _Found(tuple[int, str]):
    """A line and what is on it, in an order."""

    rule: Rule

    @classmethod
    def at(cls, node: ast.AST, rule: Rule) -> _Found:
        found = cls((getattr(node, "lineno", 1), rule.what))
        found.rule = rule
        return found

    def advice(self, path: Path) -> Advice:
        return Advice(f"{path}:{self[0]}", self.rule.weight, self.rule.what, self.rule.do)


def _imported(tree: ast.AST) -> dict[str, str]:
    """Returns local names and the dotted names they were imported as."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.partition(".")[0]
                names[local] = alias.name if alias.asname else local
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return names


def _dotted(node: ast.AST, imported: dict[str, str]) -> str | None:
    """Returns the full name of an expression such as `fsdp.fully_shard`, or None if it has none."""
    if isinstance(node, ast.Name):
        return imported.get(node.id)
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value, imported)
        return None if before is None else f"{before}.{node.attr}"
    return None


def _names(tree: ast.AST) -> Iterator[_Found]:
    imported = _imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            rule = NAMES.get(_dotted(node, imported) or "")
            if rule is not None:
                yield _Found.at(node, rule)


def _attributes(tree: ast.AST) -> Iterator[_Found]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            yield _Found.at(node, ATTRIBUTES[node.attr])


def _order(tree: ast.AST) -> Iterator[_Found]:
    """Optimizers that are built, in one block of statements, before a call of `fully_shard`."""
    imported = _imported(tree)
    late = Rule(
        "check",
        "an optimizer is built before fully_shard",
        "build it afterwards: it would hold the parameters that fully_shard replaces",
    )
    for block in _blocks(tree):
        waiting: list[ast.Call] = []
        for statement in block:
            calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
            named = [(call, _dotted(call.func, imported) or "") for call in calls]
            if any(name.endswith(".fully_shard") for _, name in named):
                yield from (_Found.at(call, late) for call in waiting)
                waiting = []
            waiting += [
                call for call, name in named if name.startswith("torch.optim.") and name[12:13].isupper()
            ]


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                yield statements
