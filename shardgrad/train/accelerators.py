"""Whether PyTorch may see an accelerator here, found out without its import, which takes
seconds.
"""

from __future__ import annotations

import ctypes
import re
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from shardgrad.train.failure import UsageError

__all__ = ["NO_ACCELERATOR", "may_see_accelerator", "require_accelerator"]

NO_ACCELERATOR = "PyTorch sees no accelerator here: use --device cpu, or install PyTorch for yours."

_BUILT_FOR = re.compile(r"^(cuda|hip|rocm|xpu)\b.*= *'", re.MULTILINE)


def may_see_accelerator() -> bool:
    """Returns False if the installed PyTorch sees no accelerator for certain; else its import
    decides.
    """
    found = find_spec("torch")
    if found is None or found.origin is None or "torch" in sys.modules or sys.platform == "darwin":
        return True
    try:
        kinds = set(
            _BUILT_FOR.findall(Path(found.origin).with_name("version.py").read_text("utf-8"))
        )
    except OSError:
        return True
    if kinds == {"cuda"} and not _loads("libcuda.so.1"):  # which the driver installs
        kinds.clear()
    return bool(kinds or entry_points(group="torch.backends"))


def require_accelerator() -> None:
    """Refuses a machine where PyTorch sees no accelerator for certain.

    Raises:
        UsageError: there is none.
    """
    if not may_see_accelerator():
        raise UsageError(NO_ACCELERATOR)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
