"""The engines that can be measured: what each needs, and what it cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from benchmarks.engines.task import Task
from benchmarks.measure import proc_nbytes
from benchmarks.models import facts_of

BASE = "fsdp2"
COMPUTE = "compute"
HAND_GRAPHED = "hand-graphed"


@dataclass(frozen=True)
class Engine:
    """An engine, or a floor: what is left if an engine costs nothing.

    Attributes:
        words: what its step is.
        build: `module:function` that makes its `Trained`, given task and device.
        package: import name of what has to be installed besides torch.
        install: what to type for that.
        has_hsdp: it knows replicas of shards, or shards nothing, so that a mesh means nothing to
            it.
        only_cuda: it cannot run on a CPU.
        trains: False for a floor, whose losses mean nothing.
        shards: each rank keeps a share of weights, gradients and optimizer state, so it needs less
            memory.
        exact: in fp32, on up to two ranks, its losses must be the base's bit for bit.
    """

    words: str
    build: str
    package: str | None = None
    install: str = ""
    has_hsdp: bool = False
    only_cuda: bool = False
    trains: bool = True
    shards: bool = True
    exact: bool = False


_OURS = partial(Engine, has_hsdp=True)
_EXACT = partial(Engine, has_hsdp=True, exact=True)
_WHOLE = partial(Engine, has_hsdp=True, shards=False)  # every rank has all of the model
_TORCH = "benchmarks.engines.torch_and_shardgrad"
_FLOORS = "benchmarks.engines.floors"
_FOREIGN = "benchmarks.engines.foreign"

# In the order of interest: where time or memory run out, the last are left out.
ENGINES: Mapping[str, Engine] = {
    BASE: _EXACT("torch's fully_shard around every block and the model", f"{_TORCH}:fsdp2"),
    "shardgrad": _EXACT("shardgrad.fully_shard in the same places", f"{_TORCH}:ours"),
    "shardgrad-graphed": _OURS(
        "the same under shardgrad.graphed_step, with shardgrad's clip and optimizer; eager on a "
        "CPU",
        f"{_TORCH}:ours_graphed",
    ),
    "shardgrad-auto": _OURS(
        'shardgrad-graphed with zero_stage="auto": units stay unsharded where memory is left',
        f"{_TORCH}:ours_auto",
    ),
    "shardgrad-windows": _OURS(
        'shardgrad-graphed with comm="symmetric_memory": ranks read each other\'s memory',
        f"{_TORCH}:ours_windows",
        only_cuda=True,
    ),
    "shardgrad-compiled": _OURS(
        "shardgrad-graphed, every block compiled", f"{_TORCH}:ours_compiled"
    ),
    "fsdp2-keep": _EXACT(
        "fsdp2, parameters stay unsharded between forward and backward", f"{_TORCH}:fsdp2_keep"
    ),
    "shardgrad-keep": _EXACT(
        "shardgrad, parameters stay unsharded between forward and backward", f"{_TORCH}:ours_keep"
    ),
    "ddp": _WHOLE("DistributedDataParallel; below fp32 under autocast", f"{_TORCH}:ddp"),
    COMPUTE: _WHOLE(
        "floor: the unsharded model, the optimizer on this rank's share of it, nothing sent",
        f"{_FLOORS}:compute",
        trains=False,
    ),
    "collectives": _WHOLE(
        "floor: compute, and torch's own collectives of the same sizes, each waited for",
        f"{_FLOORS}:collectives",
        trains=False,
    ),
    HAND_GRAPHED: _WHOLE(
        "one CUDA graph around a step of a plain model, by the recipe of torch's manual; one rank",
        f"{_FLOORS}:hand_graphed",
        has_hsdp=False,
        only_cuda=True,
    ),
    "fsdp2-compiled": _OURS("fsdp2, every block compiled", f"{_TORCH}:fsdp2_compiled"),
    "fsdp2-graphed": _OURS(
        "fsdp2, forward and backward one plain CUDA graph, clip and optimizer eager; from torch "
        "2.15 on, its unsharded memory is kept",
        f"{_TORCH}:fsdp2_graphed",
        only_cuda=True,
    ),
    **{
        f"deepspeed-{stage}": Engine(
            f"DeepSpeed ZeRO stage {stage}",
            f"{_FOREIGN}:deepspeed_{stage}",
            "deepspeed",
            "pip install deepspeed",
            shards=stage == 3,
        )
        for stage in (1, 2, 3)
    },
    "megatron-fsdp": Engine(
        "Megatron-FSDP's second engine, in megatron_fsdp.experimental",
        f"{_FOREIGN}:megatron",
        "megatron_fsdp",
        "pip install megatron-fsdp",
        only_cuda=True,
    ),
    "flex-shard": Engine(
        "FlexShard, a bucket for every block and one for the rest",
        f"{_FOREIGN}:flex_shard",
        "flex_shard",
        "pip install git+https://github.com/meta-pytorch/flex_shard (needs torch 2.14)",
        only_cuda=True,
    ),
}

DEFAULT = (
    BASE,
    "shardgrad",
    "shardgrad-graphed",
    "fsdp2-keep",
    "ddp",
    COMPUTE,
    "collectives",
)

_STATE_NBYTES = 16  # of a parameter: weight, gradient and two moments, in fp32
_UNSHARDED_NBYTES = 4  # of a parameter that a rank has in full: the weight


def obstacle(name: str, task: Task) -> str | None:
    """Why this engine cannot do the task, in a sentence; None where nothing is known against it."""
    engine = ENGINES[name]
    if engine.package is not None and find_spec(engine.package) is None:
        return f"not installed: {engine.install}"
    if engine.only_cuda and task.device == "cpu":
        return "needs a CUDA device"
    if len(task.mesh_shape) > 1 and not engine.has_hsdp:
        return "knows no mesh of replicas and shards"
    if name == HAND_GRAPHED and task.ranks > 1:
        return "is for one rank: use --ranks 1"
    return lack_of_memory(name, task)


def least_nbytes(name: str, task: Task) -> int:
    """Bytes that all ranks of an engine need at the least, without activations."""
    numel, engine = facts_of(task.preset).numel, ENGINES[name]
    if engine.shards:
        return numel * _STATE_NBYTES * (task.ranks // task.mesh_shape[-1])
    # Unsharded weights and gradients everywhere; what the optimizer keeps may be shared.
    return numel * (2 * _UNSHARDED_NBYTES * task.ranks + (_STATE_NBYTES - 2 * _UNSHARDED_NBYTES))


def lack_of_memory(name: str, task: Task) -> str | None:
    """Why the host's memory cannot hold an engine, in words; None where it may, or on a GPU.

    A GPU refuses an allocation and its worker tells; a host ends whatever process it likes.
    """
    needed, available = least_nbytes(name, task), proc_nbytes("/proc/meminfo", "MemAvailable")
    if task.device != "cpu" or (needed := needed // task.hosts) <= available:
        return None
    return (
        f"out of memory: it needs at least {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB "
        "are free"
    )
