"""What the graph of a training step shows: collectives in order with writers and readers, nothing
loose.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardgrad
from tests.cuda_runtime import inspection
from tests.cuda_runtime.evidence import collectives, without_edges, wrong
from tests.support.graphed import on_one_gpu, step_of
from tests.support.ranks import Ranks

UNITS = 3
Options = Callable[[], dict[str, Any]]


def in_low_precision() -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


def kept_whole() -> dict[str, Any]:
    return {"reshard_after_forward": False}


def with_replicas() -> dict[str, Any]:
    return {"mesh": init_device_mesh("cuda", (2, 1), mesh_dim_names=("replicate", "shard"))}


def with_communicators() -> dict[str, Any]:
    """Each unit has its own."""
    return {"mesh": DeviceMesh.from_group(dist.new_group([0, 1]), "cuda")}


def step_on_a_device(options: Options) -> Any:
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(UNITS)]
    model = nn.Sequential(*layers).cuda()
    for unit in (*model, model):
        shardgrad.fully_shard(unit, **options())
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)
    return shardgrad.graphed_step(model, optimizer)(step_of(model, optimizer, 1.0))


def captured(options: Options) -> tuple[list[int], list[str], list[list[str]]]:
    """Captures a step; returns the sizes of its graph, what is wrong with it, and what shares
    memory without an order once a collective has no edges.
    """
    step = step_on_a_device(options)
    x = torch.randn(4, 64, device="cuda")
    for _ in range(6):
        step(x)
    assert step.captures == 1
    torch.cuda.synchronize()
    graph = inspection.graph()
    assert graph is not None
    without = [
        inspection.conflicts(without_edges(graph, each)) for each in collectives(graph["nodes"])
    ]
    sizes = [len(graph["nodes"]), sum(len(node["before"]) for node in graph["nodes"])]
    found = wrong(graph)
    step.close()
    return sizes, found, without


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    two = Ranks(2, backend="cpu:gloo,cuda:nccl")
    yield two
    two.stop()


@pytest.mark.parametrize("options", [dict, in_low_precision, kept_whole, with_replicas])
def test_a_captured_step_orders_every_collective_and_leaves_nothing_loose(
    ranks: Ranks, options: Options
) -> None:
    (sizes, found, without), (of_the_other, as_well, _) = ranks.run(captured, options)
    assert found == as_well == []
    assert sizes == of_the_other
    assert len(without) >= UNITS
    assert all(without), "a collective without its edges has an order all the same"


def captured_on_two_communicators() -> tuple[str, list[str], list[str]]:
    """Returns why a step is refused, and what its graph shows where NCCL orders launches, with and
    without the edges between collectives.
    """
    step = step_on_a_device(with_communicators)
    x = torch.randn(4, 64, device="cuda")
    for _ in range(3):
        step(x)
    with pytest.raises(shardgrad.errors.CaptureError) as refusal:
        step(x)
    step.reset()
    with patch.dict(os.environ, NCCL_LAUNCH_ORDER_IMPLICIT="1"):
        for _ in range(6):
            step(x)
    assert step.replays == 3
    graph = inspection.graph()
    assert graph is not None
    found, of_nccl = wrong(graph), set(collectives(graph["nodes"]))
    for number in of_nccl:
        node = graph["nodes"][number]
        node["before"] = [other for other in node["before"] if other not in of_nccl]
    step.close()
    return str(refusal.value), found, wrong(graph)


def test_collectives_of_two_communicators_need_an_order_and_have_it(ranks: Ranks) -> None:
    for refusal, found, without in ranks.run(captured_on_two_communicators):
        assert "it uses 3 communicators" in refusal
        assert "export NCCL_LAUNCH_ORDER_IMPLICIT=1" in refusal
        assert found == []
        assert any("are of two communicators and have no order" in each for each in without)


@pytest.mark.parametrize("library", [shardgrad.optim, torch.optim], ids=["ours", "torch"])
@pytest.mark.usefixtures("one_rank")
def test_no_kernel_is_launched_for_the_first_time_in_a_capture(library: Any) -> None:
    model = on_one_gpu(nn.Sequential(*(nn.Linear(8, 8) for _ in range(UNITS))))
    options = {} if library is shardgrad.optim else {"capturable": True}
    optimizer = library.AdamW(model.parameters(), lr=1e-2, **options)
    step = shardgrad.graphed_step(model, optimizer)(step_of(model, optimizer, 1.0))

    x = torch.ones(2, 8, device="cuda")
    inspection.trace(True)
    for _ in range(3):
        step(x)
    eager = {work["name"] for work in inspection.log()}
    inspection.trace(False)
    step(x)
    assert step.captures == 1
    nodes = (inspection.graph() or {})["nodes"]
    assert {node["name"] for node in nodes} <= eager
    step.close()
