"""Fields of a dataclass that are settings: their help, their limits, and the check of their values.

Values come from the command line, from files and from programs; all are checked here, in one place.
`shardgrad.programs.cli.options` makes options from them. This module does not import PyTorch.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import field
from difflib import get_close_matches
from typing import Any

from shardgrad.programs.train.failure import UsageError

_LARGEST = 2**63 - 1  # of any integer, as torch counts
_WORDS: dict[Any, str] = {
    **{int: "a whole number", float: "a number", bool: "true or false", str: "a text"},
    **{dict: "names and values", tuple: "a list"},
}


def setting(
    default: Any | Callable[[], Any],
    words: str,
    *,
    choices: typing.Iterable[str] = (),
    least: float | None = None,
    most: float | None = None,
    bare: str | None = None,
    flag: str | None = None,
    section: str = "",
) -> Any:
    """Declares a field of a dataclass as a setting.

    Args:
        default: its value if it is not given; a class is called for each instance.
        words: help.
        choices: the texts that it can be; any, if there are none.
        least: smallest number.
        most: largest number.
        bare: the value of the option without one.
        flag: the option; the field's name with dashes, if it is not given.
        section: of the help, which begins with this field.
    """
    facts = {
        **{"help": words, "choices": tuple(choices), "least": least, "most": most},
        **{"bare": bare, "flag": flag, "section": section},
    }
    if isinstance(default, type):
        return field(default_factory=default, metadata=facts)
    return field(default=default, metadata=facts)


def flag_of(one: dataclasses.Field[Any]) -> str:
    """Returns the option of a setting."""
    return str(one.metadata.get("flag") or "--" + one.name.replace("_", "-"))


def check(settings: Any, *, of: str = "") -> None:
    """Checks the values of a dataclass's settings; whole numbers become floats where those are
    meant.

    Args:
        settings: the dataclass's instance, which is changed.
        of: what errors say before a field's name, instead of calling it by its option.

    Raises:
        UsageError: a value has another type, is none of the choices, or is beyond a limit.
    """
    kinds = typing.get_type_hints(type(settings))
    for one in dataclasses.fields(settings):
        value = getattr(settings, one.name)
        if not one.metadata or (value is None and type(None) in typing.get_args(kinds[one.name])):
            continue
        what = of + one.name if of else flag_of(one)
        value = _of_kind(what, value, kind_of(kinds[one.name]))
        _check_limits(what, one.metadata, value)
        object.__setattr__(settings, one.name, value)


def kind_of(hint: Any) -> Any:
    """Returns the class of a setting's values, besides None."""
    hint = next(
        (each for each in typing.get_args(hint) if type(None) in typing.get_args(hint)), hint
    )
    return typing.get_origin(hint) or hint


def _of_kind(what: str, value: Any, kind: Any) -> Any:
    if kind is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            raise UsageError(
                f"{what} is a number of {value.bit_length()} bits: give a smaller one."
            ) from None
    if type(value) is not kind:
        raise UsageError(f"{what} needs {_WORDS[kind]}, not {value!r:.100}.")
    if kind is str and not value:  # as of a variable that the shell does not know
        raise UsageError(f"{what} is empty: give a value, or leave it out.")
    if kind is str and "\0" in value:  # which no path may have
        raise UsageError(f"{what} has a null character: leave it out.")
    if kind is float and not math.isfinite(value):
        raise UsageError(f"{what} is {value}: give a finite number.")
    if kind is int and abs(value) > _LARGEST:
        raise UsageError(
            f"{what} is a number of {value.bit_length()} bits: give one of at most 63."
        )
    return value


def _check_limits(what: str, facts: Mapping[str, Any], value: Any) -> None:
    if facts["choices"] and value not in facts["choices"]:
        alike = get_close_matches(value, facts["choices"], n=1, cutoff=0.75)
        hint = f": did you mean {alike[0]!r}?" if alike else "."
        raise UsageError(f"{what} can be {', '.join(facts['choices'])}, not {value!r}{hint}")
    if facts["least"] is not None and not value >= facts["least"]:
        raise UsageError(f"{what} is {value}: give at least {facts['least']}.")
    if facts["most"] is not None and not value <= facts["most"]:
        raise UsageError(f"{what} is {value}: give at most {facts['most']}.")
