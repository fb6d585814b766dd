"""`shardgrad plan`: memory, traffic and time of a training step, without the machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardgrad.cli.command import Command
from shardgrad.extras import require

if TYPE_CHECKING:
    from shardgrad.plan.hardware import Machine
    from shardgrad.plan.planning import Calibration
    from shardgrad.plan.request import Request


@click.command(cls=Command)
@click.option(
    "--preset", default="8b", show_default=True, help="Built-in model; also 70b and moe-670b, for plans only."
)
@click.option(
    "--hf", metavar="TEXT", help="Plan a Hugging Face causal LM: path of a config.json, or a model type."
)
@click.option("--model", metavar="MODULE:FUNCTION", help="Plan the model that this function returns.")
@click.option(
    "--override",
    multiple=True,
    metavar="KEY=VALUE",
    help="Replace one field of the model's configuration; may be repeated.",
)
@click.option("--ranks", type=int, help="Number of ranks.  [default: the size of --mesh, or 8]")
@click.option(
    "--mesh",
    metavar="TEXT",
    help="Device mesh: 16 shards over 16 ranks; 4x16 is 4 replicas of 16 shards.  [default: shard over all]",
)
@click.option(
    "--stage",
    default="3",
    show_default=True,
    metavar="1|2|3|hfsdp",
    help="ZeRO stage, as `zero_stage` of fully_shard.",
)
@click.option(
    "--reshard-to",
    type=int,
    help="Reshard parameters after forward to groups of this many ranks, as an int reshard_after_forward.",
)
@click.option(
    "--unit",
    "units",
    multiple=True,
    metavar="CLASS",
    help="Also apply fully_shard to modules of this class, inside the blocks; may be repeated.",
)
@click.option(
    "--precision",
    default="bf16-mixed",
    show_default=True,
    metavar="fp32|bf16-mixed|bf16",
    help="bf16-mixed computes in bf16 with fp32 weights; bf16 keeps bf16 weights as well.",
)
@click.option("--reduce-dtype", metavar="fp32|bf16", help="Dtype of gradient reductions.  [default: fp32]")
@click.option(
    "--gradient-dtype", metavar="fp32|bf16", help="Dtype of stored gradients.  [default: that of the weights]"
)
@click.option(
    "--activation-checkpointing", is_flag=True, help="Recompute the activations of each block in backward."
)
@click.option(
    "--batch-size", type=int, default=1, show_default=True, help="Sequences per rank in each micro-batch."
)
@click.option("--seq-len", type=int, default=8192, show_default=True, help="Tokens per sequence.")
@click.option("--accumulate", type=int, default=1, show_default=True, help="Micro-batches per step.")
@click.option("--no-sync", is_flag=True, help="Reduce gradients only after the last micro-batch.")
@click.option(
    "--optimizer", default="adamw", show_default=True, metavar="adamw|sgd", help="Optimizer to plan for."
)
@click.option(
    "--device", default="h100", show_default=True, metavar="a100|h100|h200|b200|cpu|...", help="Device type."
)
@click.option(
    "--memory-gib", type=float, help="Memory of each device in GiB.  [default: that of the device type]"
)
@click.option(
    "--node", "devices_per_node", type=int, default=8, show_default=True, help="Number of devices in a node."
)
@click.option(
    "--link",
    metavar="nvlink4|pcie5|...",
    help="Link between the devices of a node.  [default: that of the device type]",
)
@click.option(
    "--network",
    default="ib400",
    show_default=True,
    metavar="ib400|ib200|eth100|...",
    help="Type of the network cards that connect nodes.",
)
@click.option("--cards", type=int, help="Number of network cards in a node.  [default: one per device]")
@click.option(
    "--graph", is_flag=True, help="Assume that the step is one CUDA graph, without per-operation launches."
)
@click.option(
    "--mfu",
    type=float,
    help="Measured MFU of forward and backward without communication, to calibrate the predicted time.",
)
@click.option(
    "--compute-s",
    type=float,
    help="Measured seconds of forward and backward without communication, instead of --mfu.",
)
@click.option(
    "--advice/--no-advice", default=True, help="Predict the effect of changes and print the three best."
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    help="Draw memory and timeline into this file; needs matplotlib.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
def plan(**options: Any) -> None:
    """Predict memory, traffic and time of one training step, and suggest changes.

    The engine itself runs the step on fake tensors in a fake process group, so that any number of ranks
    (16,384 and more) and any model size can be planned on one CPU, in seconds, or in minutes for the largest.
    Sizes are those of rank 0, which holds at least as much as any other rank. docs/explanation/scaling.md
    describes the method and its accuracy.
    """
    _plan(**options)


def _plan(*, advice: bool, picture: Path | None, as_json: bool, **options: Any) -> None:
    # Before PyTorch is imported: a plan may take minutes.
    if picture is not None:
        require("matplotlib", feature="--picture")
    if options["hf"] is not None:
        require("transformers", feature="--hf")

    import json
    import warnings

    from rich.console import Console

    from shardgrad.plan import report
    from shardgrad.plan.advice import advise
    from shardgrad.plan.picture import draw
    from shardgrad.plan.planning import make_plan

    # Warnings of torch about its own internals, which the user of a plan cannot act on.
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
        # Without a terminal there is no width to fit into.
        report.show(made, found, console if console.is_terminal else Console(highlight=False, width=120))


def _asked(options: dict[str, Any]) -> tuple[Request, Machine, Calibration]:
    """Splits the options into the request, the machine and the calibration."""
    import dataclasses
    import math

    from shardgrad.cli.train import key_and_value
    from shardgrad.plan.hardware import machine_of
    from shardgrad.plan.planning import Calibration
    from shardgrad.plan.request import Request
    from shardgrad.train.config import mesh_shape

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
