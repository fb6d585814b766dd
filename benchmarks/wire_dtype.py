"""Loss curves with gradients in bfloat16 on the wire, beside float32 and beside the spread of three seeds.

Not a timing. What it answers: does training go the same way? A difference in the last digit of a gradient
grows with training, so the curves are judged by how far three float32 runs with other initial values and
other data lie apart. `reduce_dtype=torch.bfloat16` is shown too, which sends as little.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardgrad
from benchmarks.models import MODELS, build_model
from benchmarks.run import Run, option
from benchmarks.workers import on_ranks
from shardgrad.train.corpus import Sampler, load_corpus

_SEQ_LEN, _SEQUENCES = 64, 4  # of a rank
_BASE = "float32"
_WIRE = "bfloat16 on the wire"
_SEEDS = ("float32, second seed", "float32, third seed")
_REDUCED = "bfloat16 reduction"


@click.command()
@option("--preset", type=click.Choice(list(MODELS)), default="small", help="Model.")
@option("--ranks", type=click.IntRange(2), default=2, help="Ranks.")
@option("--steps", type=click.IntRange(2), default=500, help="Steps of each of the five runs.")
@click.pass_obj
def main(run: Run, preset: str, ranks: int, steps: int) -> None:
    """Train with either wire dtype and with other seeds, and compare the losses."""
    if run.smoke:
        preset, steps = "tiny", 3
    curves = on_ranks("benchmarks.wire_dtype:train_all", ranks, preset, steps)[0]
    run.finish(
        "wire_dtype",
        config={"preset": preset, "ranks": ranks, "steps": steps},
        samples=curves,
        summary={name: _summarise(curve, curves[_BASE]) for name, curve in curves.items()},
    )


def train_all(preset: str, steps: int) -> dict[str, list[float]]:
    """Returns the mean loss over ranks of every step of every run."""
    train = partial(_train, preset, steps)
    curves = {
        _BASE: train(0),
        _WIRE: train(0, gradient_policy=shardgrad.GradientPolicy(wire_dtype=torch.bfloat16)),
        _REDUCED: train(0, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)),
    }
    return curves | {name: train(seed) for seed, name in enumerate(_SEEDS, 1)}


def _train(preset: str, steps: int, seed: int, **options: Any) -> list[float]:
    model: Any = build_model(
        preset, torch.device("cpu"), wrap=partial(shardgrad.fully_shard, **options), seed=seed
    )
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
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
