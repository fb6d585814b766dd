"""`shardgrad plan`: memory, traffic and time of a training step, without the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from shardgrad.extras import require
from shardgrad.programs.cli.command import Command, given

if TYPE_CHECKING:
    from shardgrad.programs.plan.calibration import Calibration
    from shardgrad.programs.plan.hardware import Machine
    from shardgrad.programs.plan.request import Request


_SECTIONS = {
    "Model": ("preset", "hf", "model", "override"),
    "Ranks and sharding": ("ranks", "mesh", "stage", "reshard_to", "units"),
    "Precision and memory": (
        "precision",
        "reduce_dtype",
        "gradient_dtype",
        "wire_dtype",
        "activation_checkpointing",
        "optimizer",
    ),
    "Steps": ("batch_size", "seq_len", "accumulate", "no_sync"),
    "Machine": ("device", "memory_gib", "devices_per_node", "link", "network", "cards", "graph"),
    "Measurements": ("mfu", "compute_s"),
    "What is printed": ("tokens_per_step", "as_json"),
}
# What a search tries, and what is of one plan.
_NOT_WITH_SEARCH = (
    *(
        "mesh",
        "stage",
        "reshard_to",
        "activation_checkpointing",
        "batch_size",
        "accumulate",
        "no_sync",
    ),
)
_EXAMPLES = [
    "shardgrad plan --preset 8b --ranks 64 --activation-checkpointing full",
    "shardgrad plan --preset 70b --mesh 64x8 --stage hfsdp --device h200",
    "shardgrad plan --preset small --device cpu --ranks 2 --compute-s 1.3",
    "shardgrad plan --preset 8b --ranks 64 --search 4194304",
]


@click.command(cls=Command, sections=_SECTIONS, examples=_EXAMPLES)
@click.option(
    "--preset",
    default="8b",
    show_default=True,
    help="Built-in model; also 70b, for plans only.",
)
@click.option(
    "--hf",
    metavar="TEXT",
    help="Plan a Hugging Face causal LM: path of a config.json, or a model type.",
)
@click.option(
    "--model", metavar="MODULE:FUNCTION", help="Plan the model that this function returns."
)
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
    help="Device mesh: 16 shards over 16 ranks; 4x16 is 4 replicas of 16 shards.  [default: shard "
    "over all]",
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
    help="Reshard parameters after forward to groups of this many ranks, as an int "
    "reshard_after_forward.",
)
@click.option(
    "--unit",
    "units",
    multiple=True,
    metavar="NAME",
    help="Also apply fully_shard to this module (embedding, head), or to the modules of this class "
    "inside the blocks; may be repeated.",
)
@click.option(
    "--precision",
    default="bf16-mixed",
    show_default=True,
    metavar="fp32|bf16-mixed|bf16",
    help="bf16-mixed computes in bf16 with fp32 weights; bf16 keeps bf16 weights as well.",
)
@click.option(
    "--reduce-dtype", metavar="fp32|bf16", help="Dtype of gradient reductions.  [default: fp32]"
)
@click.option(
    "--gradient-dtype",
    metavar="fp32|bf16",
    help="Dtype of stored gradients.  [default: that of the weights]",
)
@click.option(
    "--wire-dtype",
    metavar="bf16",
    help="Dtype that gradients travel in.  [default: the reduce dtype]",
)
@click.option(
    "--activation-checkpointing",
    is_flag=False,
    flag_value="full",
    default="none",
    show_default=True,
    metavar="none|selective|full",
    help="Recompute the activations of each block in backward: all, or all but those that cost "
    "most.",
)
@click.option(
    "--batch-size",
    type=int,
    default=1,
    show_default=True,
    help="Sequences per rank in each micro-batch.",
)
@click.option("--seq-len", type=int, default=8192, show_default=True, help="Tokens per sequence.")
@click.option(
    "--accumulate", type=int, default=1, show_default=True, help="Micro-batches per step."
)
@click.option("--no-sync", is_flag=True, help="Reduce gradients only after the last micro-batch.")
@click.option(
    "--optimizer",
    default="adamw",
    show_default=True,
    metavar="adamw|sgd",
    help="Optimizer to plan for.",
)
@click.option(
    "--device",
    default="h100",
    show_default=True,
    metavar="a100|h100|h200|b200|cpu|...",
    help="Device type.",
)
@click.option(
    "--memory-gib",
    type=float,
    help="Memory of each device in GiB.  [default: that of the device type]",
)
@click.option(
    "--node",
    "devices_per_node",
    type=int,
    default=8,
    show_default=True,
    help="Number of devices in a node.",
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
@click.option(
    "--cards", type=int, help="Number of network cards in a node.  [default: one per device]"
)
@click.option(
    "--graph",
    is_flag=True,
    help="Assume that the step is one CUDA graph, without per-operation launches.",
)
@click.option(
    "--mfu",
    type=float,
    help="Measured MFU of forward and backward without communication, to calibrate the predicted "
    "time.",
)
@click.option(
    "--compute-s",
    type=float,
    help="Measured seconds of forward and backward without communication, instead of --mfu.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
@click.option(
    "--search",
    "tokens_per_step",
    type=int,
    metavar="TOKENS",
    help="Instead of a plan, print the ten fastest of a few layouts, recomputations and batch "
    "sizes that fit, for this many tokens per step of all ranks.",
)
@click.pass_context
def plan(ctx: click.Context, /, **options: Any) -> None:
    """Predict memory, traffic and time of one training step.

    The engine itself runs the step on fake tensors in a fake process group, with a few of the
    blocks that are alike, so that any number of ranks (16,384 and more) and any model size can be
    planned on one CPU, in seconds. Sizes are those of rank 0, which holds at least as much as any
    other rank. Without a measurement, times are a range. docs/explanation/scaling.md describes the
    method and its accuracy.
    """
    _check_together(ctx)
    _plan(**options)


def _plan(
    *,
    as_json: bool,
    tokens_per_step: int | None,
    **options: Any,
) -> None:
    from shardgrad.programs.function_named import function_named
    from shardgrad.programs.plan.request import require_share

    # Before PyTorch is imported, which takes seconds.
    request, machine, calibration = _asked(options)
    if request.hf is not None:
        require("transformers", feature="--hf")
    if request.model is not None:
        function_named(request.model, flag="--model")
    if tokens_per_step is not None:
        require_share(request, tokens_per_step)
    _check_preset(request)

    import json
    import warnings

    from rich.console import Console

    from shardgrad.programs.plan import report
    from shardgrad.programs.plan.planning import make_plan

    # Warnings of torch about its own internals, which the user of a plan cannot act on.
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    warnings.filterwarnings(
        "ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning
    )
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=100)
    if tokens_per_step is not None:
        from shardgrad.programs.plan.search import as_table, search

        settings = search(request, machine, calibration, tokens_per_step)
        if as_json:
            click.echo(json.dumps([one.as_json() for one in settings]))
        else:
            console.print(as_table(settings))
        return
    made = make_plan(request, machine, calibration)
    if as_json:
        click.echo(json.dumps(report.as_json(made)))
    else:
        report.show(made, console)


def _check_together(ctx: click.Context) -> None:
    """Refuses options of which one would be without effect."""
    models = given(ctx, "preset", "hf", "model")
    if len(models) > 1:
        raise click.UsageError(f"{' and '.join(models)} name a model each: give one.", ctx)
    speeds = given(ctx, "mfu", "compute_s")
    if len(speeds) > 1:
        raise click.UsageError(
            f"{' and '.join(speeds)} say each how fast compute is: give one.", ctx
        )
    useless = given(ctx, *_NOT_WITH_SEARCH) if given(ctx, "tokens_per_step") else []
    if useless:
        raise click.UsageError(
            "--search tries settings by itself, and prints a table: leave out "
            f"{', '.join(useless)}.",
            ctx,
        )


def _check_preset(request: Request) -> None:
    from shardgrad.programs.plan.request import PLAN_PRESETS, require_units, units_of_preset
    from shardgrad.programs.train.failure import UsageError
    from shardgrad.programs.train.presets import suggestion, transformer_config

    if request.hf is None and request.model is None:
        if request.preset not in PLAN_PRESETS:
            known = suggestion(request.preset, list(PLAN_PRESETS))
            raise UsageError(f"There is no preset {request.preset!r}: {known}")
        config = transformer_config(request.preset, request.override, presets=PLAN_PRESETS)
        require_units(request.units, units_of_preset(config))


def _asked(options: dict[str, Any]) -> tuple[Request, Machine, Calibration]:
    """Splits the options into the request, the machine and the calibration."""
    import dataclasses
    import math

    from shardgrad.programs.cli.train import key_and_value
    from shardgrad.programs.plan.calibration import Calibration
    from shardgrad.programs.plan.hardware import machine_of
    from shardgrad.programs.plan.request import Request
    from shardgrad.programs.train.config import mesh_shape

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
