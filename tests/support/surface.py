"""The surface of FSDP2 as its sources say it, and as docs/reference/fsdp2.md says it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

FILES = ("_fully_shard.py", "_fsdp_api.py")
CLASSES = ("FSDPModule", "UnshardHandle", "GradientReductionHandle")  # whose methods programs call
FUNCTIONS = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")

# (name, parameters with their defaults)
Row = tuple[str, str]


def surface(torch_folder: Path) -> set[Row]:
    """Returns functions, methods of classes and fields of policies."""
    folder = torch_folder / "distributed/fsdp/_fully_shard"
    found: dict[str, str] = {}  # overloads come before what they describe
    for node in (node for name in FILES for node in ast.parse((folder / name).read_text()).body):
        if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
            found[node.name] = _parameters(node)
        elif isinstance(node, ast.ClassDef):
            found.update(row for item in node.body if (row := _member(node.name, item)) is not None)
    return set(found.items())


def _member(owner: str, node: ast.stmt) -> Row | None:
    if isinstance(node, ast.FunctionDef) and owner in CLASSES and not node.name.startswith("_"):
        return f"{owner}.{node.name}", _parameters(node)
    if (
        isinstance(node, ast.AnnAssign)
        and owner.endswith("Policy")
        and isinstance(node.target, ast.Name)
    ):
        return f"{owner}.{node.target.id}", ""
    return None


def _parameters(node: ast.FunctionDef) -> str:
    """Returns a signature without annotations, and without `self`."""
    args = node.args
    for each in (*args.posonlyargs, *args.args, *args.kwonlyargs):
        each.annotation = None
    args.args = [each for each in args.args if each.arg != "self"]
    return ast.unparse(args)


def common_of(page: str) -> set[str]:
    """Returns the names that a page with such a table says that every version has."""
    return set(re.findall(r"`([\w.]+)`", page.partition("In every version: ")[2].partition("|")[0]))


def rows_of(page: str, version: str) -> set[Row]:
    """Returns what the table of such a page says that a version has."""
    cells = [
        [cell.strip().strip("`") for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if line.startswith("|") and "---" not in line
    ]
    column = cells[0].index(version)
    return {(row[0], row[1]) for row in cells[1:] if row[column]}
