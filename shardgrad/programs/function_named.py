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
        OptionError: the module cannot be imported or has no such function, or the function has
            arguments that have to be given.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` would
    module, _, name = target.partition(":")
    try:
        function: Callable[[], Any] = getattr(importlib.import_module(module), name)
        inspect.signature(function).bind()
    except (Exception, SystemExit) as error:  # SystemExit: of a program that runs when imported
        raise OptionError(
            f"{flag} {target} does not name a function without arguments",
            expected="module:function, in a module that is installed or in this directory",
            got=f"{type(error).__name__}: {error}",
            fix=f"{flag} train:build, where python -c 'import train' works",
        ) from error
    return function
