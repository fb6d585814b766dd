"""A CUDA build of torch on a machine without a GPU trains on the CPU, as it does with FSDP2."""

from __future__ import annotations

import os
import sys

from tests.support.processes import run

PROGRAM = """
import torch, torch.distributed as dist
assert torch.version.cuda is not None and not torch.cuda.is_available()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import shardgrad
model = shardgrad.fully_shard(torch.nn.Linear(4, 4))
optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-3)

@shardgrad.graphed_step(model, optimizer)
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    shardgrad.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss

losses = [step(torch.ones(2, 4)).item() for _ in range(5)]
assert losses == sorted(losses, reverse=True)
assert {p.device.type for p in model.parameters()} == {step.pool.device.type} == {"cpu"}
print("trained on", shardgrad.graphs.GraphPool().device)
dist.destroy_process_group()
"""


def test_it_trains_on_the_cpu() -> None:
    environment = {**os.environ, "HOSTCUDA_DEVICES": "0", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = run(command, env=environment, timeout_s=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "trained on cpu"
