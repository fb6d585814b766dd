"""The programs of `cases` as functions that `shardgrad doctor --audit` takes, one for each engine:
`tests.silent.audited:FSDP2__control`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from tests.silent.cases import PROGRAMS
from tests.silent.engines import ENGINES


def __getattr__(name: str) -> Callable[[], Any]:
    engine, _, case = name.partition("__")
    engine = engine.replace("_", "-")  # ZeRO-3
    if engine not in ENGINES or case not in PROGRAMS:
        raise AttributeError(name)

    def program() -> Any:
        folder = [tempfile.mkdtemp(prefix="silent-")]
        dist.broadcast_object_list(folder)
        result = PROGRAMS[case](ENGINES[engine](folder[0]))
        return result if isinstance(result, nn.Module | Mapping) else {"returned": result}

    return program
