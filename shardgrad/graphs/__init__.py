"""A whole training step as one device graph.

Read `step.py` first (warm-up, capture, replay), then `captured.py` (the graphs of one step),
`capturable.py` (the protocol) and `engine_state.py` (the engine's adapters). `pool.py` owns the
stream and the memory, `comparison.py` compares two captures of a step, and `preflight.py` checks
for causes that neither a capture nor a comparison finds.
"""

from shardgrad.graphs import engine_state  # noqa: F401  (registers the adapters)
from shardgrad.graphs.capturable import Capturable
from shardgrad.graphs.eager_regions import outside
from shardgrad.graphs.pool import GraphPool
from shardgrad.graphs.step import GraphedStep, UncapturableStepWarning, graphed_step

__all__ = [
    "Capturable",
    "GraphPool",
    "GraphedStep",
    "UncapturableStepWarning",
    "graphed_step",
    "outside",
]
