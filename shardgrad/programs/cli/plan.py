"""`shardgrad plan`: memory, traffic and time of a training step, without the machine."""

from __future__ import annotations

import math
import sys
from typing import Any

import click

from shardgrad.programs.plan.hardware import Machine
from shardgrad.programs.plan.request import Request, mesh_shape
from shardgrad.programs.train.settings import given_for, options_of


@click.command(
    epilog="""\b
Examples:
  shardgrad plan --preset 8b --ranks 64 --activation-checkpointing full
  shardgrad plan --preset 70b --mesh 64x8 --stage hfsdp --device h200
  shardgrad plan --preset 1b --device a100 --network eth100 --mfu 0.42""",
    params=options_of(Request, Machine),
)
@click.pass_context
def plan(ctx: click.Context, /, **options: Any) -> None:
    """Predict memory, traffic and time of one training step.

    The engine itself runs the step on fake tensors in a fake process group, so that any number of
    ranks (16,384 and more) can be planned on one CPU: a model of 8 billion parameters in seconds,
    one of 70 billion in a minute. Sizes are those of rank 0, which holds at least as much
    as any other rank. Without a measurement (--mfu), times are a range: that of published runs on
    the same kind of GPU.
    """
    asked = given_for(Request, options)
    if {"preset", "model"} <= asked.keys():
        raise click.UsageError("--preset and --model exclude each other: give one.", ctx)
    # Before PyTorch is imported, which takes seconds.
    machine = Machine(**given_for(Machine, options))
    asked.setdefault("ranks", math.prod(mesh_shape(options["mesh"]) or (8,)))
    request = Request(**asked)
    if request.model is not None:
        from shardgrad.programs.function_named import function_named

        function_named(request.model, flag="--model")

    import warnings

    from rich.console import Console

    from shardgrad.programs.plan.planning import plan_of
    from shardgrad.programs.plan.rehearsal import rehearse
    from shardgrad.programs.plan.report import show

    # Warnings of torch about its own internals, which the user of a plan cannot act on.
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    show(plan_of(rehearse(request), machine), console)
