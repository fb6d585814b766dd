"""Who is running right now: the user's line, and the module whose forward it is in."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from pathlib import Path

import torch
from torch import nn

__all__ = ["Place", "here"]


@dataclass(frozen=True)
class Place:
    """A moment of a program.

    Attributes:
        line: "file.py:12 in function", the innermost line of the user's own; "" if there is none.
        module: name of the innermost running module; "" if there is none.
        is_engine: True if this package does something of its own accord there, such as a hook.
    """

    line: str
    module: str
    is_engine: bool


class _Owner(Enum):
    """Whose a source file is."""

    USER = auto()
    ENGINE = auto()
    LIBRARY = auto()


# Those who look do not count.
_LOOKING = (__file__, str(Path(__file__).with_name("preflight.py")))
_TORCH = str(Path(torch.__file__).parent)
_STANDARD = sysconfig.get_path("stdlib")
_PACKAGE = Path(__file__).parents[1]
# They read the device only if they were told to, so whoever called them does; and these are programs.
_ASKED = tuple(str(_PACKAGE / name) for name in ("clip.py", "grad_scaler.py"))
_PROGRAMS = tuple(str(_PACKAGE / name) for name in ("training", "cli"))
# Made by a compiler; the line that called it is the one to look at.
_GENERATED = ("<frozen ", "<eval_with_key>", "<__array_function__")


@cache
def _owner(file: str) -> _Owner:
    if file.startswith((_TORCH, *_GENERATED, *_ASKED)) or "torchinductor_" in file:
        return _Owner.LIBRARY
    if file.startswith(_STANDARD) and "-packages" not in file:
        return _Owner.LIBRARY
    if file.startswith(str(_PACKAGE)) and not file.startswith(_PROGRAMS):
        return _Owner.ENGINE
    return _Owner.USER


def here(names: Mapping[int, str]) -> Place:
    """Returns where the caller's thread is.

    Args:
        names: of modules, by `id`.
    """
    line = module = ""
    innermost: _Owner | None = None
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # Every call of a module passes through this function, whatever its class and hooks.
        if not module and code is nn.Module._call_impl.__code__:
            module = names.get(id(frame.f_locals["self"]), "")
        if code.co_filename not in _LOOKING:
            owner = _owner(code.co_filename)
            if owner is not _Owner.LIBRARY:
                innermost = innermost or owner
                if owner is _Owner.USER and not line:
                    line = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return Place(line, module, innermost is _Owner.ENGINE)
