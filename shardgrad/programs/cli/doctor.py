"""`shardgrad doctor`: versions and devices, and settings of this machine that prevent a graph."""

from __future__ import annotations

import platform
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import click

from shardgrad.programs.text import escaped

if TYPE_CHECKING:
    import torch


@click.command(
    short_help="Print versions and devices; check a machine, or a program.",
    epilog="\b\nExamples:\n  shardgrad doctor\n  shardgrad doctor --audit train:main",
)
@click.option(
    "--audit",
    metavar="MODULE:FUNCTION",
    help="Instead, run your own program on several ranks, whatever its engine, and compare what it "
    "trains with a run without the engine. FUNCTION takes no arguments, trains for a few steps and "
    "returns the model.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=2),
    help="Ranks of the program audited.  [default: 2]",
)
@click.pass_context
def doctor(ctx: click.Context, /, audit: str | None, ranks: int | None) -> None:
    """Print versions and devices, and what of this machine prevents a training step from being
    captured as one graph.

    The exit status is 1 if there are such issues. Whether the step of your own program can be
    captured, its first calls under graphed_step say.
    """
    if audit is not None:
        _audit(audit, ranks or 2)
    if ranks is not None:
        raise click.UsageError("--ranks requires --audit: omit it, or add --audit.", ctx)
    from shardgrad.graphs.preflight import environment_issues
    from shardgrad.programs.train.parallel import choose_device

    device = choose_device("auto", 0)

    for name, value in _facts(device):
        click.echo(f"{click.style(f'{name:13}', bold=True)}  {value}")
    issues = list(environment_issues(device))
    for issue in issues:
        click.echo(f"\n{click.style('issue', fg='red')}: {issue}")
    count = f"{len(issues) or 'No'} issue{'' if len(issues) == 1 else 's'}"
    click.echo(f"\n{count} that would prevent a graph in this environment.")
    sys.exit(1 if issues else 0)


def _audit(target: str, ranks: int) -> NoReturn:
    """Prints where a program departs from itself without its engine; exits with 1 if it does."""
    from shardgrad.programs.function_named import function_named

    function_named(target, flag="--audit")  # before PyTorch is imported, which takes seconds
    from shardgrad.programs.audit.audit import audit

    signal.signal(signal.SIGINT, signal.default_int_handler)  # which ends the ranks
    passed, sentence = audit(target, ranks=ranks)
    click.echo(escaped(sentence))
    sys.exit(0 if passed else 1)


def _facts(device: torch.device) -> Iterator[tuple[str, str]]:
    import torch

    from shardgrad import ops, version
    from shardgrad.features.symmetric_memory import why_not_here
    from shardgrad.programs.train.parallel import name_of_device

    yield "shardgrad", version.described()
    yield "python", platform.python_version()
    yield "torch", torch.__version__
    cuda = torch.version.cuda or "not in this build of torch"
    if torch.version.cuda and not torch.cuda.is_available():
        cuda += ", and no GPU was found"
    yield "CUDA", cuda
    if device.type == "cuda":
        yield "NCCL", ".".join(map(str, torch.cuda.nccl.version()))
    yield "symm_mem", why_not_here(device) or "available"
    has_kernels = device.type == "cpu" or ops.has_kernels(device.type)
    yield "shardgrad ops", ops.backend() + ("" if has_kernels else f"; reference on {device.type}")
    count = 1 if device.type == "cpu" else torch.accelerator.device_count()
    devices = [torch.device(device.type, index) for index in range(count)]
    yield "devices", ", ".join(f"{one} {name_of_device(one)}" for one in devices)
