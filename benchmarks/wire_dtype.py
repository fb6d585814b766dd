"""Loss curves with gradients in bfloat16 on the wire, beside float32 and other seeds.

Not a timing. What it answers: does training go the same way? A difference in the last digit of a
gradient grows with training, so the curves are judged by how far three float32 runs with other
initial values and other data lie apart. `reduce_dtype=torch.bfloat16` is shown too, which sends as
little as bfloat16.

A curve takes minutes. With `--keep FOLDER` each is written there when it is through, and a call
that was cut short goes on behind it.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardgrad
from benchmarks.models import MODELS, build_model
from benchmarks.run import Run, option
from benchmarks.workers import started
from shardgrad.programs.train.corpus import Sampler, load_corpus

_SEQ_LEN, _SEQUENCES = 64, 4  # of a rank
_BASE = "float32"


class _Curve(NamedTuple):
    seed: int
    options: dict[str, Any]  # of `fully_shard`


_CURVES = {
    _BASE: _Curve(0, {}),
    "bfloat16 on the wire": _Curve(
        0, {"gradient_policy": shardgrad.GradientPolicy(wire_dtype=torch.bfloat16)}
    ),
    "bfloat16 reduction": _Curve(
        0, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}
    ),
    "float32, second seed": _Curve(1, {}),
    "float32, third seed": _Curve(2, {}),
}


@click.command()
@option("--preset", type=click.Choice(list(MODELS)), default="small", help="Model.")
@option("--ranks", type=click.IntRange(2), default=2, help="Ranks.")
@option("--steps", type=click.IntRange(2), default=500, help="Steps of each of the five runs.")
@option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Folder for curves that are through; those of this commit that lie there are not run "
    "again.",
)
@click.pass_obj
def main(run: Run, preset: str, ranks: int, steps: int, keep: Path | None) -> None:
    """Train with each wire dtype and with other seeds, and compare the losses."""
    if run.smoke:
        preset, steps = "tiny", 3
    config = {"preset": preset, "ranks": ranks, "steps": steps}
    curves = {}
    with started(ranks) as call:
        for name in _CURVES:
            known = {**config, "curve": name, "git": run.environment["git"]}
            curves[name] = _kept(keep, known)
            if not curves[name]:
                [curves[name], *_] = call("benchmarks.wire_dtype:train", preset, steps, name)
                _keep(keep, known, curves[name])
    run.finish(
        "wire_dtype",
        config=config,
        samples=curves,
        summary={name: _summarise(curve, curves[_BASE]) for name, curve in curves.items()},
    )


def _file(keep: Path, known: dict[str, Any]) -> Path:
    return keep / f"{known['curve'].replace(', ', '-').replace(' ', '_')}.json"


def _kept(keep: Path | None, known: dict[str, Any]) -> list[float]:
    """Returns a curve that is through, if it was measured as this one would be; else nothing."""
    if keep is None or not _file(keep, known).exists():
        return []
    found = json.loads(_file(keep, known).read_text())
    return found["losses"] if found["of"] == known else []


def _keep(keep: Path | None, known: dict[str, Any], losses: list[float]) -> None:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        part = _file(keep, known).with_suffix(".part")
        part.write_text(json.dumps({"of": known, "losses": losses}))
        part.replace(_file(keep, known))


def train(preset: str, steps: int, name: str) -> list[float]:
    """Returns the mean loss over ranks of every step of one run."""
    curve = _CURVES[name]
    return _train(preset, steps, curve.seed, **curve.options)


def _train(preset: str, steps: int, seed: int, **options: Any) -> list[float]:
    model: Any = build_model(
        preset, torch.device("cpu"), wrap=partial(shardgrad.fully_shard, **options), seed=seed
    )
    optimizer = shardgrad.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=steps + 1)
    corpus = load_corpus(None, limit_nbytes=1 << 20, validation_fraction=0.1, seq_len=_SEQ_LEN)
    sampler = Sampler(corpus.train, seq_len=_SEQ_LEN, seed=seed)
    losses = []
    for step in range(steps):
        first = (step * dist.get_world_size() + dist.get_rank()) * _SEQUENCES
        loss = model.loss(*sampler.batch(first, _SEQUENCES))
        loss.backward()
        shardgrad.clip_grad_norm_(model, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def _summarise(curve: list[float], base: list[float]) -> dict[str, float]:
    differences = [abs(a - b) / b for a, b in zip(curve, base, strict=True)]
    tail = max(1, len(curve) // 10)
    return {
        "first_loss": curve[0],
        "last_loss": sum(curve[-tail:]) / tail,
        "largest_relative_difference": max(differences),
        "mean_relative_difference": sum(differences) / len(differences),
        "mean_relative_difference_of_the_last_tenth": sum(differences[-tail:]) / tail,
    }
