"""Options of a command from the settings of dataclasses."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable, Iterator
from typing import Any

import click

from shardgrad.programs.train.failure import UsageError
from shardgrad.programs.train.presets import Scalar
from shardgrad.programs.train.settings import flag_of, kind_of

_Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def _settings_of(*classes: type) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    """Yields the settings of dataclasses, with their types."""
    for each in classes:
        kinds = typing.get_type_hints(each)
        for one in dataclasses.fields(each):
            if one.metadata:
                yield one, kind_of(kinds[one.name])


def options_of(*classes: type) -> _Decorator:
    """Returns a decorator that adds one option to a command for each setting; one that was not
    given is None, or ().
    """

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for one, kind in reversed(list(_settings_of(*classes))):
            command = _option(one, kind)(command)
        return command

    return add


def sections_of(*classes: type) -> dict[str, tuple[str, ...]]:
    """Returns the names of the settings by the sections of the help."""
    sections: dict[str, tuple[str, ...]] = {}
    title = ""
    for one, _ in _settings_of(*classes):
        title = one.metadata["section"] or title
        sections[title] = (*sections.get(title, ()), one.name)
    return sections


def given_for(cls: type, flags: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a dataclass's settings that were given on the command line.

    Raises:
        UsageError: an option that is KEY=VALUE is something else.
    """
    given = {}
    for one, kind in _settings_of(cls):
        value = flags[one.name]
        if value not in (None, ()):
            is_table = kind is dict
            given[one.name] = dict(map(_key_and_value, value)) if is_table else value
    return given


def _option(one: dataclasses.Field[Any], kind: Any) -> _Decorator:
    flag, words = flag_of(one), one.metadata["help"]
    if kind is bool:
        declaration = f"--no-{flag[2:]}" if one.default else flag
        return click.option(
            declaration, one.name, flag_value=not one.default, default=None, help=words
        )
    if kind in (dict, tuple):
        metavar = "KEY=VALUE" if kind is dict else "NAME"
        return click.option(flag, one.name, multiple=True, metavar=metavar, help=words)
    if one.default not in (None, dataclasses.MISSING) and "[default" not in words:
        words += f"  [default: {one.default}]"
    choices = one.metadata["choices"]

    bare: dict[str, Any] = {}
    if one.metadata["bare"] is not None:
        bare = {"is_flag": False, "flag_value": one.metadata["bare"]}
    return click.option(
        flag,
        one.name,
        type=kind,
        default=None,
        **bare,
        # Not click.Choice: values from files are checked as well, in the same words.
        metavar="|".join(choices) if choices else None,
        help=words,
    )


def _key_and_value(text: str) -> tuple[str, Scalar]:
    """Parses `layers=2` into ("layers", 2); a value that is not a number or true/false is text."""
    key, sign, value = text.partition("=")
    if not (key and sign and value):
        raise UsageError(
            f"--override {text} is not KEY=VALUE: write, for example, --override layers=2."
        )
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = value
    return key, parsed if isinstance(parsed, bool | int | float) else value
