"""These tests run where torch.cuda runs on the host (`make test-cuda`), and are skipped
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda_runtime import inspection

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if inspection.installed():
        return
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(
                pytest.mark.skip(reason="torch.cuda does not run on the host here: make test-cuda")
            )


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    if inspection.installed():
        inspection.findings(forget=True)
    yield
    if inspection.installed():
        import torch

        torch.cuda.set_stream(torch.cuda.default_stream())
        torch.cuda.synchronize()
        assert inspection.captures() == 0
