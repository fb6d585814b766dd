"""What CUDA says of a captured step: collectives in order with writers and readers, nothing loose.

`tests/cuda_runtime/test_graph_evidence.py` asks the same of the runtime, which knows more of its
nodes. Here is what a GPU can be asked, and there it is held to what the runtime knows.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardgrad
from shardgrad.engine import comm_context
from shardgrad.engine.transports import StreamTransport
from tests.cuda_runtime import inspection
from tests.cuda_runtime.evidence import evidence, without_edges
from tests.gpu import captured_graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not captured_graph.readable(), reason="written for CUDA 13"),
]

UNITS = 3
ALL_MEMORY = range(1 << 64)
LOW_PRECISION = shardgrad.MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32
)


# NCCL launches nothing for a collective of one rank that is in place, as all are in low precision.
@pytest.mark.parametrize(
    ("options", "least"),
    [({}, UNITS), ({"mp_policy": LOW_PRECISION}, 0)],
    ids=["float32", "bfloat16"],
)
def test_a_captured_step_orders_every_collective_and_leaves_nothing_loose(
    options: dict[str, Any], least: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(UNITS))
    ).cuda()
    mesh = init_device_mesh("cuda", (1,))
    # One rank alone would send nothing.
    with patch.object(comm_context, "transport_for", lambda group, device: StreamTransport(group)):
        for unit in (*model, model):
            shardgrad.fully_shard(unit, mesh=mesh, **options)
        optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)

        @shardgrad.graphed_step(model, optimizer)
        def step(x: Tensor) -> Tensor:
            loss = model(x).float().square().mean()
            loss.backward()
            shardgrad.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        x = torch.randn(4, 64, device="cuda")
        with captured_graph.recorded() as graphs:
            for _ in range(6):
                step(x)
    torch.cuda.synchronize()
    _, graph = graphs  # captured again in the next call, and compared
    found = evidence(graph, device_memory=ALL_MEMORY)
    print(f"{found.nodes} nodes, {found.edges} edges, {found.collectives} collectives")
    assert found.wrong == []
    assert not [node for node in graph["nodes"] if node["operator"] == "work of no operator"]
    assert found.collectives >= least
    assert found.readers >= found.collectives
    for number, node in enumerate(graph["nodes"]):
        if node["kind"] == "nccl":
            assert evidence(without_edges(graph, number), device_memory=ALL_MEMORY).wrong
    if inspection.installed():
        known = evidence(inspection.graph() or {})
        assert (found.nodes, found.edges, found.collectives) == (
            known.nodes,
            known.edges,
            known.collectives,
        )
    step.close()
