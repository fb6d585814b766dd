"""What a rehearsal writes down is what real ranks do, with the transport of an accelerator."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import shardgrad
from shardgrad.engine.transports import LocalTransport, StreamTransport, Transport
from shardgrad.programs.plan.recording import Transfer
from shardgrad.programs.plan.rehearsal import rehearse
from shardgrad.programs.plan.request import Request, mesh_shape
from shardgrad.programs.train.model import Transformer, materialise
from shardgrad.programs.train.presets import PRESETS
from shardgrad.programs.train.sharding import precision_policy
from tests.support.ranks import Ranks

NARROW = replace(PRESETS["tiny"], width=64, heads=2, kv_heads=2, hidden=96)
KINDS = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
}


class Log(TorchDispatchMode):
    """Writes down each collective: its kind and its whole message's bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if func.namespace == "c10d" and name in KINDS:
            sides = [arg if isinstance(arg, list) else [arg] for arg in args[:2]]
            tensors = [[t for t in side if isinstance(t, torch.Tensor)] for side in sides]
            nbytes = max(sum(t.numel() * t.itemsize for t in side) for side in tensors)
            self.seen.append((KINDS[name], nbytes))
        return func(*args, **(kwargs or {}))


def as_on_an_accelerator(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """gloo has these collectives too; between CPU ranks the engine would exchange instead."""
    return LocalTransport(group) if group.size() == 1 else StreamTransport(group)


@mock.patch("shardgrad.engine.comm_context.transport_for", as_on_an_accelerator)
def train(request: Request) -> dict[str, Any]:
    """Takes two steps; returns what the second one sent, and what is kept after it."""
    names = ("replicate", "shard")[-len(request.shape) :]
    mesh = init_device_mesh("cpu", request.shape, mesh_dim_names=names)
    with torch.device("meta"):
        model: Any = Transformer(NARROW)
    materialise(model, model, device=torch.device("cpu"), seed=0)
    policy, stage = precision_policy(request.precision), request.stage
    for unit in (*model.layers, model):
        shardgrad.fully_shard(
            unit,
            mesh=mesh,
            mp_policy=policy,
            zero_stage=stage if stage == "hfsdp" else int(stage),
            # By default a CPU would keep the last block.
            reshard_after_forward=None if unit is model or stage in ("1", "2") else True,
        )
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.zeros(request.batch_size, request.seq_len, dtype=torch.int64)
    for _ in range(2):
        with Log() as log:
            for number in range(request.accumulate):
                is_last = number == request.accumulate - 1
                model.set_is_last_backward(is_last)
                model.set_requires_gradient_sync(is_last or not request.no_sync)
                model.loss(tokens, tokens).backward()
            shardgrad.clip_grad_norm_(model.parameters(), math.inf)
            optimizer.step()
            optimizer.zero_grad()
    # An allocator of a device rounds up to 512 bytes.
    state = sum(-(-flat.numel() * flat.itemsize // 512) * 512 for _, flat in optimizer.buffers())
    return {"sent": log.seen, "state": state, "rank": dist.get_rank()}


@pytest.mark.parametrize(
    "settings",
    [
        {"mesh": "2", "precision": "fp32", "stage": "1", "accumulate": 2},
        {"mesh": "2", "stage": "2", "accumulate": 2},
        {"mesh": "4", "precision": "fp32", "accumulate": 2, "no_sync": True},
        {"mesh": "2x2"},
        {"mesh": "2x2", "stage": "hfsdp", "accumulate": 2},
    ],
)
def test_the_rehearsed_collectives_are_those_that_real_ranks_make(
    worlds: dict[int, Ranks], settings: dict[str, Any]
) -> None:
    ranks = math.prod(mesh_shape(settings["mesh"]))
    request = Request("narrow", ranks=ranks, batch_size=2, seq_len=16, **settings)
    real = worlds[ranks].renewed().run(train, request)
    with mock.patch.dict(PRESETS, {"narrow": NARROW}):
        rehearsal = rehearse(request)
    written = [
        (e.kind, e.nbytes) for e in rehearsal.events if isinstance(e, Transfer) and e.ranks > 1
    ]
    for one in real:
        assert one["sent"] == written, f"rank {one['rank']}"
    assert rehearsal.memory.resting["optimizer state"] == real[0]["state"]
