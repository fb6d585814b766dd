"""The program's line that is running, and the module whose forward it is in."""

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

__all__ = ["SourceLocation", "current_location", "is_of_the_program"]


@dataclass(frozen=True)
class SourceLocation:
    """Where a thread is.

    Attributes:
        line: "file.py:12 in function", the innermost line of the user's program; "" if there is
            none.
        module: name of the innermost running module; "" if there is none.
        is_engine: True if this package acts on its own initiative there, such as in a hook.
    """

    line: str
    module: str
    is_engine: bool


class _Owner(Enum):
    """Whose a source file is."""

    USER = auto()
    ENGINE = auto()
    LIBRARY = auto()


_PREFLIGHT = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_STANDARD = sysconfig.get_path("stdlib")
_PACKAGE = Path(__file__).parents[2]
# They read the device only if the caller asks for it, so the caller is the location.
_ON_REQUEST = tuple(str(_PACKAGE / "optim" / name) for name in ("clip.py", "grad_scaler.py"))
_PROGRAMS = tuple(str(_PACKAGE / name) for name in ("training", "train", "cli"))
# Made by a compiler; the line that called it is the location.
_GENERATED = ("<frozen ", "<eval_with_key>", "<__array_function__")


@cache
def _owner(file: str) -> _Owner:
    if file.startswith((_TORCH, *_GENERATED, *_ON_REQUEST)) or "torchinductor_" in file:
        return _Owner.LIBRARY
    if file.startswith(_STANDARD) and "-packages" not in file:
        return _Owner.LIBRARY
    if file.startswith(str(_PACKAGE)) and not file.startswith(_PROGRAMS):
        return _Owner.ENGINE
    return _Owner.USER


def is_of_the_program(file: str) -> bool:
    """Returns whether a source file is neither Python's, nor torch's, nor of this package."""
    return _owner(file) is _Owner.USER


def current_location(names: Mapping[int, str]) -> SourceLocation:
    """Returns where the calling thread is.

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
        if not code.co_filename.startswith(_PREFLIGHT):
            owner = _owner(code.co_filename)
            if owner is not _Owner.LIBRARY:
                innermost = innermost or owner
                if owner is _Owner.USER and not line:
                    line = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return SourceLocation(line, module, innermost is _Owner.ENGINE)
