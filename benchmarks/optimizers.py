"""What an optimizer step costs: over many small parameters, over one large model, and with
clipping.

* `one_unit`: about 600 parameters of up to 256 elements in one unit; what is measured is host time;
* `many_units`: the same in units of nine;
* `large`: 124 million parameters on one rank, beside torch's fused kernel over one flat tensor of
that size,
  which no engine can beat by much, and beside a copy of memory;
* `clip`: clipping and step of the tiny preset on two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import shardgrad
from benchmarks.measure import Cost, interleaved, over_ranks, samples_of, spread, summarise
from benchmarks.models import Chain
from benchmarks.run import Run, option
from benchmarks.workers import on_ranks
from shardgrad.programs.train.model import Transformer
from shardgrad.programs.train.presets import transformer_config

_NBYTES_PER_PARAMETER = 28  # float32: read and write weight and two moments, read the gradient

Steps = dict[str, Callable[[], object]]


@click.command()
@option(
    "--case",
    "names",
    type=click.Choice(["one_unit", "many_units", "large", "clip"]),
    multiple=True,
    help="What to measure; repeatable.  [default: all; on a GPU, those of one rank]",
)
@option("--rounds", type=click.IntRange(2), default=15, help="Turns of each engine.")
@option("--threads", type=click.IntRange(1), default=1, help="Threads of torch, per rank.")
@option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where to compute.")
@click.pass_obj
def main(run: Run, names: Sequence[str], rounds: int, threads: int, device: str) -> None:
    """Measure optimizer steps."""
    if run.smoke:
        rounds = 2
    for name in names or [
        name for name, case in CASES.items() if device == "cpu" or case.ranks == 1
    ]:
        case = CASES[name]
        by_rank = on_ranks(
            "benchmarks.optimizers:measure", case.ranks, name, rounds, threads, device, run.smoke
        )
        costs, numel = over_ranks([costs for costs, _ in by_rank]), by_rank[0][1]
        summary = summarise(costs, case.base)
        for contender, of in costs.items():
            nbytes = numel * (8 if contender == "copy" else _NBYTES_PER_PARAMETER)
            summary[contender]["bytes_per_s"] = spread([nbytes / cost.wall_s for cost in of])
        run.finish(
            "optimizers",
            config={
                "case": name,
                "ranks": case.ranks,
                "rounds": rounds,
                "threads": threads,
                "device": device,
                "numel": numel,
            },
            samples=samples_of(costs),
            summary=summary,
        )


def measure(
    name: str, rounds: int, threads: int, device: str, smoke: bool
) -> tuple[dict[str, list[Cost]], int]:
    """Returns a rank's costs, and the elements of the model."""
    torch.set_num_threads(threads)
    torch.set_default_device(device)
    steps, numel = CASES[name].make(smoke)
    repeats = 1 if name == "large" or smoke else 5
    costs = interleaved(
        steps,
        rounds,
        repeats=repeats,
        warmup=2 if smoke else 3,
        device=device,
        barrier=dist.barrier,
    )
    return costs, numel


def _small(smoke: bool, *, units: bool) -> tuple[Steps, int]:
    count = 3 if smoke else 66

    def make(name: str) -> Callable[[], object]:
        model = Chain(count, layers=4)
        _shard(name, [*model.units, model] if units else [model])
        # Not a backward's gradients: those of a deep chain are so small that their squares are
        # subnormal.
        return _adamw(name, _with_gradients(model)).step

    numel = sum(p.numel() for p in Chain(count, layers=4).parameters())
    return {name: make(name) for name in ("fsdp2", "shardgrad")}, numel


def _large(smoke: bool) -> tuple[Steps, int]:
    width, layers, vocabulary = (64, 2, 128) if smoke else (768, 12, 50257)
    sizes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    blocks = [nn.Sequential(*(nn.Linear(a, b) for a, b in sizes)) for _ in range(layers)]
    model = nn.Sequential(nn.Embedding(vocabulary, width), *blocks)  # never run
    numel = sum(p.numel() for p in model.parameters())
    _shard("shardgrad", [*model[1:], model])
    ours = _adamw("shardgrad", _with_gradients(model))
    flat = _adamw("flat", _with_gradients(nn.ParameterList([torch.zeros(numel)])))
    source, target = torch.ones(numel), torch.empty(numel)
    return {"flat": flat.step, "shardgrad": ours.step, "copy": lambda: target.copy_(source)}, numel


def _clip(smoke: bool) -> tuple[Steps, int]:
    config = transformer_config("tiny", {})

    def make(name: str) -> Callable[[], object]:
        torch.manual_seed(0)
        model = Transformer(config)
        _shard(name, [*model.layers, model])
        tokens = torch.randint(256, (1, 16))
        model.loss(tokens, tokens).backward()
        params = list(model.parameters())
        optimizer = _adamw(name, params)

        def ours() -> None:
            shardgrad.clip_grad_norm_(params, 1.0)
            optimizer.step()

        def theirs() -> None:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()

        return ours if name == "shardgrad" else theirs

    numel = sum(p.numel() for p in Transformer(config).parameters())
    return {name: make(name) for name in ("fsdp2", "shardgrad")}, numel


def _shard(name: str, modules: Sequence[Any]) -> None:
    for module in modules:
        (shardgrad.fully_shard if name == "shardgrad" else torch_fully_shard)(module)


def _with_gradients(model: nn.Module) -> list[Any]:
    params = list(model.parameters())
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    return params


def _adamw(name: str, params: Sequence[Any]) -> Any:
    package: Any = shardgrad.optim if name == "shardgrad" else torch.optim
    return package.AdamW(params, lr=1e-4, weight_decay=0.1, fused=True)


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        make: given whether it is a smoke run, returns steps by name, and the elements of a model.
        ranks: of its process group.
        base: what the others are compared with.
    """

    make: Callable[[bool], tuple[Steps, int]]
    ranks: int = 1
    base: str = "fsdp2"


CASES = {
    "one_unit": Case(partial(_small, units=False)),
    "many_units": Case(partial(_small, units=True)),
    "large": Case(_large, base="flat"),
    "clip": Case(_clip, ranks=2),
}
