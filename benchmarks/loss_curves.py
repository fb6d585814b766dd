"""Loss curves of the tiny preset on real text: `shardgrad.optim.AdamW` beside torch's, same data,
same start.

Not a timing. What it answers: does training go the same way? Four runs on two ranks, each with
clipping and a schedule: FSDP2 with torch's fused AdamW, shardgrad with the same, shardgrad with its
own, and as a yardstick FSDP2 with torch's other AdamW. That one rounds elsewhere too, and training
enlarges a rounding.
"""

from __future__ import annotations

from typing import Any

import click
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import shardgrad
from benchmarks.models import build_model
from benchmarks.run import Run, option
from benchmarks.workers import on_ranks
from shardgrad.programs.train.corpus import Sampler, load_corpus

_RANKS = 2
_BASE = "fsdp2, torch.optim"
_RUNS = (
    _BASE,
    "shardgrad, torch.optim",
    "shardgrad, shardgrad.optim",
    "fsdp2, torch.optim not fused",
)


@click.command()
@option("--steps", type=click.IntRange(2), default=200, help="Steps of each run.")
@click.pass_obj
def main(run: Run, steps: int) -> None:
    """Train four times and compare the losses."""
    if run.smoke:
        steps = 3
    curves = on_ranks("benchmarks.loss_curves:train_all", _RANKS, steps)[0]
    run.finish(
        "loss_curves",
        config={"ranks": _RANKS, "steps": steps},
        samples=curves,
        summary={name: _summarise(curve, curves[_BASE]) for name, curve in curves.items()},
    )


def train_all(steps: int) -> dict[str, list[float]]:
    """Returns the mean loss over ranks of every step of every run."""
    return {name: _train(*name.split(", "), steps) for name in _RUNS}


def _train(engine: str, optimizers: str, steps: int) -> list[float]:
    fully_shard: Any = shardgrad.fully_shard if engine == "shardgrad" else torch_fully_shard
    model: Any = build_model("tiny", torch.device("cpu"), wrap=fully_shard)
    ours = optimizers == "shardgrad.optim"
    optimizer: Any = (shardgrad.optim if ours else torch.optim).AdamW(
        model.parameters(),
        lr=3e-3,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=optimizers != "torch.optim not fused",
    )
    clip = shardgrad.clip_grad_norm_ if ours else torch.nn.utils.clip_grad_norm_
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps + 1)
    corpus = load_corpus(None, limit_nbytes=1 << 20, validation_fraction=0.1, seq_len=64)
    sampler = Sampler(corpus.train, seq_len=64, seed=0)
    losses = []
    for step in range(steps):
        tokens, targets = sampler.batch((step * _RANKS + dist.get_rank()) * 4, 4)
        loss = model.loss(tokens, targets)
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / _RANKS)
    return losses


def _summarise(curve: list[float], base: list[float]) -> dict[str, float]:
    differences = [abs(a - b) / b for a, b in zip(curve, base, strict=True)]
    tail = max(1, len(curve) // 10)
    return {
        "first_loss": curve[0],
        "last_loss": sum(curve[-tail:]) / tail,
        "largest_relative_difference": max(differences),
        "mean_relative_difference": sum(differences) / len(differences),
    }
