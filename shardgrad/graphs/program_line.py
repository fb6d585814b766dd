"""Finds where in the program an error was raised: the line, and the module that was running."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
from torch import nn

TORCH = str(Path(torch.__file__).parent)
# File names of generated code, which is not the program's.
_GENERATED = ("<frozen ", "<eval_with_key>", "<__array_function__")
# Files under these paths are not the program's. A simulated device adds its own.
LIBRARIES = [TORCH, str(Path(__file__).parents[1]), *_GENERATED]


@cache
def is_of_the_program(file: str) -> bool:
    """Returns whether a source file is neither of Python, nor of torch, nor of this package."""
    if file.startswith(tuple(LIBRARIES)) or "torchinductor_" in file:
        return False
    return not file.startswith(sysconfig.get_path("stdlib")) or "-packages" in file


def line_that_raised(error: BaseException, modules: Iterable[nn.Module]) -> str:
    """Returns the innermost line of the program that an error passed through, with its module.

    Args:
        error: the error that was caught.
        modules: the root modules under which to look for the module's name.

    Returns:
        For example "module net.1, model.py:25 in forward: if loss.item() > 3:"; "" if the error
        passed through no line of the program.
    """
    names = {
        id(module): name or type(root).__name__
        for root in modules
        for name, module in root.named_modules()
    }
    line = module = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        # Every module call passes through `_call_impl`, whatever the class and its hooks.
        if code is nn.Module._call_impl.__code__:
            module = names.get(id(frame.f_locals["self"]), module)
        elif is_of_the_program(code.co_filename):
            text = linecache.getline(code.co_filename, number).strip()
            line = f"{code.co_filename}:{number} in {code.co_name}: {text}"
    return ", ".join(filter(None, (module and f"module {module}", line)))
