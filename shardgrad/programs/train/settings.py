"""Fields of a dataclass that are settings, each of which is an option of a command.

click's types check the values, those of files too, which are read as on a command line. This module
does not import PyTorch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import click

_Decorator = Callable[[Callable[..., None]], Callable[..., None]]


class Text(click.types.StringParamType):
    """A text that may be a path."""

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        """Returns the text; refuses one that a shell gives for an unknown variable, and one that no
        path may have.
        """
        if not value or "\0" in value:
            self.fail(f"{value!r} is empty or contains a null character: correct it.", param, ctx)
        return str(value)


class Whole(click.IntRange):
    """A whole number that torch can count with."""

    name = "integer"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Returns the number."""
        number: int = super().convert(value, param, ctx)
        if number >= 2**63:
            self.fail("it needs more than 63 bits: give a smaller number.", param, ctx)
        return number


class Number(click.FloatRange):
    """A finite number."""

    name = "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Returns the number."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def setting(
    default: Any,
    words: str,
    kind: Any = Text(),  # noqa: B008  # it has no state
) -> Any:
    """Declares a field of a dataclass as a setting, whose option has the field's name with dashes.

    Args:
        default: its value if it is not given; a boolean is a switch.
        words: help.
        kind: click's type of its values.
    """
    return dataclasses.field(default=default, metadata={"help": words, "kind": kind})


def converted(one: dataclasses.Field[Any], value: object) -> Any:
    """Returns the value of a setting that is no text yet, or that a file has.

    Raises:
        ValueError: it makes no sense.
    """
    kind = click.BOOL if isinstance(one.default, bool) else one.metadata["kind"]
    try:
        return kind.convert(str(value), None, None)
    except click.BadParameter as error:
        raise ValueError(f"{one.name}: {error.message}") from None


def options_of(*classes: Any) -> _Decorator:
    """Returns a decorator that adds one option to a command for each setting of dataclasses; one
    that was not given is None.
    """

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for each in reversed(classes):
            for one in reversed(dataclasses.fields(each)):
                command = _option(one)(command)
        return command

    return add


def given_for(cls: Any, flags: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a dataclass's settings that were given on the command line."""
    names = (one.name for one in dataclasses.fields(cls))
    return {name: flags[name] for name in names if flags[name] is not None}


def _option(one: dataclasses.Field[Any]) -> _Decorator:
    default, words, kind = one.default, one.metadata["help"], one.metadata["kind"]
    flag = "--" + one.name.replace("_", "-")
    if isinstance(default, bool):
        switch = f"--no-{flag[2:]}" if default else flag
        return click.option(switch, one.name, flag_value=not default, default=None, help=words)
    if default is not None and "[default" not in words:
        words += f"  [default: {default}]"
    return click.option(flag, one.name, type=kind, default=None, help=words)
