"""Breaks one line at a time: does the test that should notice it fail?

`mutants.toml` lists the lines. Each is changed in a copy of the repository, and its test is run
there with the change and without. Run this after a large change and before a release:

    make mutants
    make mutants ARGS="engine optim"    those with one of these words in their name or path
"""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).parent / "mutants.toml"
LIMIT_S = 600  # what takes longer hangs, which counts as noticed
NOT_COPIED = (".*", "build", "dist", "runs", "results", "*.egg-info")


def mutated(source: str, mutant: dict[str, str]) -> str | None:
    """Returns the file's text with the change, or None if it no longer fits."""
    begin, end = 0, len(source)
    if "in" in mutant:
        lines = [0]
        for line in source.splitlines(keepends=True):
            lines.append(lines[-1] + len(line))
        node: ast.AST | None = ast.parse(source)
        for name in mutant["in"].split("."):
            children = ast.iter_child_nodes(node) if node is not None else []
            node = next((each for each in children if getattr(each, "name", "") == name), None)
        if node is None:
            return None
        begin, end = lines[node.lineno - 1], lines[node.end_lineno]
    before, after = mutant["before"].strip("\n"), mutant["after"].strip("\n")
    if source.count(before, begin, end) != 1:
        return None
    return source[:begin] + source[begin:end].replace(before, after) + source[end:]


def passes(copy: Path, test: str) -> bool:
    """Runs a test, by pytest's id, on the copy."""
    # Compiled modules are read, not written: a changed file would leave its own behind.
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "", "-p", "no:cacheprovider", test]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=copy, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return process.wait(LIMIT_S) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return False


def build_ops(copy: Path) -> None:
    """Compiles the copy's C++."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
    subprocess.run(command, cwd=copy, check=True, capture_output=True)


def main() -> int:
    """Tries the mutants that the arguments choose; returns how many were not noticed."""
    chosen = {
        name: mutant
        for name, mutant in tomllib.loads(TABLE.read_text(encoding="utf-8")).items()
        if not sys.argv[1:] or any(word in f"{name} {mutant['path']}" for word in sys.argv[1:])
    }
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder, "shardgrad")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
        passes_unchanged = cache(lambda test: passes(copy, test))
        for name, mutant in chosen.items():
            original, file = ROOT / mutant["path"], copy / mutant["path"]
            text = (
                mutated(original.read_text(encoding="utf-8"), mutant) if original.exists() else None
            )
            if text is None:
                results[name] = "does not fit the code any more"
            elif not passes_unchanged(mutant["test"]):
                results[name] = f"{mutant['test']} is gone, or fails without the change"
            else:
                file.write_text(text, encoding="utf-8")
                if file.is_relative_to(copy / "csrc"):
                    build_ops(copy)
                results[name] = "NOT NOTICED" if passes(copy, mutant["test"]) else "noticed"
                shutil.copy2(original, file)
                if file.is_relative_to(copy / "csrc"):
                    shutil.copy2(ROOT / "shardgrad" / "_C.so", copy / "shardgrad")
            print(f"{name}: {results[name]}", flush=True)
    noticed = sum(result == "noticed" for result in results.values())
    print(f"{noticed} of {len(results)} noticed")
    return len(results) - noticed


if __name__ == "__main__":
    sys.exit(bool(main()))
