"""Mistakes of one rank: the others wait for it, or it for them."""

from __future__ import annotations

import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import shardgrad
from shardgrad import checkpoint
from tests.mistakes.models import WIDTH, backward, batch, net, sharded
from tests.mistakes.table import mistake, text_of

WAITS = "WaitingRanksWarning: shardgrad: "
APART = f"{WAITS}Ranks wait for each other in different collectives: "


def first() -> bool:
    return dist.get_rank() == 0


@mistake(
    typed="`if rank == 0: p.full_tensor()`, then a barrier",
    says=f"{APART}rank 0 in full_tensor() at",
    cure="full_tensor() is a collective: call it on every rank, and use the result on one",
)
def a_full_tensor_on_one_rank() -> None:
    model = sharded()
    if first():
        model.head.weight.full_tensor()
    dist.barrier()


@mistake(
    typed="`if rank == 0: get_model_state_dict(...)`, then a step",
    says=f"{APART}rank 0 in get_model_state_dict() at",
    cure="get_model_state_dict is a collective: call it on every rank",
)
def a_full_state_dict_on_one_rank() -> None:
    model = sharded()
    backward(model)
    if first():
        get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
    backward(model)


@mistake(
    typed="`if rank == 0: dcp.save(...)`",
    says=f"{APART}rank 0 in save() at",
    cure="save is a collective, in which every rank writes its part: call it on every rank",
)
def a_torch_checkpoint_on_one_rank() -> None:
    model = sharded()
    if first():
        dcp.save({"model": model.state_dict()}, checkpoint_id=tempfile.mkdtemp())
    backward(model)


@mistake(
    typed="`if rank == 0: checkpoint.save(...)`",
    says=f"{APART}rank 0 in the plan of the checkpoint, save() at",
    cure="save is a collective, in which every rank writes its part: call it on every rank",
)
def a_checkpoint_on_one_rank() -> None:
    model = sharded()
    backward(model)
    if first():
        checkpoint.save({"model": model.state_dict()}, tempfile.mkdtemp() + "/c")
    backward(model)


@mistake(
    typed="`if rank == 0: evaluate(model)`, then a barrier",
    says=f"{APART}rank 0 in the all-gather of FSDPNet, forward() at",
    cure="forward gathers parameters from all ranks: call the model on every rank",
)
def an_evaluation_on_one_rank() -> None:
    model = sharded()
    backward(model)
    if first():
        with torch.no_grad():
            model(batch())
    dist.barrier()


@mistake(
    typed="`loss.backward()` on one rank",
    says=f"{APART}rank 0 in the all-gather of blocks.1, backward() at",
    cure="backward reduces gradients over all ranks: call it on every rank",
)
def a_backward_on_one_rank() -> None:
    model = sharded()
    loss = model(batch()).square().mean()
    if first():
        loss.backward()
    dist.barrier()


@mistake(
    typed="`if rank == 0: clip_grad_norm_(...)`",
    says=f"{APART}rank 0 in clip_grad_norm_() at",
    cure="the norm is over all ranks: call clip_grad_norm_ on every rank",
)
def clipping_on_one_rank() -> None:
    model = sharded()
    backward(model)
    if first():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    backward(model)


@mistake(
    typed="`if rank == 0: dist.barrier()`",
    says=f"{APART}rank 0 in barrier() at",
    cure="every rank must reach the barrier: move it out of `if rank == 0:`",
)
def a_barrier_on_one_rank() -> None:
    model = sharded()
    if first():
        dist.barrier()
    backward(model)


@mistake(
    typed="an adapter on one rank",
    says="UnownedParameterError: no unit owns blocks.0.lora.weight, blocks.0.lora.bias",
    on={
        0: "UnownedParameterError: no unit owns blocks.0.lora.weight, blocks.0.lora.bias",
        1: f"{WAITS}Rank 0 failed in forward() at",
    },
    cure="shardgrad.fully_shard(model.get_submodule('blocks.0.lora'))",
)
def an_adapter_on_one_rank() -> None:
    model = sharded()
    if first():
        model.blocks[0].lora = nn.Linear(WIDTH, WIDTH)
    backward(model)


@mistake(
    typed="an adapter on one rank, after steps, in a notebook",
    says="UnownedParameterError: no unit owns blocks.0.lora.weight, blocks.0.lora.bias",
    on={
        0: "UserWarning: UnownedParameterError: no unit owns blocks.0.lora.weight",
        1: "CollectiveError: the all-gather of FSDPNet cannot complete: Rank 0 failed ",
    },
    cure="shardgrad.fully_shard(model.get_submodule('blocks.0.lora'))",
)
def a_late_adapter_on_one_rank() -> None:
    model = sharded()
    backward(model)
    if first():
        model.blocks[0].lora = nn.Linear(WIDTH, WIDTH)
    try:
        backward(model)
    except shardgrad.errors.UnownedParameterError as error:
        warnings.warn(text_of(error), stacklevel=1)
        time.sleep(30)  # as a notebook that shows the error, or a debugger


@mistake(
    typed="`if rank == 0: fully_shard(model)`",
    says=f"{WAITS}Rank 1 has not called fully_shard. Rank 0 was waiting for it in",
    on={0: f"{WAITS}Rank 1 has not called fully_shard. Rank 0 was waiting for it in"},
    cure="call fully_shard on every rank: move it out of `if rank == 0:`",
)
def sharded_on_one_rank() -> None:
    model = net()
    if first():
        sharded(model)
    backward(model)
    dist.barrier()


@mistake(
    typed="more batches on one rank",
    says=f"{WAITS}Rank 1 has finished its program. Rank 0 was waiting for it in",
    on={0: f"{WAITS}Rank 1 has finished its program. Rank 0 was waiting for it in"},
    cure="with shardgrad.participate(model):",
)
def more_batches_on_one_rank() -> None:
    model = sharded()
    for _ in range(2 + first()):
        backward(model)


@mistake(
    typed="`if loss.isnan(): continue` on one rank",
    says="DesyncError: rank 1 is out of sync: it sent the",
    on={
        0: "DesyncError: rank 1 is out of sync: it sent the",
        1: "DesyncError: rank 0 is out of sync: it sent the",
    },
    cure="with shardgrad.participate(model):",
)
def a_skipped_backward_on_one_rank() -> None:
    model = sharded()
    for step in range(3):
        loss = model(batch()).square().mean()
        if step == 1 and first():
            continue
        loss.backward()


@mistake(
    typed="another layer on one rank, by the data",
    says="DesyncError: rank 1 is out of sync: it sent the reduce-scatter of blocks.",
    on={
        0: "DesyncError: rank 1 is out of sync: it sent the reduce-scatter of blocks.",
        1: "DesyncError: rank 0 is out of sync: it sent the reduce-scatter of blocks.",
    },
    cure="with shardgrad.participate(model):",
)
def another_path_on_one_rank() -> None:
    model = sharded()
    backward(model)
    model.blocks = nn.ModuleList(list(model.blocks)[:: 1 if first() else -1])
    backward(model)
