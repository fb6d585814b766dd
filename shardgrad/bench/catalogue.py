"""Who takes part in `shardgrad bench`, what each needs, and what it cannot do; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from shardgrad.bench.task import Task

__all__ = ["BASE", "CATALOGUE", "COMPUTE", "DEFAULT", "HAND_GRAPHED", "Entry", "obstacle"]

BASE = "fsdp2"
COMPUTE = "compute"
HAND_GRAPHED = "hand-graphed"


@dataclass(frozen=True)
class Entry:
    """A contestant.

    Attributes:
        words: what its step is.
        package: import name of what has to be installed besides torch.
        install: what to type for that.
        has_hsdp: it knows replicas of shards, or shards nothing, so that a mesh means nothing to it.
        only_cuda: it cannot run on a CPU.
        trains: False for a floor, whose losses are nobody's.
        shards: each rank keeps a share of weights, gradients and optimizer state, so it needs less memory.
        is_alone: it is one process, which takes all ranks' batches.
        exact: in fp32, on up to two ranks, its losses must be the base's bit for bit.
    """

    words: str
    package: str | None = None
    install: str = ""
    has_hsdp: bool = False
    only_cuda: bool = False
    trains: bool = True
    shards: bool = True
    is_alone: bool = False
    exact: bool = False


_DEEPSPEED = "pip install deepspeed"
_MEGATRON = "pip install megatron-fsdp"

# In the order of interest: where time or memory run out, the last are left out.
CATALOGUE: Mapping[str, Entry] = {
    BASE: Entry("torch's fully_shard around every block and the model", has_hsdp=True, exact=True),
    "shardgrad": Entry("shardgrad.fully_shard in the same places", has_hsdp=True, exact=True),
    "shardgrad-graphed": Entry(
        "the same under shardgrad.graphed_step, with shardgrad's clip and optimizer; eager on a CPU",
        has_hsdp=True,
    ),
    "fsdp2-keep": Entry(
        "fsdp2, parameters stay gathered between forward and backward",
        has_hsdp=True,
        exact=True,
    ),
    "shardgrad-keep": Entry(
        "shardgrad, parameters stay gathered between forward and backward",
        has_hsdp=True,
        exact=True,
    ),
    "fsdp1": Entry("FullyShardedDataParallel around every block and the model", has_hsdp=True),
    "ddp": Entry("DistributedDataParallel; below fp32 under autocast", has_hsdp=True, shards=False),
    "zero-redundancy": Entry("ddp, and ZeroRedundancyOptimizer shards the optimizer's state", shards=False),
    "unsharded": Entry(
        "one plain process that takes every rank's batch; below fp32 under autocast",
        has_hsdp=True,
        shards=False,
        is_alone=True,
    ),
    COMPUTE: Entry(
        "floor: the whole model, the optimizer on this rank's share of it, nothing sent",
        has_hsdp=True,
        trains=False,
        shards=False,
    ),
    "collectives": Entry(
        "floor: compute, and torch's own collectives of the same sizes, each waited for",
        has_hsdp=True,
        trains=False,
        shards=False,
    ),
    HAND_GRAPHED: Entry(
        "one CUDA graph around a step of a plain model, by the recipe of torch's manual; one rank",
        only_cuda=True,
        shards=False,
    ),
    "fsdp2-compiled": Entry("fsdp2, every block compiled", has_hsdp=True),
    "fsdp2-graphed": Entry(
        "fsdp2, forward and backward one plain CUDA graph, clip and optimizer eager",
        has_hsdp=True,
        only_cuda=True,
    ),
    "deepspeed-1": Entry("DeepSpeed ZeRO stage 1", "deepspeed", _DEEPSPEED, shards=False),
    "deepspeed-2": Entry("DeepSpeed ZeRO stage 2", "deepspeed", _DEEPSPEED, shards=False),
    "deepspeed-3": Entry("DeepSpeed ZeRO stage 3", "deepspeed", _DEEPSPEED),
    "megatron-fsdp": Entry("Megatron-FSDP, optim_grads_params", "megatron_fsdp", _MEGATRON, only_cuda=True),
    "megatron-fsdp-v2": Entry(
        "Megatron-FSDP's experimental second engine", "megatron_fsdp", _MEGATRON, only_cuda=True
    ),
}

DEFAULT = (BASE, "shardgrad", "shardgrad-graphed", "fsdp2-keep", "fsdp1", "ddp", COMPUTE, "collectives")


def obstacle(name: str, task: Task) -> str | None:
    """Why this contestant cannot do the task, in a sentence; None where nothing is known against it."""
    entry = CATALOGUE[name]
    if entry.package is not None and find_spec(entry.package) is None:
        return f"not installed: {entry.install}"
    if entry.only_cuda and task.device == "cpu":
        return "needs a CUDA device"
    if len(task.mesh_shape) > 1 and not entry.has_hsdp:
        return "knows no mesh of replicas and shards"
    if name == HAND_GRAPHED and task.ranks > 1:
        return "is for one rank: use --ranks 1"
    if name.startswith("deepspeed") and task.precision == "fp16" and task.device == "cpu":
        return "computes in fp16 on accelerators only"
    return None
