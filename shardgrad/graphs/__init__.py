"""A whole training step as one graph of its device."""

from .capturable import Capturable
from .interludes import outside
from .pool import GraphPool
from .step import GraphedStep, UncapturableStepWarning, graphed_step

__all__ = ["Capturable", "GraphPool", "GraphedStep", "UncapturableStepWarning", "graphed_step", "outside"]
