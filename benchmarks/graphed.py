"""A whole training step as one graph, beside eager engines, partly captured ones, and a hand-written graph.

All contestants live in one process on one device and take turns, round by round. Each is first run alone, for
its memory and for the launches of a step.
"""

from __future__ import annotations

import dataclasses
import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from benchmarks.graph_task import BASE, CONTESTANTS, HAND_WRITTEN, ON_CPU, SHAPES, GraphTask, groups, shape_of
from benchmarks.measure import cost_on, ratios, settle, spread
from benchmarks.options import common_options
from benchmarks.record import append, environment, make_record
from benchmarks.tables import show

_MIB = 2**20
_DISTINCT_BATCHES = 8
_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}  # of losses after the warm-up: kernels differ, gradients must not
_ROOM = 0.85  # part of the device's memory that contestants may share


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long.

    Attributes:
        rounds: of which each times every contestant.
        steps: per contestant and round, launched back to back.
        warmup: steps of each contestant before the first round; enough for every capture.
        limit_s: after which contestants are left out and rounds too, so that what was measured is recorded.
        smoke: the numbers mean nothing.
    """

    rounds: int
    steps: int
    warmup: int
    limit_s: float
    smoke: bool


class Disagreement(RuntimeError):
    """A contestant does not compute what the others do."""


@click.command()
@click.option("--preset", type=click.Choice(list(SHAPES)), default="gpt2", show_default=True)
@click.option(
    "--tokens", type=click.IntRange(2), default=1024, show_default=True, help="Per step; a step is one batch."
)
@click.option("--seq-len", type=click.IntRange(2), default=1024, show_default=True, help="At most.")
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="bf16", show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--contestant", "names", type=click.Choice(CONTESTANTS), multiple=True, help="[default: all that can run]"
)
@click.option("--rounds", type=click.IntRange(2), default=20, show_default=True)
@click.option(
    "--steps", type=click.IntRange(1), default=10, show_default=True, help="Per contestant and round."
)
@click.option("--warmup", type=click.IntRange(6), default=8, show_default=True)
@click.option(
    "--limit-s", type=float, default=3600.0, show_default=True, help="Measure less rather than longer."
)
@common_options
def main(
    preset: str,
    tokens: int,
    seq_len: int,
    precision: str,
    device: str,
    names: Sequence[str],
    rounds: int,
    steps: int,
    warmup: int,
    limit_s: float,
    smoke: bool,
    out: Path | None,
) -> None:
    """Time training steps with and without graphs, on one device. --contestant may be repeated."""
    import torch

    plan = Plan(rounds, steps, warmup, limit_s, smoke)
    if smoke:
        plan = dataclasses.replace(plan, rounds=2, steps=1, warmup=6)
        preset, precision, tokens, seq_len = "tiny", "fp32", 32, 16
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    seq_len = min(seq_len, tokens)
    task = GraphTask(preset, precision, max(1, tokens // seq_len), seq_len, device)
    chosen = [name for name in CONTESTANTS if name == BASE or not names or name in names]
    left_out = {name: "needs CUDA" for name in chosen if device == "cpu" and name not in ON_CPU}
    with one_rank(device):
        record = _contest(task, plan, [name for name in chosen if name not in left_out], left_out)
    _print(record)
    if out is not None:
        append(out, record)


@contextmanager
def one_rank(device: str) -> Iterator[None]:
    """Makes this process a world of its own."""
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as meeting:
        dist.init_process_group(backend, init_method=f"file://{meeting}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _contest(task: GraphTask, plan: Plan, names: Sequence[str], left_out: dict[str, str]) -> dict[str, Any]:
    import torch

    import shardgrad.ops

    started, began_s = environment(), time.monotonic()
    alone: dict[str, dict[str, Any]] = {}
    for name in names:
        if time.monotonic() - began_s > plan.limit_s / 2:
            left_out[name] = "no time left"
            continue
        try:
            alone[name] = _alone(name, task, plan)
        except Exception as error:  # one that cannot run is no reason to measure nothing
            if name == BASE:
                raise
            left_out[name] = f"{type(error).__name__}: {str(error)[:300]}"
        _clean_up(task)
    _compare(alone, task)
    room = float("inf")
    hardware = task.device
    if task.device == "cuda":
        room = _ROOM * torch.cuda.get_device_properties(0).total_memory
        hardware = torch.cuda.get_device_name(0)
    together = groups({name: of.get("peak_reserved_nbytes", 0) for name, of in alone.items()}, room)
    samples: dict[str, Any] = {}
    for number, group in enumerate(together):
        now_s = time.monotonic()
        until_s = now_s + max(0.0, began_s + plan.limit_s - now_s) / (len(together) - number)
        try:
            measured = _rounds(group, task, plan, until_s)
        except torch.OutOfMemoryError:
            left_out.update({name: "out of memory beside the others" for name in group if name != BASE})
            continue
        finally:
            _clean_up(task)
        for name, of in measured.items():
            samples.setdefault(name, of)
    return make_record(
        "graphed",
        environment=started,
        ops_backend=shardgrad.ops.backend(),
        config=dataclasses.asdict(task)
        | dataclasses.asdict(plan)
        | {
            "hardware": hardware,
            "numel": _numel(task),
            "measured_together": together,
            "left_out": left_out,
        },
        samples=samples,
        summary=_summarise(samples, alone),
    )


class _Runner:
    """A contestant and its place in the data, which waits on the device."""

    def __init__(self, name: str, task: GraphTask) -> None:
        import torch

        from benchmarks.graph_contestants import build

        shape = (_DISTINCT_BATCHES, task.batch_size, task.seq_len + 1)
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(shape_of(task.preset).vocab_size, shape, generator=generator).to(task.device)
        self._data = cycle([(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in text])
        self._device = torch.device(task.device)
        self.contestant = build(name, task)

    def step(self) -> Any:
        return self.contestant.step(*next(self._data))

    def wait(self) -> None:
        import torch

        if self._device.type != "cpu":
            torch.accelerator.synchronize()


def _alone(name: str, task: GraphTask, plan: Plan) -> dict[str, Any]:
    """Returns what a contestant takes if nobody else is there, and its losses."""
    import torch

    on_device = task.device != "cpu"
    floor = torch.cuda.memory_reserved() if on_device else 0
    if on_device:
        torch.cuda.reset_peak_memory_stats()
    runner = _Runner(name, task)
    found: dict[str, Any] = {"losses": [float(runner.step()) for _ in range(plan.warmup + 2)]}
    if on_device:
        runner.wait()
        found["peak_reserved_nbytes"] = torch.cuda.max_memory_reserved() - floor
        found["pool_nbytes"] = runner.contestant.pool_nbytes()
        found["launches"] = _launches(runner)
    runner.contestant.close()
    return found


def _launches(runner: _Runner) -> int | None:
    """Returns how often the host gives the device something to do in a step; None without a profiler."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            runner.step()
            runner.wait()
    except RuntimeError:
        return None
    calls = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
    return sum(event.name.startswith(calls) for event in profiler.events()) or None


def _clean_up(task: GraphTask) -> None:
    import torch

    gc.unfreeze()
    gc.collect()
    if task.device != "cpu":
        torch.cuda.empty_cache()


def _compare(alone: dict[str, dict[str, Any]], task: GraphTask) -> None:
    """Raises if losses differ; adds the largest relative difference to the base's."""
    base = alone[BASE]["losses"]
    for name, of in alone.items():
        difference = max(abs(a - b) / abs(b) for a, b in zip(of.pop("losses"), list(base), strict=True))
        if not difference <= _TOLERANCE[task.precision]:
            raise Disagreement(
                f"the losses of {name} and {BASE} differ by {difference:.3g}, relative; no times are reported"
            )
        of["loss_difference"] = difference


def _rounds(
    names: Sequence[str], task: GraphTask, plan: Plan, until_s: float
) -> dict[str, dict[str, list[float]]]:
    """Returns seconds per contestant and round: of a step, and until the call of a single one returns.

    After `until_s` no round begins, but for the two that every median needs.
    """
    runners = {name: _Runner(name, task) for name in names}
    for runner in runners.values():
        for _ in range(plan.warmup):
            runner.step()
        runner.wait()
    settle()
    samples: dict[str, dict[str, list[float]]] = {name: {"wall_s": [], "host_s": []} for name in names}
    for number in range(plan.rounds):
        if number >= 2 and time.monotonic() > until_s:
            break
        for name in names if number % 2 == 0 else reversed(names):
            runner = runners[name]
            cost = cost_on(task.device, runner.step, repeats=plan.steps)
            samples[name]["wall_s"].append(cost.wall_s)
            began_s = time.perf_counter()
            runner.step()
            samples[name]["host_s"].append(time.perf_counter() - began_s)
            runner.wait()
    for runner in runners.values():
        runner.contestant.close()
    base_s = samples[BASE]["wall_s"]
    return {name: of | {f"{BASE}_wall_s": list(base_s)} for name, of in samples.items()}


def _summarise(samples: dict[str, Any], alone: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Ratios are to the base in the same round, also where two contestants never were in memory together."""
    to_base = {name: ratios(of["wall_s"], of[f"{BASE}_wall_s"]) for name, of in samples.items()}
    summary: dict[str, Any] = {}
    for name, of in samples.items():
        summary[name] = alone[name] | {
            "wall_s": spread(of["wall_s"]),
            "host_s": spread(of["host_s"]),
            f"ratio_to_{BASE}": spread(to_base[name]),
        }
        if HAND_WRITTEN in to_base:
            summary[name]["ratio_to_hand_written"] = spread(ratios(to_base[name], to_base[HAND_WRITTEN]))
    return summary


def _numel(task: GraphTask) -> int:
    import torch

    from shardgrad.training.model import Transformer, count_parameters

    with torch.device("meta"):
        return count_parameters(Transformer(shape_of(task.preset)))


def _print(record: dict[str, Any]) -> None:
    config = record["config"]
    table = Table(
        "",
        "wall ms",
        "quartiles",
        "/ FSDP2",
        "/ hand-written",
        "host µs",
        "launches",
        "peak MiB",
        "pool MiB",
    )
    table.title = (
        f"{config['preset']}, {config['numel'] / 1e6:.0f} million parameters, "
        f"{config['batch_size']} x {config['seq_len']} tokens, {config['precision']}, {config['hardware']}"
    )
    for name, of in record["summary"].items():
        low, high = of["wall_s"]["quartiles"]
        limit = of.get("ratio_to_hand_written")
        table.add_row(
            name,
            f"{of['wall_s']['median'] * 1e3:.3f}",
            f"{low * 1e3:.3f} .. {high * 1e3:.3f}",
            f"{of[f'ratio_to_{BASE}']['median']:.3f}",
            "" if limit is None else f"{limit['median']:.3f}",
            f"{of['host_s']['median'] * 1e6:.0f}",
            str(of.get("launches") or ""),
            f"{of['peak_reserved_nbytes'] / _MIB:.0f}" if "peak_reserved_nbytes" in of else "",
            f"{of['pool_nbytes'] / _MIB:.0f}" if of.get("pool_nbytes") else "",
        )
    table.caption = "\n".join(f"left out: {name}: {why}" for name, why in config["left_out"].items())
    show(table)


if __name__ == "__main__":
    main()
