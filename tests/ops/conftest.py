"""The backends of the operators."""

from __future__ import annotations

import pytest

from tests.support.segments import BACKENDS


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen
