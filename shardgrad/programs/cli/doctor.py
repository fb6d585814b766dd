"""`shardgrad doctor`: versions and devices of this machine, and whether a training step can be one
graph.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import click

from shardgrad.programs.cli.command import Command, given
from shardgrad.programs.cli.reporting import escaped
from shardgrad.programs.train.presets import PRESETS

if TYPE_CHECKING:
    import torch
    from torch.optim.optimizer import Optimizer

    from shardgrad.graphs.preflight import Issue

_SHAPE = (2, 32)  # sequences, and bytes of each: enough for every operation to be launched
_STEPS = 6  # three of warm-up, a capture, its comparison with another, a replay
_NONE = "none"


@click.command(
    cls=Command,
    examples=["shardgrad doctor", "shardgrad doctor --preset none     # versions and devices only"],
)
@click.option(
    "--preset",
    type=click.Choice([*PRESETS, _NONE]),
    default="tiny",
    metavar="|".join([*PRESETS, _NONE]),
    help="Built-in model whose training step is checked; none checks the environment only.  "
    "[default: tiny]",
)
@click.option(
    "--cpu", is_flag=True, help="Run the step on the CPU even if there is an accelerator."
)
@click.option(
    "--audit",
    metavar="MODULE:FUNCTION",
    help="Instead, run your own program on several ranks, whatever its engine, and compare what it "
    "trains with a run without the engine: docs/how_to/check_a_program.md.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=2),
    default=2,
    help="Ranks of the program audited.  [default: 2]",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=3,
    help="Steps of the program audited, if it returns a step.  [default: 3]",
)
@click.pass_context
def doctor(
    ctx: click.Context, /, preset: str, cpu: bool, audit: str | None, ranks: int, steps: int
) -> None:
    """Print versions and devices, and what prevents a training step from being captured as one
    graph.

    Runs six steps of a built-in model on one rank and writes no files. The exit status is 1 if
    there are issues to a capture. docs/how_to/migrate_to_graphed_step.md describes how to check the
    step of your program.
    """
    useless = given(ctx, "ranks", "steps") if audit is None else given(ctx, "preset", "cpu")
    if useless:
        only = "only with" if audit is None else "not with"
        raise click.UsageError(
            f"{' and '.join(useless)} {only} --audit: leave out one of them.", ctx
        )
    if audit is not None:
        _audit(audit, ranks, steps)
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True, highlight=False)
    device = _device(cpu)
    table = Table.grid(padding=(0, 2))
    for name, value in _facts(device):
        table.add_row(f"[bold]{name}[/bold]", value)
    console.print(table)
    issues = _issues(preset, device)
    for issue in issues:
        console.print(f"\n[red]issue[/red] ({issue.kind}): ", end="")
        console.print(str(issue), markup=False)
    tried = "" if preset == _NONE else f", and in a training step of preset {preset} on {device}"
    count = f"{len(issues) or 'No'} issue{'' if len(issues) == 1 else 's'}"
    console.print(f"\n{count} for a graph in this environment{tried}.")
    sys.exit(1 if issues else 0)


def _audit(target: str, ranks: int, steps: int) -> NoReturn:
    """Prints where a program departs from itself without its engine, or on one rank; exits with 1
    if it does.
    """
    from shardgrad.programs.function_named import function_named

    function_named(target, flag="--audit")  # before PyTorch is imported, which takes seconds
    from shardgrad.programs.audit.audit import audit

    found = audit(target, ranks=ranks, steps=steps)
    click.echo(escaped(found))
    sys.exit(0 if found.passed else 1)


def _device(cpu: bool) -> torch.device:
    import torch

    found = (
        None
        if cpu or not torch.accelerator.is_available()
        else torch.accelerator.current_accelerator()
    )
    return torch.device("cpu") if found is None else torch.device(found.type, 0)


def _facts(device: torch.device) -> Iterator[tuple[str, str]]:
    import torch

    from shardgrad import ops, version

    yield "shardgrad", version.described()
    yield "python", platform.python_version()
    yield "torch", torch.__version__
    cuda = torch.version.cuda or "not in this build of torch"
    if torch.version.cuda and not torch.cuda.is_available():
        cuda += ", and no GPU was found"
    yield "CUDA", cuda
    if device.type == "cuda":
        yield "NCCL", ".".join(map(str, torch.cuda.nccl.version()))
    has_kernels = device.type == "cpu" or ops.has_kernels(device.type)
    yield "shardgrad ops", ops.backend() + ("" if has_kernels else f"; reference on {device.type}")
    module = torch.get_device_module(device)
    count = 1 if device.type == "cpu" else torch.accelerator.device_count()
    names = getattr(module, "get_device_name", lambda _: device.type)
    yield "devices", ", ".join(f"{device.type}:{index} {names(index)}" for index in range(count))


def _issues(preset: str, device: torch.device) -> list[Issue]:
    from shardgrad.graphs.preflight import environment_issues

    if preset == _NONE:
        return environment_issues(device, [])
    with _one_rank(device):
        from shardgrad.errors import CaptureError
        from shardgrad.graphs.preflight import Issue

        optimizer, step, batch = _program(preset, device)
        issues = environment_issues(device, [optimizer])
        try:
            for _ in range(_STEPS):
                step(*batch)
        except CaptureError as error:
            issues.append(Issue("capture", error.what, error.fix or ""))
    return issues


@contextmanager
def _one_rank(device: torch.device) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(
        backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _program(
    preset: str, device: torch.device
) -> tuple[Optimizer, Callable[..., torch.Tensor], list[torch.Tensor]]:
    """Returns an optimizer, a graphed training step with it, and its batch."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    import shardgrad
    from shardgrad.programs.train.config import TrainConfig
    from shardgrad.programs.train.optimizer import build_optimizer
    from shardgrad.programs.train.sharding import build_model

    config = TrainConfig(preset=preset)
    model = build_model(config, init_device_mesh(device.type, (1,)), device)
    optimizer = build_optimizer(model, config)

    @shardgrad.graphed_step(model, optimizer)
    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = model.loss(tokens, targets)
        loss.backward()
        shardgrad.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return optimizer, step, list(torch.randint(256, (2, *_SHAPE), device=device))
