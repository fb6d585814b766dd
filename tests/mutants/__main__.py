"""Breaks one line at a time: does the test that should notice it fail?

`mutants.toml` lists the lines. Each is changed in a copy of the repository, where its test runs
then. Run this after a large change and before a release:

    make mutants
    make mutants ARGS="engine optim"    those with one of these words in their name or path
    make mutants ARGS="--generated 60 --seed 7"    random ones instead: `generated.py` draws them
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.mutants import generated
from tests.mutants.generated import ROOT, Mutant
from tests.support.processes import FairClock

TABLE = Path(__file__).parent / "mutants.toml"
LIMIT_S = 180
NOT_COPIED = (".*", "build", "dist", "runs", "results", "*.egg-info")
# By pytest's exit status. With others a test has failed, or memory errors have ended the process.
RESULTS = {0: "NOT NOTICED", None: "not noticed in time", 4: "did not run", 5: "did not run"}


def listed() -> Iterator[Mutant]:
    """Yields the mutants of the table."""
    for name, change in tomllib.loads(TABLE.read_text(encoding="utf-8")).items():
        text = (ROOT / change["path"]).read_text(encoding="utf-8")
        if text.count(change["before"]) != 1:
            sys.exit(f"{name}: does not fit {change['path']} any more")
        changed = text.replace(change["before"], change["after"])
        yield Mutant(name, change["path"], changed, [change["test"]])


def status_of(copy: Path, tests: list[str]) -> int | None:
    """Runs tests on the copy; returns pytest's exit status, None if they were not done in time."""
    # Compiled modules are read, not written: a changed file would leave its own behind.
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-xqm", "not long", "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    clock = FairClock([process.pid])
    while (status := process.poll()) is None:
        if clock.elapsed_s() > LIMIT_S:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None
        time.sleep(1.0)
    return status


def build_ops(copy: Path) -> bool:
    """Compiles the copy's C++, and says whether that works."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
    return subprocess.run(command, cwd=copy, check=False, capture_output=True).returncode == 0


def result_of(mutant: Mutant, copy: Path) -> str:
    """Says whether the tests notice a mutant; the copy is as before afterwards."""
    original, is_compiled = ROOT / mutant.path, mutant.path.startswith("csrc/")
    (copy / mutant.path).write_text(mutant.text, encoding="utf-8")
    if is_compiled and not build_ops(copy):
        result = "does not compile"
    else:
        result = RESULTS.get(status_of(copy, mutant.tests), "noticed")
    shutil.copy2(original, copy / mutant.path)
    if is_compiled:
        shutil.copy2(ROOT / "shardgrad" / "_C.so", copy / "shardgrad")
    return result


def main() -> int:
    """Tries the mutants that the arguments choose; returns how many were not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("words", nargs="*", help="in the name or the path of a mutant")
    parser.add_argument("--generated", type=int, default=0, help="how many random ones to try")
    parser.add_argument("--seed", type=int, default=0, help="what they follow from")
    options = parser.parse_args()
    count = options.generated
    mutants = list(generated.drawn(count, options.seed) if count else listed())
    results: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder, "shardgrad")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
        for mutant in mutants:
            where = f"{mutant.name} {mutant.path}"
            if not options.words or any(word in where for word in options.words):
                results.append(result_of(mutant, copy))
                print(f"{mutant.name}: {results[-1]}", flush=True)
    print(f"{results.count('noticed')} of {len(results)} noticed")
    return len(results) - results.count("noticed")


if __name__ == "__main__":
    sys.exit(bool(main()))
