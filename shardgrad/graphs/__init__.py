"""A whole training step as one graph of its device."""

from shardgrad.graphs.capturable import Capturable
from shardgrad.graphs.interludes import outside
from shardgrad.graphs.pool import GraphPool
from shardgrad.graphs.step import GraphedStep, UncapturableStepWarning, graphed_step

__all__ = ["Capturable", "GraphPool", "GraphedStep", "UncapturableStepWarning", "graphed_step", "outside"]
