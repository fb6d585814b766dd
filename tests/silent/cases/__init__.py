"""The programs, by topic: what an author would have written for any of the engines, and below its
title the reports, and what is right.
"""

from __future__ import annotations

import inspect

from torch import nn

from tests.silent.cases import (
    averages,
    beginnings,
    gradients,
    losses,
    optimizers,
    parameters,
    ranks,
    unusual,
)
from tests.silent.engines import Engine, mlp

__all__ = ["CASES", "PROGRAMS", "TOPICS"]

TOPICS = {
    topic: [
        name
        for name, program in vars(topic).items()
        if inspect.isfunction(program) and program.__module__ == topic.__name__
    ]
    for topic in (losses, parameters, beginnings, ranks, averages, gradients, optimizers, unusual)
}
CASES = {name: getattr(topic, name) for topic, names in TOPICS.items() for name in names}


def control(engine: Engine) -> nn.Module:
    """A program without a mistake: the warnings it gets from an engine are the usual ones."""
    return engine.train(engine.wrap(mlp()))


PROGRAMS = {"control": control} | CASES
