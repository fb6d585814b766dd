"""What a layer of Llama-8B adds to what a step launches, by kind: prints JSON.

    HOSTCUDA_VALUES=0 .venv-cuda/bin/python -m tests.cuda_runtime.launches shardgrad 8

Nothing has values, so one process stands for rank 0 of a world of any size. A step clips and
updates, if an engine is named; `none` is the model by itself, in bfloat16, forward and backward.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import shardgrad
from benchmarks.counts import _agree
from shardgrad.programs.train.model import Transformer, next_token_loss
from shardgrad.programs.train.presets import TransformerConfig
from tests.cuda_runtime import inspection

LAYERS = 2, 4  # of the models that are compared


def work_of_a_step(engine: str, layers: int) -> Counter[str]:
    """Counts kernels, collectives and copies, and our kernels by name."""
    config = TransformerConfig(
        width=4096, layers=layers, heads=32, kv_heads=8, hidden=14336, vocab_size=1024
    )
    with torch.device("meta"):
        model = Transformer(config)
    if engine == "none":
        model.to(torch.bfloat16)
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*model.layers, model):
            (shardgrad.fully_shard if engine == "shardgrad" else torch_fully_shard)(
                part, mp_policy=policy
            )
    model.to_empty(device="cuda")
    params = list(model.parameters())
    clip = shardgrad.clip_grad_norm_ if engine == "shardgrad" else torch.nn.utils.clip_grad_norm_
    kind = shardgrad.optim.AdamW if engine == "shardgrad" else torch.optim.AdamW
    optimizer = kind(params, lr=1e-3, **({} if engine == "shardgrad" else {"fused": True}))
    tokens = torch.zeros(1, 128, dtype=torch.long, device="cuda")
    for _ in range(4):
        inspection.trace(False)
        inspection.trace(True)
        next_token_loss(model(tokens), tokens).backward()
        if engine != "none":
            clip(params, 1.0)
            optimizer.step()
        optimizer.zero_grad()
    work = inspection.log()
    inspection.trace(False)
    counts = Counter(each["kind"] for each in work)
    names = (inspection.short_name(each["name"]) for each in work if each["kind"] == "kernel")
    return counts + Counter(name for name in names if name.startswith("shardgrad"))


def main() -> None:
    """Prints what one layer adds."""
    engine, ranks = sys.argv[1], int(sys.argv[2])
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:fake,cuda:nccl", store=dist.HashStore(), rank=0, world_size=ranks)
    _agree()
    few, many = (work_of_a_step(engine, layers) for layers in LAYERS)
    more = {name: (many[name] - few[name]) / (LAYERS[1] - LAYERS[0]) for name in {*few, *many}}
    print(json.dumps({name: count for name, count in sorted(more.items()) if count}))


if __name__ == "__main__":
    main()
