"""Whether PyTorch may see an accelerator is known without its import, and never denied where it
may.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from shardgrad.train import accelerators

VERSION = """
__version__ = '2.13.0'
cuda: Optional[str] = {cuda}
git_version = 'cf30153'
hip: Optional[str] = {hip}
xpu: Optional[str] = {xpu}
"""


@pytest.mark.parametrize(
    ("built_for", "has_driver", "others", "may"),
    [
        ({}, False, [], False),
        ({}, True, [], False),
        ({}, False, ["a backend"], True),
        ({"cuda": "'13.0'"}, True, [], True),
        ({"cuda": "'13.0'"}, False, [], False),
        ({"cuda": "'13.0'"}, False, ["a backend"], True),
        ({"hip": "'7.0'"}, False, [], True),
        ({"xpu": "'20250101'"}, False, [], True),
    ],
)
def test_what_pytorch_is_built_for_and_the_driver_say_whether_there_may_be_one(
    built_for: dict[str, str],
    has_driver: bool,
    others: list[str],
    may: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = {"cuda": "None", "hip": "None", "xpu": "None"} | built_for
    (tmp_path / "version.py").write_text(VERSION.format(**kinds))
    monkeypatch.setattr(
        accelerators, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    )
    monkeypatch.setattr(accelerators, "sys", SimpleNamespace(modules={}, platform="linux"))
    monkeypatch.setattr(accelerators, "_loads", lambda _: has_driver)
    monkeypatch.setattr(accelerators, "entry_points", lambda group: others)
    assert accelerators.may_see_accelerator() == may


def test_an_imported_pytorch_is_asked_itself() -> None:
    assert accelerators.may_see_accelerator()
