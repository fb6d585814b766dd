"""The simulated accelerator refuses in a capture what CUDA refuses, and sees hazards in replays."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardgrad
from shardgrad.errors import DeviceError
from tests.simulated.accelerator.device import Graph, checked
from tests.simulated.accelerator.virtual_ranks import VirtualRanks
from tests.support.ranks import RankError


def _side() -> torch.Stream:
    """Returns a stream that knows what the current one has done."""
    side = torch.Stream("sim")
    side.wait_stream(torch.accelerator.current_stream())
    return side


def test_a_missing_wait_inside_a_graph_is_a_hazard_of_its_replay() -> None:
    x, y = torch.zeros(8, device="sim"), torch.zeros(8, device="sim")
    main, other, graph = _side(), torch.Stream("sim"), Graph()
    with graph.capture(main):
        other.wait_stream(main)
        x.add_(1)
        with other:
            y.add_(x)
        main.wait_stream(other)
    with checked(raises=False) as found:
        graph.replay()
    (hazard,) = found
    assert (hazard.kind, hazard.later.op) == ("read-after-write", "aten::add.out")
    assert hazard.later.stream.endswith("in a graph")
    assert hazard.later.place.split(":")[0] == __file__


def test_memory_freed_since_the_capture_is_told_at_the_replay() -> None:
    main, graph = _side(), Graph()
    with main:
        kept = torch.zeros(8, device="sim")
        gone = torch.ones(8, device="sim")
    with graph.capture(main):
        kept.add_(gone)
    del gone
    with checked(raises=False) as found, main:
        graph.replay()
    assert [(h.kind, h.earlier.op) for h in found] == [("use-after-free", "free")]


def _model_on_two_devices() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].to(f"sim:{dist.get_rank()}")
    model[1].to("sim:7")
    shardgrad.fully_shard(model, mesh=init_device_mesh("sim", (dist.get_world_size(),)))


def test_a_model_on_two_devices_is_refused_by_the_engine() -> None:
    with pytest.raises(RankError, match="parameters of one unit live on several devices") as caught:
        VirtualRanks(2).run(_model_on_two_devices)
    assert isinstance(caught.value.__cause__, DeviceError)
