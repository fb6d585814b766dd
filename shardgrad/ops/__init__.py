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

from shardgrad.ops.library import backend, has_kernels, load_compiled
from shardgrad.ops.movement import MAX_SUMMANDS, pack, sum_chunks, unpack

__all__ = ["MAX_SUMMANDS", "backend", "has_kernels", "pack", "sum_chunks", "unpack"]

# Not the ops of optimizers and clipping, which a program with torch's does not import.
load_compiled()
