"""The documentation is true: links and names lead somewhere, and examples run."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest

import shardgrad
from benchmarks.__main__ import _RECORDS, BENCHMARKS
from tests.support.processes import run

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), ROOT / "benchmarks/README.md", *(ROOT / "docs").rglob("*.md")])
HISTORY = ROOT / "CHANGELOG.md"  # says what things were called


CODE = [
    path
    for folder in ("shardgrad", "csrc", "tests", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(page: Path) -> str:
    """Returns a page without its blocks of code."""
    return re.sub(
        r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )


def test_every_function_of_the_interface_has_an_example_that_compiles() -> None:
    reference = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    names = re.findall(r"autofunction:: (?:shardgrad\.)?([\w.]+)", reference)
    assert len(names) >= 14
    for name in names:
        function = functools.reduce(getattr, name.split("."), shardgrad)
        found = re.search(r":\n\n((?: {4,}.*\n|\n)+)", inspect.cleandoc(function.__doc__ or ""))
        assert found, f"{name} has no example"
        compile(textwrap.dedent(found[1]), name, "exec")


def test_the_readme_is_short_and_counts_programs_as_their_page_does() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme) < 5_000
    said = r"\[(\d+) programs.* wrong in (\d+) and hangs or crashes in (\d+); shardgrad in none"
    found = re.search(said, " ".join(readme.split()))
    page = (ROOT / "docs/explanation/right_where_others_are_wrong.md").read_text(encoding="utf-8")
    row = (
        r"right \|.*^\| torch \| (\d+) .*^\| FSDP2(?: \| \d+){3} \| (\d+) \| (\d+) .*^\| shardgrad"
    )
    counted = re.search(row + r"(?: \| \d+){3} \| 0 \| 0 ", page, flags=re.DOTALL | re.MULTILINE)
    assert found
    assert counted
    assert found.groups() == counted.groups()


def test_the_readme_example_trains_on_two_ranks_as_printed(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^ *```python\n(.*?)^ *```", readme, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "example.py").write_text(example, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    done = run(
        [*torchrun, "--standalone", "--nproc-per-node", "2", "example.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout_s=110,
    )
    assert done.returncode == 0, done.stderr
    printed = re.findall(r"^step \d+: loss ([\d.]+)", done.stdout, flags=re.MULTILINE)
    losses = [float(loss) for loss in printed]
    assert len(losses) == 10, done.stdout
    assert losses[-1] < losses[0]


# A command in prose, code or a block, to the end of its line or of what quotes it.
NAMED_COMMAND = re.compile(r"\bshardgrad ((?:checkpoint )?[a-z]+)((?: +[^\s`;|>#()]+)*)")
TEXTS = [*PAGES, *(ROOT / "shardgrad").rglob("*.py"), *(ROOT / "examples").rglob("*.*")]


@functools.cache
def help_of(command: str) -> str:
    """Returns what `--help` prints, "" if there is no such command."""
    words = [sys.executable, "-m", "shardgrad", *command.split(), "--help"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = run(words, env=environment, timeout_s=60)
    return str(done.stdout) if done.returncode == 0 else ""


def test_options_that_pages_and_messages_name_are_those_of_the_commands() -> None:
    seen = 0
    for path in TEXTS:
        if path == HISTORY:
            continue
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        text = re.sub(r'make train ARGS="([^"]*)"', r"shardgrad train \1 ;", text)
        for command, rest in NAMED_COMMAND.findall(text):
            for flag in re.findall(r"(?<=\s)--[a-z][a-z-]*", rest):
                assert re.search(rf"{flag}\b", help_of(command)), (path, command, flag)
                seen += 1
    assert seen > 50


def test_modules_and_targets_that_commands_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, flags=re.MULTILINE))
    seen = set()
    for path in TEXTS:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for module, first in re.findall(
            r"(?:python|torchrun.*|launch.*) -m ([a-z_.]*[a-z])(?: +([a-z_]+))?", text
        ):
            assert importlib.util.find_spec(module) is not None, (path, module)
            if module == "benchmarks" and first and "`" not in first:
                assert first in (*BENCHMARKS, *_RECORDS, "all"), (path, first)
            seen.add(module)
        for target in re.findall(
            r"(?:^|`)make ([a-z0-9-]+)(?:`| *$|  | [A-Z])", text, flags=re.MULTILINE
        ):
            assert target in targets, (path, target)
    assert {"benchmarks", "shardgrad", "shardgrad.patch"} <= seen


def test_files_that_pages_name_exist() -> None:
    """`engine/unit.py` is below the package, `tests/...` below the root, others next to the
    page.
    """
    for page in PAGES:
        if page == HISTORY:
            continue
        for name in re.findall(
            r"`([\w.]+(?:/[\w.]+)+\.(?:py|cpp|cu|h|sh)|\w+(?:/\w+)+/)`", prose(page)
        ):
            places = (ROOT / name, ROOT / "shardgrad" / name, page.parent / name)
            assert any(place.exists() for place in places), f"{named(page)} names {name}"


def test_functions_that_pages_name_are_in_their_files() -> None:
    """Where a page says "`engine/unit.py`: `pre_forward`"."""
    for page in PAGES:
        for file, name in re.findall(
            r"`([\w/]+/\w+\.py)`(?:: |, )`(?:\w+\.)*(\w+)(?:\(\))?`", prose(page)
        ):
            path = (
                ROOT / "shardgrad" / file if (ROOT / "shardgrad" / file).exists() else ROOT / file
            )
            text = path.read_text(encoding="utf-8")
            assert re.search(
                rf"\b(def|class) {name}\b|^\s*{name}\b.*=", text, flags=re.MULTILINE
            ), f"{named(page)}: {name} is not in {file}"


def test_every_test_that_a_page_names_exists() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    for page in PAGES:
        for name in re.findall(r"`(test_\w+)`", prose(page)):
            assert f"def {name}(" in tests, f"{named(page)} names {name}"


def said_to_users(path: Path) -> list[str]:
    """Returns the texts of a file that a user may see: all but docstrings, which are help texts of
    commands alone.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    shown = [node for node in constants if id(node) not in bare or path.parent.name == "cli"]
    return [node.value for node in shown if isinstance(node.value, str)]


def test_errors_and_help_texts_name_no_page_that_a_wheel_lacks() -> None:
    for path in (ROOT / "shardgrad").rglob("*.py"):
        for text in said_to_users(path):
            assert "docs/" not in text, f"{named(path)} says {text!r}"


def test_pages_that_code_names_exist() -> None:
    for path in CODE:
        for name in re.findall(r"docs/[\w/]+\.\w+", path.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{named(path)} names {name}"


def test_every_folder_and_every_file_of_the_engine_is_in_the_architecture() -> None:
    page = (ROOT / "docs/design/architecture.md").read_text(encoding="utf-8")
    package = ROOT / "shardgrad"
    folders = [f"{init.parent.name}/" for init in package.glob("*/__init__.py")]
    files = [path.name for path in package.glob("*.py") if not path.name.startswith("__")]
    engine = [
        f"engine/{path.name}" for path in package.glob("engine/*.py") if path.name != "__init__.py"
    ]
    for name in (*folders, *files, *engine):
        assert f"`{name}`" in page, f"docs/design/architecture.md does not say what {name} is for"


@pytest.mark.parametrize("page", [page for page in PAGES if page != HISTORY], ids=named)
def test_pages_are_written_plainly(page: Path) -> None:
    found = re.findall(
        r"\b(?:nobody|somebody|everybody|whoever|whom|anew)\b", prose(page), flags=re.IGNORECASE
    )
    assert not found, f"{named(page)} says {found}"
