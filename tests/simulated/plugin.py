"""Runs the tests of files named `test_simulated_*` in a process that has simulated devices."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulated.accelerator import build
from tests.simulated.accelerator.process import SimulatorProcess
from tests.support.ranks import RankError

_process = SimulatorProcess()


def _is_simulated(item: pytest.Item) -> bool:
    return item.path.name.startswith("test_simulated_")


def pytest_collection_finish(session: pytest.Session) -> None:
    # Here, because compiling may take longer than a test may.
    if any(map(_is_simulated, session.items)) and not session.config.option.collectonly:
        build.build()


def pytest_sessionfinish() -> None:
    _process.stop()


def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    if not _is_simulated(pyfuncitem):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    failure = ""
    try:
        limit_s = 300.0 if pyfuncitem.get_closest_marker("slow") else 110.0
        _process.run(pyfuncitem.obj, timeout_s=limit_s, **arguments)
    except RankError as error:
        failure = str(error)
    if failure:  # not in the handler, whose own traceback says nothing
        pytest.fail(failure, pytrace=False)
    return True
