"""What the runtime knows of captures beyond CUDA's errors: nodes and edges, and findings."""

from __future__ import annotations

import torch

from tests.cuda_runtime import inspection


def test_edges_are_what_streams_and_events_say() -> None:
    x = torch.ones(16, device="cuda")
    other = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        a = x * 2
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            b = x * 3
        c = a + 1
        torch.cuda.current_stream().wait_stream(other)
        d = b + c
    nodes = inspection.graph()["nodes"]
    assert [node["before"] for node in nodes] == [[], [0], [0], [2, 1]]
    assert inspection.conflicts(nodes) == []
    graph.replay()
    assert d.tolist() == [6.0] * 16


def test_a_replay_that_uses_freed_memory_is_a_finding() -> None:
    x = torch.ones(1 << 24, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = x * 2
    graph.replay()
    assert inspection.findings(forget=True) == []
    del x
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    graph.replay()
    assert any("uses freed memory" in found for found in inspection.findings())
    del y
