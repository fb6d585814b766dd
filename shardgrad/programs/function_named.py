"""A function of the user's program, named on the command line. Imports nothing of torch."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from shardgrad.errors import OptionError


def function_named(target: str, *, flag: str) -> Callable[[], Any]:
    """Imports a module, from the current directory too, and returns a function of it that takes no
    arguments.

    Args:
        target: `module:function`.
        flag: the option in which it was named, such as `--model`.

    Raises:
        OptionError: it is named otherwise, the module cannot be imported or has no such function,
            or the function has arguments that have to be given.
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise OptionError(
            f"{flag} {target} is not module:function",
            expected="a module in this directory or installed, and a function of it",
            fix=f"{flag} train:build",
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` would
    try:
        module = importlib.import_module(module_name)
    except (
        Exception,
        SystemExit,
    ) as error:  # a program without `if __name__ == "__main__"` may exit
        raise OptionError(
            f"importing {module_name} failed",
            got=f"{type(error).__name__}: {error}",
            where=f"{flag} {target}",
            fix=f"python -c 'import {module_name}' in this directory",
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = (each for each, value in vars(module).items() if inspect.isfunction(value))
        known = [each for each in functions if not each.startswith("_")]
        raise OptionError(
            f"module {module_name} has no function {name}",
            got=f"of type {type(function).__name__}",
            where=str(getattr(module, "__file__", module_name)),
            fix=f"one of {', '.join(known[:8])}" if known else "define it",
        )
    if inspect.isfunction(function):  # of others the signature may not be known
        signature = inspect.signature(function)
        try:
            signature.bind()
        except TypeError as error:
            raise OptionError(
                f"{flag} {target}: the function is called without arguments",
                got=f"{name}{signature}",
                where=str(getattr(module, "__file__", module_name)),
                fix="a function without arguments that calls it",
            ) from error
    return function  # type: ignore[no-any-return]
