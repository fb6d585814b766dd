"""Breaks one line at a time: does the test that should notice it fail?

`mutants.toml` lists the lines. Each is changed in a copy of the repository, and its test is run
there with the change and without. Run this after a large change and before a release:

    make mutants
    make mutants ARGS="engine optim"    those with one of these words in their name or path
    make mutants ARGS="--generated 60 --seed 7"    random ones instead: `generated.py` draws them
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tests.mutants import generated
from tests.support.processes import FairClock

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).parent / "mutants.toml"
NOTICED = "noticed"
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


def passes(copy: Path, *tests: str, limit_s: float = LIMIT_S) -> bool | None:
    """Runs tests, by pytest's ids, on the copy; returns None if they were not done in time."""
    # Compiled modules are read, not written: a changed file would leave its own behind.
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-m",
        "",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*command, *tests],
            cwd=copy,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        clock = FairClock([process.pid])
        while clock.elapsed_s() < limit_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(1.0) == 0
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def build_ops(copy: Path) -> None:
    """Compiles the copy's C++."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
    subprocess.run(command, cwd=copy, check=True, capture_output=True)


def listed(copy: Path, words: list[str]) -> Iterator[tuple[str, str]]:
    """Tries the mutants of the table that have one of the words; yields names and results."""
    passes_unchanged = cache(lambda test: passes(copy, test))
    for name, mutant in tomllib.loads(TABLE.read_text(encoding="utf-8")).items():
        if words and not any(word in f"{name} {mutant['path']}" for word in words):
            continue
        original, file = ROOT / mutant["path"], copy / mutant["path"]
        text = mutated(original.read_text(encoding="utf-8"), mutant) if original.exists() else None
        if text is None:
            yield name, "does not fit the code any more"
        elif not passes_unchanged(mutant["test"]):
            yield name, f"{mutant['test']} is gone, or fails without the change"
        else:
            file.write_text(text, encoding="utf-8")
            if file.is_relative_to(copy / "csrc"):
                build_ops(copy)
            yield name, "NOT NOTICED" if passes(copy, mutant["test"]) else NOTICED
            shutil.copy2(original, file)
            if file.is_relative_to(copy / "csrc"):
                shutil.copy2(ROOT / "shardgrad" / "_C.so", copy / "shardgrad")


def random_ones(copy: Path, count: int, seed: int, words: list[str]) -> Iterator[tuple[str, str]]:
    """Tries generated mutants of the folders that are named, or of all; yields as `listed` does."""
    for mutant in generated.drawn(ROOT, count, seed):
        name = str(mutant.path.relative_to(ROOT))
        if words and not any(word in name for word in words):
            continue
        original = mutant.path.read_text(encoding="utf-8")
        (copy / name).write_text(mutant.text, encoding="utf-8")
        passed = passes(copy, "-m", "not long", *mutant.tests, limit_s=generated.LIMIT_S)
        (copy / name).write_text(original, encoding="utf-8")
        result = {True: "NOT NOTICED", False: NOTICED, None: "not noticed in time"}[passed]
        yield f"{name}\n{mutant.difference(original)}", result


def main() -> int:
    """Tries the mutants that the arguments choose; returns how many were not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("words", nargs="*", help="in the name or the path of a mutant")
    parser.add_argument("--generated", type=int, default=0, help="how many random ones to try")
    parser.add_argument("--seed", type=int, default=0, help="what they follow from")
    options = parser.parse_args()
    if options.generated and find_spec("cosmic_ray") is None:
        parser.error("random mutants need cosmic-ray: pip install --group mutants")
    results: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder, "shardgrad")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
        tried = (
            random_ones(copy, options.generated, options.seed, options.words)
            if options.generated
            else listed(copy, options.words)
        )
        for name, result in tried:
            results.append(result)
            print(f"{name}: {result}", flush=True)
    print(f"{results.count(NOTICED)} of {len(results)} noticed")
    return len(results) - results.count(NOTICED)


if __name__ == "__main__":
    sys.exit(bool(main()))
