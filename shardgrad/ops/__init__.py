"""The compiled ops and their references: data movement, norms and optimizer updates.

| module | holds |
|---|---|
| `library.py` | the operator library, and the loader of `shardgrad/_C.so` |
| `arithmetic.py` | in which dtype references compute |
| `movement.py` | `pack`, `unpack`, `sum_chunks` |
| `segments.py` | the table of the parameters that one launch updates |
| `weights.py` | how exact values of half-width parameters are kept |
| `update.py` | `adam_`, `sgd_` |
| `norm.py` | `norm_` |
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardgrad.ops.library import backend, has_kernels, load_compiled
from shardgrad.ops.movement import MAX_SUMMANDS, pack, sum_chunks, unpack

if TYPE_CHECKING:
    from shardgrad.ops.norm import NORM_SCRATCH_NUMEL, norm_
    from shardgrad.ops.segments import TILE_NUMEL, segment_rows
    from shardgrad.ops.update import adam_, sgd_

__all__ = [
    "MAX_SUMMANDS",
    "NORM_SCRATCH_NUMEL",
    "TILE_NUMEL",
    "adam_",
    "backend",
    "has_kernels",
    "norm_",
    "pack",
    "segment_rows",
    "sgd_",
    "sum_chunks",
    "unpack",
]

# Where optimizers and clipping find theirs, which a program with torch's does not import.
_DEFINED_IN = {
    "NORM_SCRATCH_NUMEL": "norm",
    "TILE_NUMEL": "segments",
    "adam_": "update",
    "norm_": "norm",
    "segment_rows": "segments",
    "sgd_": "update",
}


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
    globals()[name] = value
    return value


load_compiled()
