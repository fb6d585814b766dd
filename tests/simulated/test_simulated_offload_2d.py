"""`CPUOffloadPolicy` for parameters that tensor parallelism has cut: shards of both on the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardgrad
from tests.simulated.accelerator.device import NAME, checked
from tests.simulated.accelerator.virtual_ranks import VirtualRanks, one_at_a_time

WIDTH = 8


def _build(mesh: DeviceMesh, policy: OffloadPolicy) -> nn.Sequential:
    with one_at_a_time():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)
        ).to(NAME)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model):
        shardgrad.fully_shard(layer, mesh=mesh["dp"], offload_policy=policy)
    return model


def _train(policy: OffloadPolicy, optimizer: type[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Trains on two by two ranks; returns losses and norms, and this rank's pieces and
    gradients.
    """
    mesh = init_device_mesh(NAME, (2, 2), mesh_dim_names=("dp", "tp"))
    model = _build(mesh, policy)
    optim = optimizer(model.parameters(), lr=1e-2)  # type: ignore[call-arg]
    found = []
    for step in range(2):
        optim.zero_grad()
        for micro in range(2):
            generator = torch.Generator().manual_seed(
                10 * step + 2 * micro + mesh["dp"].get_local_rank()
            )
            x = torch.randn(4, WIDTH, generator=generator).to(NAME)
            loss = model(x).square().mean()
            loss.backward()
            found.append(loss.detach())
        found.append(shardgrad.clip_grad_norm_(model, 0.05))
        optim.step()
    home = "cpu" if isinstance(policy, CPUOffloadPolicy) else NAME
    for param in model.parameters():
        assert isinstance(param, DTensor)
        assert param.device_mesh.mesh_dim_names == ("dp", "tp")
        for tensor in (param, param.grad, *optim.state[param].values()):
            assert tensor.ndim == 0 or tensor.to_local().device.type == home
        found += [param.to_local(), param.grad.to_local()]
    return [tensor.detach().cpu() for tensor in found]


@pytest.mark.parametrize(
    "optimizer", [shardgrad.optim.AdamW, torch.optim.AdamW], ids=["flat", "torch"]
)
def test_shards_cut_over_two_axes_train_on_the_host_bit_for_bit_like_on_the_device(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    with checked():
        on_host = VirtualRanks(4).run(_train, CPUOffloadPolicy(), optimizer)
    on_device = VirtualRanks(4).run(_train, OffloadPolicy(), optimizer)
    for ours, theirs in zip(on_host, on_device, strict=True):
        assert all(map(torch.equal, ours, theirs))
