"""What an optimizer step costs: over many small parameters, over one large model, and with clipping.

Four cases, each interleaved round by round in the same processes:

* `one_unit`: about 600 parameters of up to 256 elements in one unit; what is measured is host time;
* `many_units`: the same in units of nine;
* `large`: 124 million parameters on one rank, beside torch's fused kernel over one flat tensor of that size,
  which no engine can beat by much, and beside a copy of memory;
* `clip`: clipping and step of the tiny preset on two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from benchmarks.measure import ratios, spread
from benchmarks.options import common_options, device_option
from benchmarks.ranks import on_ranks
from benchmarks.record import append, environment, make_record
from benchmarks.tables import show

_CASES = {"one_unit": 1, "many_units": 1, "large": 1, "clip": 2}  # and their ranks
_BASE = {"one_unit": "fsdp2", "many_units": "fsdp2", "large": "flat", "clip": "fsdp2"}
_NBYTES_PER_PARAMETER = 28  # float32: read and write weight and two moments, read the gradient


@click.command()
@click.option(
    "--case",
    "cases",
    type=click.Choice(list(_CASES)),
    multiple=True,
    help="[default: all; on a GPU, those of one rank]",
)
@click.option("--rounds", type=click.IntRange(2), default=15, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Of torch, per rank.")
@device_option
@common_options
def main(cases: Sequence[str], rounds: int, threads: int, device: str, smoke: bool, out: Path | None) -> None:
    """Measure optimizer steps. --case may be repeated."""
    if smoke:
        rounds = 2
    cases = cases or [case for case, ranks in _CASES.items() if device == "cpu" or ranks == 1]
    for case in cases:
        started = environment()
        by_rank = on_ranks(
            "benchmarks.optimizer:measure",
            _CASES[case],
            case,
            rounds,
            threads,
            device,
            smoke,
            keep_heap=True,
        )
        samples, numel, backend = by_rank[0]
        for name in samples:  # the step is over when the slowest rank is
            samples[name] = [max(walls) for walls in zip(*(s[name] for s, _, _ in by_rank), strict=True)]
        record = make_record(
            "optimizer",
            environment=started,
            ops_backend=backend,
            config={
                "case": case,
                "ranks": _CASES[case],
                "rounds": rounds,
                "threads": threads,
                "device": device,
                "numel": numel,
                "smoke": smoke,
            },
            samples=samples,
            summary=_summarise(samples, _BASE[case], numel),
        )
        _print(record)
        if out is not None:
            append(out, record)


def measure(
    case: str, rounds: int, threads: int, device: str, smoke: bool
) -> tuple[dict[str, list[float]], int, str]:
    """Returns seconds per contestant and round, elements of a model, and which ops ran."""
    import torch
    import torch.distributed as dist

    import shardgrad.ops
    from benchmarks.measure import cost_on, settle

    torch.set_num_threads(threads)
    torch.set_default_device(device)
    steps, numel = _CONTESTS[case](smoke)
    for step in steps.values():
        for _ in range(2 if smoke else 3):
            step()
    settle()
    repeats = 1 if case == "large" or smoke else 5
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in steps if number % 2 == 0 else reversed(steps):
            cost = cost_on(device, steps[name], repeats=repeats, barrier=dist.barrier)
            samples[name].append(cost.wall_s)
    return samples, numel, shardgrad.ops.backend()


_Contest = tuple[dict[str, Callable[[], Any]], int]


def _small(smoke: bool, *, units: bool) -> _Contest:
    import torch

    from benchmarks.chain import Chain

    def make(name: str) -> Callable[[], Any]:
        model = Chain(3 if smoke else 66, layers=4)
        _shard(name, [*model.units, model] if units else [model])
        params = list(model.parameters())
        for param in params:
            # Not a backward's: those of a deep chain are so small that their squares are subnormal, and slow.
            param.grad = torch.full_like(param, 1e-3)
        return _adamw(name, params).step

    numel = sum(p.numel() for p in Chain(3 if smoke else 66, layers=4).parameters())
    return {name: make(name) for name in ("fsdp2", "shardgrad")}, numel


def _large(smoke: bool) -> _Contest:
    import torch
    from torch import nn

    width, layers, vocabulary = (64, 2, 128) if smoke else (768, 12, 50257)

    def block() -> nn.Module:
        sizes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
        return nn.Sequential(*(nn.Linear(a, b) for a, b in sizes))  # never run

    def make(name: str) -> tuple[Callable[[], Any], int]:
        if name == "flat":
            params = [nn.Parameter(torch.zeros(numel))]
        else:
            model = nn.Sequential(nn.Embedding(vocabulary, width), *(block() for _ in range(layers)))
            _shard(name, [*model[1:], model])
            params = list(model.parameters())
        for param in params:
            param.grad = torch.full_like(param, 1e-3)
        return _adamw(name, params).step, sum(p.numel() for p in params)

    numel = 0
    ours, numel = make("shardgrad")
    source, target = torch.ones(numel), torch.empty(numel)
    steps = {"flat": make("flat")[0], "shardgrad": ours, "copy": lambda: target.copy_(source)}
    return steps, numel


def _clip(smoke: bool) -> _Contest:
    import torch
    from torch import nn

    import shardgrad
    from shardgrad.train.model import Transformer
    from shardgrad.train.presets import transformer_config

    def make(name: str) -> Callable[[], Any]:
        torch.manual_seed(0)
        model: nn.Module = Transformer(transformer_config("tiny", {}))
        _shard(name, [*model.layers, model])
        tokens = torch.randint(256, (1, 16))
        model.loss(tokens, tokens).backward()
        params = list(model.parameters())
        optimizer = _adamw(name, params)

        def ours() -> None:
            shardgrad.clip_grad_norm_(params, 1.0)
            optimizer.step()
            for grads in _grad_groups_of(model):
                grads.require_shard().pending_scale = None  # as the next reduction does

        def theirs() -> None:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()

        return ours if name == "shardgrad" else theirs

    numel = sum(p.numel() for p in Transformer(transformer_config("tiny", {})).parameters())
    return {name: make(name) for name in ("fsdp2", "shardgrad")}, numel


def _grad_groups_of(model: Any) -> list[Any]:
    from shardgrad.engine.unit import units_under

    return [grads for unit in units_under(model) for grads in unit.grad_groups]


def _shard(name: str, modules: Sequence[Any]) -> None:
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    import shardgrad

    for module in modules:
        (shardgrad.fully_shard if name == "shardgrad" else torch_fully_shard)(module)


def _adamw(name: str, params: Sequence[Any]) -> Any:
    import torch

    import shardgrad

    home: Any = shardgrad.optim if name == "shardgrad" else torch.optim
    return home.AdamW(params, lr=1e-4, weight_decay=0.1, fused=True)


_CONTESTS: dict[str, Callable[[bool], _Contest]] = {
    "one_unit": partial(_small, units=False),
    "many_units": partial(_small, units=True),
    "large": _large,
    "clip": _clip,
}


def _summarise(samples: dict[str, list[float]], base: str, numel: int) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for name, seconds in samples.items():
        nbytes = 8 * numel if name == "copy" else _NBYTES_PER_PARAMETER * numel
        summary[name] = {
            "wall_s": spread(seconds),
            f"ratio_to_{base}": spread(ratios(seconds, samples[base])),
            "bytes_per_s": spread([nbytes / each for each in seconds]),
        }
    return summary


def _print(record: dict[str, Any]) -> None:
    config, base = record["config"], _BASE[record["config"]["case"]]
    table = Table("", "milliseconds", "quartiles", f"/ {base}", "GB/s")
    table.title = f"AdamW, {config['case']}: {config['numel']:,} parameters, {config['ranks']} ranks"
    for name, of in record["summary"].items():
        low, high = of["wall_s"]["quartiles"]
        table.add_row(
            name,
            f"{of['wall_s']['median'] * 1e3:.3f}",
            f"{low * 1e3:.3f} .. {high * 1e3:.3f}",
            f"{of[f'ratio_to_{base}']['median']:.3f}",
            f"{of['bytes_per_s']['median'] / 1e9:.1f}",
        )
    show(table)


if __name__ == "__main__":
    main()
