"""`shardgrad plan`: memory, traffic and time of a training step, before there is a machine to run it on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardgrad.training.failure import TrainingError

if TYPE_CHECKING:
    from shardgrad.plan.hardware import Machine
    from shardgrad.plan.planning import Calibration
    from shardgrad.plan.request import Request


@click.command(short_help="Say whether a training step will fit, how fast it will be, what to change.")
@click.option("--preset", default="8b", show_default=True, help="Built-in model; 70b and moe-670b too.")
@click.option("--hf", metavar="TEXT", help="A Hugging Face causal LM: a config.json, or a model type.")
@click.option("--model", metavar="MODULE:FUNCTION", help="A model of your own, which the function returns.")
@click.option("--override", multiple=True, metavar="KEY=VALUE", help="Replace one field of the shape.")
@click.option("--ranks", type=int, help="In the world.  [default: what --mesh has room for, or 8]")
@click.option("--mesh", metavar="TEXT", help="16: shard over 16 ranks; 4x16: 4 replicas of 16 shards.")
@click.option("--stage", default="3", show_default=True, metavar="1|2|3|hfsdp", help="As zero_stage.")
@click.option("--reshard-to", type=int, help="After forward, keep parameters cut over so many neighbours.")
@click.option("--unit", "units", multiple=True, metavar="CLASS", help="Modules of this class are units too.")
@click.option("--precision", default="bf16-mixed", show_default=True, metavar="fp32|bf16-mixed|bf16")
@click.option("--reduce-dtype", metavar="fp32|bf16", help="Of gradients on their way.  [default: fp32]")
@click.option("--gradient-dtype", metavar="fp32|bf16", help="Of gradients kept.  [default: the weights']")
@click.option("--activation-checkpointing", is_flag=True, help="Recompute each block in backward.")
@click.option("--batch-size", type=int, default=1, show_default=True, help="Sequences, rank, micro-batch.")
@click.option("--seq-len", type=int, default=8192, show_default=True, help="Tokens per sequence.")
@click.option("--accumulate", type=int, default=1, show_default=True, help="Micro-batches per step.")
@click.option("--no-sync", is_flag=True, help="Reduce gradients after the last micro-batch only.")
@click.option("--optimizer", default="adamw", show_default=True, metavar="adamw|sgd")
@click.option("--device", default="h100", show_default=True, metavar="a100|h100|h200|b200|cpu|...")
@click.option("--memory-gib", type=float, help="Of each device, where it is another.")
@click.option("--node", "devices_per_node", type=int, default=8, show_default=True, help="Devices of a node.")
@click.option("--link", metavar="nvlink4|pcie5|...", help="Inside a node.  [default: the device's]")
@click.option("--network", default="ib400", show_default=True, metavar="ib400|ib200|eth100|...")
@click.option("--cards", type=int, help="Network cards of a node.  [default: one per device]")
@click.option("--graph", is_flag=True, help="The step is one graph: the host launches nothing else.")
@click.option("--mfu", type=float, help="What forward and backward reach by themselves, if you measured it.")
@click.option("--compute-s", type=float, help="Or the seconds that they take.")
@click.option("--advice/--no-advice", default=True, help="Try changes, and name the three best.")
@click.option("--picture", type=click.Path(path_type=Path), help="Draw memory and timeline into this file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(**options: Any) -> None:
    """Predict memory, traffic and time of one training step, and say what to change.

    The engine itself runs, on tensors without memory among ranks that do not exist, so that any number of
    ranks (16,384 and more) and any size of model can be planned on one CPU, in seconds, or in minutes for
    the largest. Sizes are of rank 0, which holds no less than the others. How it is done, and how far it can
    be trusted: docs/explanation/scaling.md.
    """
    try:
        _plan(**options)
    except TrainingError as error:
        click.echo(f"shardgrad plan: {error}", err=True)
        sys.exit(error.exit_status)


def _plan(*, advice: bool, picture: Path | None, as_json: bool, **options: Any) -> None:
    import json
    import warnings

    from rich.console import Console

    from shardgrad.plan import report
    from shardgrad.plan.advice import advise
    from shardgrad.plan.picture import draw
    from shardgrad.plan.planning import make_plan

    # Of torch, about itself: nothing that who plans could do anything about.
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
    request, machine, calibration = _asked(options)
    made = make_plan(request, machine, calibration)
    found = advise(made, calibration) if advice else None
    if picture is not None:
        draw(made, picture)
    if as_json:
        click.echo(json.dumps(report.as_json(made, found)))
    else:
        console = Console(highlight=False)
        # As wide as it needs where nobody's terminal says how wide it may be.
        report.show(made, found, console if console.is_terminal else Console(highlight=False, width=120))


def _asked(options: dict[str, Any]) -> tuple[Request, Machine, Calibration]:
    """Sorts the options into what is planned, for which machine, and what is known of it."""
    import dataclasses
    import math

    from shardgrad.cli.train import key_and_value
    from shardgrad.plan.hardware import machine_of
    from shardgrad.plan.planning import Calibration
    from shardgrad.plan.request import Request
    from shardgrad.training.config import mesh_shape

    machine = machine_of(
        options["device"],
        devices_per_node=options["devices_per_node"],
        link=options["link"],
        network=options["network"],
        cards_per_node=options["cards"],
        memory_gib=options["memory_gib"],
        is_graphed=options["graph"],
    )
    fields = {field.name for field in dataclasses.fields(Request)}
    asked = {name: value for name, value in options.items() if name in fields}
    asked["override"] = dict(key_and_value(text) for text in options["override"])
    if options["ranks"] is None:
        asked["ranks"] = math.prod(mesh_shape(options["mesh"]) or (8,))
    request = Request(**asked, on_host=machine.device.is_synchronous)
    return request, machine, Calibration(options["mfu"], options["compute_s"])
