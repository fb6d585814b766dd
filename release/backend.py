"""The build backend: setuptools', which asks for torch where the compiled ops can be built.

An isolated build has only what its backend asks for. Where there is no C++ compiler, torch would be
downloaded for nothing, and the wheel is pure Python.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks of PEP 517)

__all__ = [*build_meta.__all__, "get_requires_for_build_editable", "get_requires_for_build_wheel"]


def get_requires_for_build_wheel(settings: dict[str, Any] | None = None) -> list[str]:
    """Returns what setuptools needs, and torch if there is a C++ compiler."""
    return [*build_meta.get_requires_for_build_wheel(settings), *_torch()]


def get_requires_for_build_editable(settings: dict[str, Any] | None = None) -> list[str]:
    """Returns what setuptools needs, and torch if there is a C++ compiler."""
    return [*build_meta.get_requires_for_build_editable(settings), *_torch()]


def _torch() -> list[str]:
    named = os.environ.get("CXX")
    compilers = shlex.split(named)[:1] if named else ["c++", "g++", "clang++"]
    if not any(map(shutil.which, compilers)):
        return []
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [each for each in project["dependencies"] if each.startswith("torch")]
