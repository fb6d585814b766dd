"""What scripts for other engines say, and what to say here.

Names are matched as they were imported, whatever they are called in the script. Attributes are matched by
name alone, since a script does not say what an object is; only names that mean one thing are listed.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from shardgrad.migration.advice import Weight
from shardgrad.module import FSDPModule

__all__ = ["ATTRIBUTES", "NAMES", "Rule"]


@dataclass(frozen=True)
class Rule:
    """What is found, how much it matters, and what to do."""

    weight: Weight
    what: str
    do: str


def _page(name: str) -> str:
    return f"docs/how_to/{name}.md"


_FSDP2 = "torch.distributed.fsdp"
_SWAP = "from shardgrad import {0}, or run it as it is: torchrun -m shardgrad.patch SCRIPT"

_IMPORTS = {
    name: Rule("change", f"FSDP2's {name}", _SWAP.format(name))
    for name in ("fully_shard", "register_fsdp_forward_method")
}

# By the dotted name under which it is imported.
NAMES: dict[str, Rule] = {
    **{
        f"{home}.{name}": rule
        for name, rule in _IMPORTS.items()
        for home in (_FSDP2, "torch.distributed._composable.fsdp")
    },
    f"{_FSDP2}.FullyShardedDataParallel": Rule(
        "change",
        "FSDP1 wraps the model",
        f"shardgrad.fully_shard on each block, then on the model: {_page('from_fsdp1')}",
    ),
    f"{_FSDP2}.ShardingStrategy": Rule(
        "change",
        "FSDP1's sharding strategy",
        "FULL_SHARD: the default; SHARD_GRAD_OP: reshard_after_forward=False; "
        "HYBRID_SHARD: a two-dimensional mesh; NO_SHARD: DDP",
    ),
    f"{_FSDP2}.MixedPrecision": Rule(
        "change",
        "FSDP1's mixed precision",
        "shardgrad.MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...)",
    ),
    f"{_FSDP2}.StateDictType": Rule(
        "change",
        "FSDP1's state dict types",
        "model.state_dict() is sharded; torch.distributed.checkpoint.state_dict gives full ones",
    ),
    f"{_FSDP2}.BackwardPrefetch": Rule(
        "drop", "FSDP1's backward prefetch", "the unit before is always prefetched"
    ),
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler": Rule(
        "change", "FSDP1's loss scaler", "shardgrad.GradScaler()"
    ),
    "torch.nn.parallel.DistributedDataParallel": Rule(
        "change", "DDP wraps the model", f"shardgrad.fully_shard, without a wrapper: {_page('from_ddp')}"
    ),
    "deepspeed.initialize": Rule(
        "change",
        "DeepSpeed's engine",
        f"fully_shard, an optimizer and backward() of your own: {_page('from_deepspeed')}",
    ),
    "deepspeed.zero.Init": Rule(
        "change",
        "DeepSpeed builds sharded",
        "build under torch.device('meta'), fully_shard, to_empty, load or initialise",
    ),
    "deepspeed.zero.GatheredParameters": Rule(
        "change",
        "DeepSpeed gathers parameters",
        "module.unshard() and module.reshard(), or parameter.full_tensor()",
    ),
    "megatron_fsdp.fully_shard": Rule(
        "change",
        "Megatron-FSDP's fully_shard",
        f"shardgrad.fully_shard for each unit: {_page('from_megatron_fsdp')}",
    ),
    "megatron_fsdp.fully_shard_model": Rule(
        "change",
        "Megatron-FSDP's fully_shard_model",
        f"shardgrad.fully_shard for each unit: {_page('from_megatron_fsdp')}",
    ),
    "megatron_fsdp.MegatronFSDP": Rule(
        "change",
        "Megatron-FSDP wraps the model",
        f"shardgrad.fully_shard for each unit: {_page('from_megatron_fsdp')}",
    ),
    "copy.deepcopy": Rule("check", "a deep copy", "of a sharded model it raises: copy before fully_shard"),
    "torch.nn.utils.clip_grad_norm_": Rule(
        "check", "torch's clipping", "works; shardgrad.clip_grad_norm_ makes no DTensors and does not wait"
    ),
    "torch.optim.swa_utils.AveragedModel": Rule(
        "change",
        "a deep copy of the model",
        "shard a second model and lerp_ its parameters towards the first's",
    ),
}

# By the name of an attribute.
ATTRIBUTES: dict[str, Rule] = {
    "no_sync": Rule(
        "change", "accumulation without synchronisation", "model.set_requires_gradient_sync(is_last)"
    ),
    "summon_full_params": Rule("change", "FSDP1 gathers parameters", "module.unshard() and module.reshard()"),
    "state_dict_type": Rule(
        "change", "FSDP1's state dict context", "torch.distributed.checkpoint.state_dict.get_model_state_dict"
    ),
    "gradient_accumulation_steps": Rule(
        "check", "accumulation counted by an engine", "count micro-batches yourself, or let Accelerate do it"
    ),
    "_fsdp_param_group": Rule(
        "check", "a private name of FSDP2", "docs/reference/fsdp2_surface.md lists those that exist"
    ),
    "set_reduce_scatter_unused_params": Rule(
        "drop", "zeros for unused parameters", "unused parameters always keep None"
    ),
    "reset_iter_state": Rule("drop", "recovery after an exception", "the next forward does it"),
}


def _refused() -> dict[str, Rule]:
    """Returns rules for the methods that this version refuses, as their annotation says."""
    methods: dict[str, Any] = {
        name: value
        for name, value in vars(FSDPModule).items()
        if inspect.isfunction(value) and name[0] != "_"
    }
    return {
        name: Rule("change", f"{name} is refused", "docs/reference/fsdp2_surface.md says what to use instead")
        for name, method in methods.items()
        if inspect.signature(method).return_annotation == "NoReturn"
    }


ATTRIBUTES.update(_refused())
