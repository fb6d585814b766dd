"""`shardgrad doctor`: what is installed here, whether a training step could be one graph, what a script would
have to change.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardgrad.training.presets import PRESETS

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.optimizer import Optimizer

    from shardgrad.graphs.obstacles import Obstacle

_SHAPE = (2, 32)  # sequences and bytes in each: enough for every operation to be issued
_NONE = "none"


@click.command(short_help="Say what is installed, whether a step can be captured, what a script must change.")
@click.argument("script", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--preset",
    type=click.Choice([*PRESETS, _NONE]),
    default="tiny",
    metavar="|".join([*PRESETS, _NONE]),
    help="Model whose training step is tried; none: only look around.  [default: tiny]",
)
@click.option("--cpu", is_flag=True, help="Try the step on the CPU, whatever accelerators there are.")
def doctor(script: Path | None, preset: str, cpu: bool) -> None:
    """Print versions and devices, and what would keep a training step from being captured as a graph.

    A few steps of a built-in model run on one rank, two of them watched; nothing is written.
    The exit status is 1 if there are obstacles. For the step of your own program, see
    docs/how_to/migrate_to_graphed_step.md.

    With SCRIPT, a program for FSDP2, FSDP1, DDP, DeepSpeed or Megatron-FSDP: print instead what it would have
    to change, line by line. It is read and not run. The exit status is 1 if it has to change something.
    """
    if script is not None:
        sys.exit(_say_what_would_change(script))
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True, highlight=False)
    device = _device(cpu)
    table = Table.grid(padding=(0, 2))
    for name, value in _facts(device):
        table.add_row(f"[bold]{name}[/bold]", value)
    console.print(table)
    obstacles = _obstacles(preset, device)
    for obstacle in obstacles:
        console.print(f"\n[red]obstacle[/red] ({obstacle.kind}): ", end="")
        console.print(str(obstacle), markup=False)
    tried = "" if preset == _NONE else f", and in a training step of preset {preset} on {device}"
    count = f"{len(obstacles) or 'No'} obstacle{'' if len(obstacles) == 1 else 's'}"
    console.print(f"\n{count} to a graph in these surroundings{tried}.")
    sys.exit(1 if obstacles else 0)


def _say_what_would_change(script: Path) -> int:
    """Prints advice for a script; returns the exit status."""
    from shardgrad.migration import read_script

    try:
        advice = read_script(script)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{script} is not Python {platform.python_version()}: {error}") from error
    for each in advice:
        click.echo(each)
    changes = sum(each.weight == "change" for each in advice)
    click.echo(f"{changes} thing{'' if changes == 1 else 's'} to change, {len(advice) - changes} to look at.")
    return 1 if changes else 0


def _device(cpu: bool) -> torch.device:
    import torch

    found = None if cpu or not torch.accelerator.is_available() else torch.accelerator.current_accelerator()
    return torch.device("cpu") if found is None else torch.device(found.type, 0)


def _facts(device: torch.device) -> Iterator[tuple[str, str]]:
    import torch

    from shardgrad import ops

    yield "python", platform.python_version()
    yield "torch", torch.__version__
    yield "CUDA", torch.version.cuda or "not in this build of torch"
    if device.type == "cuda":
        yield "NCCL", ".".join(map(str, torch.cuda.nccl.version()))
    yield "shardgrad ops", ops.backend()
    module = torch.get_device_module(device)
    count = 1 if device.type == "cpu" else torch.accelerator.device_count()
    names = getattr(module, "get_device_name", lambda _: device.type)
    yield "devices", ", ".join(f"{device.type}:{index} {names(index)}" for index in range(count))


def _obstacles(preset: str, device: torch.device) -> list[Obstacle]:
    from shardgrad.graphs.surroundings import surroundings

    if preset == _NONE:
        return surroundings(device, [])
    with _one_rank(device):
        from shardgrad.graphs.preflight import differences, watch

        model, optimizer, step = _program(preset, device)
        for _ in range(2):  # in the first, state is made
            step()
        first, second = (watch(step, {"": model}, device)[1] for _ in range(2))
        met = [*surroundings(device, [optimizer]), *second.obstacles, *differences(first, second)]
    return list(dict.fromkeys(met))


@contextmanager
def _one_rank(device: torch.device) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _program(preset: str, device: torch.device) -> tuple[nn.Module, Optimizer, Callable[[], None]]:
    """Returns a model, its optimizer, and a training step on one batch that stays where it is."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    import shardgrad
    from shardgrad.training.config import TrainConfig
    from shardgrad.training.optimizer import build_optimizer
    from shardgrad.training.sharding import build_model

    config = TrainConfig(preset=preset)
    model = build_model(config, init_device_mesh(device.type, (1,)), device)
    optimizer = build_optimizer(model, config)
    tokens, targets = torch.randint(256, (2, *_SHAPE), device=device)

    def step() -> None:
        model.loss(tokens, targets).backward()
        shardgrad.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step
