"""Finding what keeps a step from being one graph, before it is captured.

`watch.py` runs an eager step and collects its issues and its trace; `environment.py` finds issues
that need no step; `warmup.py` decides which warm-up steps `graphed_step` watches.
"""

from shardgrad.graphs.preflight.op_trace import Operand, StepTrace, TracedOp, differences
from shardgrad.graphs.preflight.watch import watch

__all__ = ["Operand", "StepTrace", "TracedOp", "differences", "watch"]
