"""Runs every test of this folder in a process that has simulated devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.simulated.accelerator import build
from tests.simulated.accelerator.process import SimulatorProcess
from tests.support.ranks import RankError

_HERE = Path(__file__).parent
_process = SimulatorProcess()


def _is_here(item: pytest.Item) -> bool:
    return _HERE in item.path.parents


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if build.compiler() is None:
        for item in filter(_is_here, items):
            item.add_marker(pytest.mark.skip(reason="the simulated accelerator needs g++"))


def pytest_collection_finish(session: pytest.Session) -> None:
    # Here, because compiling may take longer than a test may.
    chosen = any(_is_here(item) for item in session.items)
    if chosen and build.compiler() is not None and not session.config.option.collectonly:
        build.build()


def pytest_sessionfinish() -> None:
    _process.stop()


def pytest_pyfunc_call(pyfuncitem: Any) -> bool:
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    failure = ""
    try:
        _process.run(pyfuncitem.obj, **arguments)
    except RankError as error:
        failure = str(error)
    if failure:  # not in the handler, whose own traceback says nothing
        pytest.fail(failure, pytrace=False)
    return True
