"""Every file, option and variable that the command line reads has a target of the fuzzer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import shardgrad
from shardgrad.cli import main
from tests.fuzz.commands import commands, values_of, words_of
from tests.fuzz.runs import ENVIRONMENT
from tests.fuzz.targets import TARGETS

PACKAGE = Path(shardgrad.__file__).parent

# Functions that open files, and the target that feeds what they read; "" where nothing of another
# program is read, with the reason.
OPENING = {
    "open",
    "read_text",
    "read_bytes",
    "content_of",
    "open_plain",
    "read_regular",
    "import_module",
}
DOORS = {
    "checkpoint/files.py open_plain": "files",
    "checkpoint/files.py content_of": "files",
    "checkpoint/files.py sync": "",  # syncs
    "checkpoint/files.py write_synced": "",  # writes
    "checkpoint/folder.py Series._named": "latest",
    "checkpoint/lock.py FileLock.__init__": "lock",
    "checkpoint/manifest.py check": "files",
    "checkpoint/manifest.py read": "manifest",
    "checkpoint/metadata.py read_metadata": "list of contents of torch",
    "checkpoint/safetensors.py _write": "",  # a package, and writes
    "explain/traces.py _events": "trace",
    "cli/plan.py _check_file": "",  # writes
    "cli/reporting.py _exit": "",  # /dev/null
    "plan/measuring.py _check_memory": "",  # the system's
    "function_named.py function_named": "plan",  # and doctor
    "train/config.py read_settings": "file of settings",
    "train/config.py read_regular": "file of settings",
    "train/config.py read_text": "file of settings",
    "train/model_types.py _classes_of": "",  # code of transformers
    "train/model_types.py _tables_of_types": "",  # tables of transformers
    "train/model_types.py _with_bases": "",  # code of transformers
    "train/model_types.py settings_in": "configuration of transformers",
    "train/corpus.py _read": "text to train on",
    "train/launch.py _step_of_latest": "latest",
    "train/loop.py _train": "",  # a run, not a file
    "train/parallel.py memory_nbytes": "",  # the system's
    "train/record.py RunRecord.write": "",  # writes
    "train/record.py _read_events": "metrics",
    "train/stop.py leave_terminal": "",  # /dev/null
    # Modules of this package and of named ones, by names that are written there.
    "__init__.py __getattr__": "",
    "cli/command.py LazyGroup.get_command": "",
    "integrations/__init__.py __getattr__": "",
    "integrations/__init__.py availability": "",
    "integrations/probe.py load": "",
    "train/sinks.py _TensorBoard.__init__": "",
    "train/sinks.py _WeightsAndBiases.__init__": "",
    "train/accelerators.py may_see_accelerator": "",  # torch's own
    "version.py commit": "",  # written when this package was built
}
# Functions that read text that others have read.
PARSERS = {
    "checkpoint/lock.py FileLock._lock": "lock",
    "checkpoint/manifest.py read": "manifest as text",
    "cli/train.py key_and_value": "train",
    "explain/traces.py _events": "trace",
    "train/config.py read_settings": "file of settings",
    "train/model_types.py settings_in": "configuration of transformers",
    "train/record.py _event": "metrics",
    "diagnosis/all_gather_object.py all_gather_object": "",  # ranks trust each other
    "diagnosis/rank_status.py RankStatus.from_json": "",  # ranks trust each other
    "diagnosis/waiting_ranks.py Post.from_json": "",  # ranks trust each other
    "train/rank.py _keep": "",  # its own text
}
# Functions that read variables by names in a table, which `ENVIRONMENT` repeats.
TABLES = {"graphs/preflight/environment.py", "sharding/mesh.py", "train/launcher.py"}


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields every function of the package that lies in no other, with its file and name."""

    def below(node: ast.AST, place: str, name: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                yield f"{place} {name}{child.name}", child
            else:
                yield from below(
                    child, place, f"{child.name}." if isinstance(child, ast.ClassDef) else name
                )

    for path in sorted(PACKAGE.rglob("*.py")):
        yield from below(ast.parse(path.read_text()), str(path.relative_to(PACKAGE)), "")


def callers_of(names: set[str]) -> set[str]:
    def called(node: ast.AST) -> str:
        if not isinstance(node, ast.Call):
            return ""
        return str(getattr(node.func, "attr", getattr(node.func, "id", "")))

    return {
        where
        for where, body in functions()
        if any(called(node) in names for node in ast.walk(body))
    }


def test_every_function_that_opens_a_file_has_a_target() -> None:
    assert callers_of(OPENING) == set(DOORS)
    assert set(DOORS.values()) <= {"", *TARGETS}


def test_every_function_that_parses_text_has_a_target() -> None:
    assert callers_of({"loads"}) == set(PARSERS)
    assert set(PARSERS.values()) <= {"", *TARGETS}


@pytest.mark.parametrize("words", [words for words, _ in commands(main)], ids=" ".join)
def test_every_option_of_every_command_is_fed(words: tuple[str, ...]) -> None:
    command = dict(commands(main))[words]
    assert " ".join(words) in TARGETS
    for param in command.params:
        if isinstance(param, click.Option):
            words_of(param)  # refuses an option whose text it does not know


def test_an_option_that_takes_text_and_is_new_has_no_values_until_it_is_given_some() -> None:
    with pytest.raises(KeyError, match="--new"):
        values_of(click.Option(["--new"]))


def variables_in(path: Path) -> Iterator[str]:
    """Yields the names of the variables that a file reads; "" for one that is not written there."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Subscript) and _is_environment(node.value):
            yield _name(node.slice)
        elif isinstance(node, ast.Call) and _is_environment(getattr(node.func, "value", None)):
            yield _name(node.args[0])
        elif isinstance(node, ast.Compare) and any(map(_is_environment, node.comparators)):
            yield _name(node.left)


def _is_environment(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def _name(node: ast.AST) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""


def test_every_variable_of_the_environment_is_fed() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        where = str(path.relative_to(PACKAGE))
        found = set(variables_in(path))
        assert found <= {*ENVIRONMENT, *([""] if where in TABLES else [])}, where
        assert "getenv" not in path.read_text(), f"{where}: os.environ, which this test reads"
    assert {name for where in TABLES for name in capitals_in(PACKAGE / where)} <= set(ENVIRONMENT)


def capitals_in(path: Path) -> Iterator[str]:
    """Yields the texts in a file that are names of variables."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and re.fullmatch("[A-Z]+(_[A-Z]+)+", str(node.value)):
            yield str(node.value)
