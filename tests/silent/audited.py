"""The programs of `cases/` as functions that `shardgrad doctor --audit` takes, one for each engine:
`tests.silent.audited:FSDP2__control`.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from tests.silent.engines import ENGINES


def __getattr__(name: str) -> Callable[[], Any]:
    engine, is_one, case = name.partition("__")
    engine = engine.replace("_", "-")  # ZeRO-3
    if not is_one or engine not in ENGINES:
        raise AttributeError(name)

    def program() -> Any:
        folder = [tempfile.mkdtemp(prefix="silent-")]
        dist.broadcast_object_list(folder)
        module = importlib.import_module(f"tests.silent.cases.{case}")
        result = module.program(ENGINES[engine](folder[0]), dist.get_rank())
        return result if isinstance(result, nn.Module | Mapping) else {"returned": result}

    return program
