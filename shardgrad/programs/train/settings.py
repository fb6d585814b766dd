"""Fields of a dataclass that are settings, each of which is an option of a command.

click's types check the values, those of files too, which are read as on a command line. This module
does not import PyTorch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import click


def whole(least: int, most: int = 10**12) -> click.IntRange:
    """Returns the type of a whole number that torch can count with."""
    return click.IntRange(least, most)


class Number(click.FloatRange):
    """A finite number."""

    name = "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Returns the number."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def setting(default: Any, words: str, kind: Any = click.STRING) -> Any:
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


def options_of(*classes: Any) -> list[click.Parameter]:
    """Returns an option of a command for each setting of dataclasses; one that was not given is
    None.
    """
    return [_option(one) for each in classes for one in dataclasses.fields(each)]


def given_for(cls: Any, flags: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a dataclass's settings that were given on the command line."""
    names = (one.name for one in dataclasses.fields(cls))
    return {name: flags[name] for name in names if flags[name] is not None}


def _option(one: dataclasses.Field[Any]) -> click.Option:
    default, words, kind = one.default, one.metadata["help"], one.metadata["kind"]
    flag = "--" + one.name.replace("_", "-")
    if isinstance(default, bool):
        switch = f"--no-{flag[2:]}" if default else flag
        return click.Option([switch, one.name], flag_value=not default, default=None, help=words)
    if default is not None and "[default" not in words:
        words += f"  [default: {default}]"
    return click.Option([flag, one.name], type=kind, default=None, help=words)
