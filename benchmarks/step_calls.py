"""How many functions a training step calls, in Python and in C, and which: what the host does,
counted.

One step of each engine is watched with `sys.setprofile` on rank 0 of two gloo ranks in fp32, after
some steps that are not. Everything counts: the model, the optimizer, torch and the engine. Counts
do not depend on what else a machine does, so they say whether a change made the host's work less.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.run import Run, option
from benchmarks.workers import on_ranks

_RANKS = 2
_WARM_UP_STEPS = 6
_LISTED = 40
ENGINES = ("fsdp2", "shardgrad", "shardgrad and its AdamW", "collectives")


@click.command()
@option("--preset", "presets", multiple=True, default=["tiny", "small"], help="Model; repeatable.")
@click.pass_obj
def main(run: Run, presets: Sequence[str]) -> None:
    """Count the functions that a step calls."""
    samples: dict[str, Any] = {}
    for preset in presets[:1] if run.smoke else presets:
        samples[preset] = {
            name: on_ranks("benchmarks.step_calls:count", _RANKS, preset, name)[0]
            for name in ENGINES
        }
    run.finish(
        "step_calls",
        config={"ranks": _RANKS, "warm_up_steps": _WARM_UP_STEPS, "presets": list(samples)},
        samples=samples,
        summary={
            preset: {
                name: {kind: sum(found[kind].values()) for kind in ("python", "c")}
                for name, found in of.items()
            }
            for preset, of in samples.items()
        },
    )


def count(preset: str, engine: str) -> dict[str, dict[str, int]]:
    """Returns how often a step calls each function, the most frequent ones by name and the rest
    together.
    """
    import torch
    import torch.distributed as dist

    import shardgrad
    from benchmarks.engines import floors, torch_and_shardgrad
    from benchmarks.engines.program import micro_batches
    from benchmarks.engines.task import Task
    from benchmarks.models import MODELS

    device = torch.device("cpu")
    task = Task(preset=preset, ranks=_RANKS, batch_size=1, seq_len=32)
    makers: dict[str, Callable[[], Callable[..., Any]]] = {
        "fsdp2": lambda: torch_and_shardgrad.fsdp2(task, device).step,
        "shardgrad": lambda: torch_and_shardgrad.ours(task, device).step,
        "shardgrad and its AdamW": lambda: (
            torch_and_shardgrad._sharded(
                task, device, shardgrad.fully_shard, owns_optimizer=True
            ).step
        ),
        "collectives": lambda: floors.collectives(task, device).step,
    }
    step = makers[engine]()
    batches = micro_batches(task, dist.get_rank(), MODELS[preset].vocab_size, device)
    for number in range(_WARM_UP_STEPS):
        step(batches[number])
    found: dict[str, Counter[str]] = {"python": Counter(), "c": Counter()}

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            place = "/".join(Path(frame.f_code.co_filename).parts[-2:])
            found["python"][f"{place}:{frame.f_code.co_qualname}"] += 1
        elif event == "c_call":
            found["c"][getattr(argument, "__qualname__", str(argument))] += 1

    gc.disable()  # a collection's callbacks are not the step's
    sys.setprofile(note)
    try:
        step(batches[_WARM_UP_STEPS])
    finally:
        sys.setprofile(None)
        gc.enable()
    dist.barrier()
    del found["c"]["setprofile"]
    return {kind: _shortened(calls) for kind, calls in found.items()}


def _shortened(calls: Counter[str]) -> dict[str, int]:
    listed = dict(calls.most_common(_LISTED))
    rest = calls.total() - sum(listed.values())
    return {**listed, "all others": rest} if rest else listed
