"""Weights to a tensor-parallel receiver: sent shard to shard, against gathered and broadcast.

Half of the ranks train, the other half receive, each its rows, columns and fused projections of a
decoder. The way that needs no plan gathers every parameter on all trainers and broadcasts it to all
receivers, which cut out what is theirs. Both end in the same tensors, which is looked at first.
"""

from __future__ import annotations

from collections.abc import Callable

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardgrad
from benchmarks.measure import Cost, interleaved, over_ranks, samples_of, summarize
from benchmarks.run import Run, option
from benchmarks.workers import on_ranks
from shardgrad.features.send_weights import WeightPlan

_FIELDS = ("wall_s", "cpu_s", "loopback_nbytes")

Cuts = list[tuple[str, int | None]]


@click.command()
@option("--width", type=click.IntRange(16), default=1024, help="Of the decoder.")
@option("--layers", type=click.IntRange(1), default=10, help="Of the decoder.")
@option("--ranks", type=click.IntRange(2), default=4, help="Half of them train.")
@option("--rounds", type=click.IntRange(2), default=7, help="Turns of each way.")
@click.pass_obj
def main(run: Run, width: int, layers: int, ranks: int, rounds: int) -> None:
    """Measure a sync of all weights, in bf16."""
    if run.smoke:
        width, layers, rounds = 32, 2, 2
    results = on_ranks("benchmarks.send_weights:measure", ranks, width, layers, rounds)
    costs = over_ranks([cost for cost, _ in results])
    run.finish(
        "send_weights",
        config={
            "ranks": ranks,
            "rounds": rounds,
            "width": width,
            "layers": layers,
            "dtype": "bfloat16",
            **results[0][1],
        },
        samples=samples_of(costs, *_FIELDS),
        summary=summarize(costs, "gather and broadcast", *_FIELDS),
    )


def measure(width: int, layers: int, rounds: int) -> tuple[dict[str, list[Cost]], dict[str, int]]:
    """Returns a rank's costs by way, and the sizes of the model and of the messages."""
    half = dist.get_world_size() // 2
    mesh = DeviceMesh("cpu", list(range(half)))
    receivers = list(range(half, 2 * half))
    layout = _layout(layers)
    plans: list[WeightPlan | None] = [None]
    model = _decoder(width, layers)
    numel = sum(param.numel() for param in model.parameters())
    shapes = {name: param.shape for name, param in model.named_parameters()}
    if dist.get_rank() < half:
        for layer in model:
            shardgrad.fully_shard(list(layer.children()), mesh=mesh)
        shardgrad.fully_shard(model, mesh=mesh)
        plans[0] = shardgrad.plan_weights(shardgrad.export_table(model), layout, receivers)
    dist.broadcast_object_list(plans, src=0)
    plan = plans[0]
    assert plan is not None
    if dist.get_rank() < half:
        works = {
            "gather and broadcast": lambda: _gather_and_broadcast(model),
            "send_weights": lambda: shardgrad.send_weights(model, plan),
        }
    else:
        del model
        place = dist.get_rank() - half
        tensors = {
            name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in plan.shapes.items()
        }
        works = {
            "gather and broadcast": lambda: _receive_and_cut(tensors, shapes, layout, place, half),
            "send_weights": lambda: shardgrad.receive_weights(tensors, plan),
        }
        _require_the_same(works, tensors)
    if dist.get_rank() < half:
        for work in works.values():
            work()
    costs = interleaved(works, rounds, barrier=dist.barrier)
    return costs, {"parameters": numel, "planned_nbytes": plan.nbytes}


def _require_the_same(
    works: dict[str, Callable[[], object]], tensors: dict[str, torch.Tensor]
) -> None:
    """Runs each way once, and looks whether they leave the same."""
    found = []
    for work in works.values():
        work()
        found.append({name: tensor.clone() for name, tensor in tensors.items()})
        for tensor in tensors.values():
            tensor.zero_()
    if not all(torch.equal(found[0][name], found[1][name]) for name in tensors):
        raise RuntimeError("the two ways do not leave the same weights")


def _gather_and_broadcast(model: nn.Module) -> None:
    for param in model.parameters():
        dist.broadcast(param.full_tensor().detach(), src=0)


def _receive_and_cut(
    tensors: dict[str, torch.Tensor],
    shapes: dict[str, torch.Size],
    layout: dict[str, Cuts],
    place: int,
    receivers: int,
) -> None:
    whole: dict[str, torch.Tensor] = {}
    waiting = {cuts[-1][0]: target for target, cuts in layout.items()}
    for name, shape in shapes.items():
        whole[name] = torch.empty(shape, dtype=torch.bfloat16)
        dist.broadcast(whole[name], src=0)
        if name in waiting:  # the last part of this tensor
            parts = [
                whole.pop(part) if dim is None else whole.pop(part).chunk(receivers, dim)[place]
                for part, dim in layout[waiting[name]]
            ]
            tensors[waiting[name]].copy_(torch.cat(parts))


def _decoder(width: int, layers: int) -> nn.Sequential:
    """Returns the projections of a decoder, which only their shapes matter of."""
    torch.manual_seed(0)
    sizes = {
        **{"q": (width, width), "k": (width, width // 4), "v": (width, width // 4)},
        **{"o": (width, width), "gate": (width, 5 * width // 2), "up": (width, 5 * width // 2)},
        "down": (5 * width // 2, width),
    }
    return nn.Sequential(
        *(
            nn.ModuleDict(
                {
                    **{
                        name: nn.Linear(*size, bias=False, dtype=torch.bfloat16)
                        for name, size in sizes.items()
                    },
                    "norm": nn.RMSNorm(width, dtype=torch.bfloat16),
                }
            )
            for _ in range(layers)
        )
    )


def _layout(layers: int) -> dict[str, Cuts]:
    parts: dict[str, Cuts] = {
        "qkv": [("q", 0), ("k", 0), ("v", 0)],
        "o": [("o", 1)],
        "gate_up": [("gate", 0), ("up", 0)],
        "down": [("down", 1)],
        "norm": [("norm", None)],
    }
    return {
        f"{layer}.{target}.weight": [(f"{layer}.{name}.weight", dim) for name, dim in cuts]
        for layer in range(layers)
        for target, cuts in parts.items()
    }
