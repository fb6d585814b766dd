"""Command lines, generated from click's own list of commands and options."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import click
from click.testing import CliRunner
from hypothesis import strategies as st

from shardgrad.programs.checkpoint import Series
from shardgrad.programs.cli import main
from shardgrad.programs.function_named import function_named
from shardgrad.programs.plan.request import Request
from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.failure import TrainingError, explain
from shardgrad.programs.train.texts import read_text
from tests.fuzz.checkpoints import samples
from tests.fuzz.inputs import ODD_TEXTS, Target, scratch
from tests.fuzz.runs import VARIABLES

# The system passes on no null characters.
WORDS = ODD_TEXTS.map(lambda text: text.replace("\0", "0"))
NUMBERS = st.one_of(
    st.integers(-2, 9).map(str),
    st.integers(-(10**6), 10**6).map(str),
    st.floats().map(str),
    st.sampled_from(
        ["nan", "inf", "-inf", "-0.0", "1e400", "9" * 5000, "9" * 30, "", "x", str(2**62)]
    ),
)
# Paths in the folder that commands are called in, and others.
PATHS = st.one_of(
    st.sampled_from(
        ["ours", "torch", "damaged", "run", "runs", "new", "missing", ".", "/dev/null", "pipe"]
    ),
    st.sampled_from(["run/config.json", "settings.json", "text", "/dev/zero", "x" * 300]),
    WORDS,
)
MESHES = st.one_of(
    st.sampled_from(["2", "2x2", "4x16", "1x1", "0x2", "2x2x2", "x", "²x2"]), NUMBERS
)
FUNCTIONS = st.one_of(
    st.sampled_from(
        ["json:loads", "json:nothing", "nothing:f", "json", ":", ".a:b", "a b:c", "..:x"]
    ),
    WORDS,
)
# What is given to an option that takes text; one that is not here has choices, a number or no
# value.
TEXTS = {
    "--audit": FUNCTIONS,
    "--data": PATHS,
    "--mesh": MESHES,
    "--model": FUNCTIONS,
    "--only": st.one_of(st.sampled_from(["model", "w", "groups", "/", "."]), WORDS),
    "--resume": PATHS,
    "--run-dir": PATHS,
}


def commands(
    group: click.Group, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yields every command that is no group, with the words that name it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, name
        if isinstance(command, click.Group):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command


def values_of(option: click.Option) -> st.SearchStrategy[str] | None:
    """Returns what is given to an option, right and wrong; None if it takes no value.

    Raises:
        KeyError: it takes text, and is not in `TEXTS`.
    """
    if option.is_flag:
        return None
    if isinstance(option.type, click.types.IntParamType | click.types.FloatParamType):
        return NUMBERS
    choices = list(option.type.choices) if isinstance(option.type, click.Choice) else []
    if choices:
        return st.one_of(st.sampled_from(choices), WORDS)
    return TEXTS[option.opts[0]]


def words_of(option: click.Option) -> st.SearchStrategy[list[str]]:
    """Returns an option on a command line, sometimes with its value in one word or left out."""
    names, values = st.sampled_from([*option.opts, *option.secondary_opts]), values_of(option)
    if values is None:
        return names.map(lambda name: [name])
    return st.one_of(
        st.tuples(names, values).map(list),
        st.tuples(names, values).map(lambda pair: ["=".join(pair)]),
        names.map(lambda name: [name]),
    )


@cache
def lines_of(words: tuple[str, ...]) -> st.SearchStrategy[list[str]]:
    """Returns command lines of a command: a few of its options, its arguments, and what does not
    belong.
    """
    command = dict(commands(main))[words]
    options = [words_of(param) for param in command.params if isinstance(param, click.Option)]
    arguments = [PATHS for param in command.params if isinstance(param, click.Argument)]
    parts = st.lists(st.one_of(*options, WORDS.map(lambda text: [text])), max_size=4)
    return st.tuples(st.tuples(*arguments), parts).map(
        lambda both: [*words, *both[0], *(w for part in both[1] for w in part)]
    )


@cache
def _workplace() -> Path:
    """Returns the folder that commands are called in."""
    folder = scratch() / "workplace"
    folder.mkdir()
    for kind in ("ours", "torch"):
        (folder / kind).symlink_to(samples() / kind)
    shutil.copytree(samples() / "ours", folder / "damaged")
    (folder / "damaged" / "manifest.json").write_text("{}")
    (folder / "text").write_bytes(bytes(range(256)) * 40)
    (folder / "settings.json").write_text('{"batch_size": 2, "preset": "tiny"}')
    os.mkfifo(folder / "pipe")
    for run in (folder / "run", folder / "runs" / "first"):
        (run / "checkpoints").mkdir(parents=True)
        config = dataclasses.asdict(TrainConfig(ranks=2, run_dir=str(run)))
        (run / "config.json").write_text(json.dumps(config))
        (run / "checkpoints" / "step_000004").symlink_to(samples() / "ours")
        (run / "checkpoints" / "latest").write_text("step_000004\n")
    return folder


def _read_as_ranks_do(config: TrainConfig, **_: bool) -> int:
    """Reads what a rank reads before its first step, in this process; returns its exit status."""
    try:
        Series(config.folder / "checkpoints").latest()
        if config.data is not None:
            read_text(config.data, seq_len=config.seq_len)
    except TrainingError as error:
        return error.exit_status
    except OSError as error:
        return explain(error).exit_status
    return 0


def _made_sense(request: Request, *_: Any, **__: Any) -> None:
    if request.model is not None:
        function_named(request.model, flag="--model")
    raise TrainingError("made sense")


def call(words: list[str], variables: dict[str, str]) -> str:
    """Calls a command line in the workplace, where what takes seconds or starts processes is left
    out.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, variables))
        stack.enter_context(
            mock.patch("shardgrad.programs.train.launch.launch_ranks", _read_as_ranks_do)
        )
        stack.enter_context(
            mock.patch("shardgrad.programs.audit.audit._run", return_value=([], "left out"))
        )
        stack.enter_context(mock.patch("shardgrad.programs.plan.rehearsal.rehearse", _made_sense))
        stack.enter_context(warnings.catch_warnings())
        before = os.getcwd()
        os.chdir(_workplace())
        try:
            result = CliRunner().invoke(main, words)
        finally:
            os.chdir(before)
            for name in set(os.listdir(_workplace())) - _kept():
                path = _workplace() / name
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    # click repeats what was typed as it is.
    assert "\x1b" not in result.output or any("\x1b" in word for word in words)
    assert "Traceback" not in result.output, result.output
    return f"exit status {result.exit_code}"


@cache
def _kept() -> frozenset[str]:
    return frozenset(os.listdir(_workplace()))


TARGETS = {
    " ".join(words): Target(
        st.tuples(lines_of(words), st.one_of(st.just({}), VARIABLES)), lambda case: call(*case)
    )
    for words, _ in commands(main)
}
