"""Mistakes get a typed error with a sentence, and the process lives on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardgrad
from shardgrad.errors import DeviceError
from tests.simulated.accelerator import errors
from tests.simulated.accelerator.virtual_ranks import VirtualRanks
from tests.support.ranks import RankError


def test_an_event_that_was_never_recorded_cannot_be_waited_for() -> None:
    for wait in (
        lambda event: event.wait(),
        lambda event: torch.accelerator.current_stream().wait_event(event),
        lambda event: event.synchronize(),
    ):
        with pytest.raises(errors.UnrecordedEventError, match="never was"):
            wait(torch.Event("sim"))
    event = torch.Event("sim")
    event.record()
    event.wait()


def test_an_event_belongs_to_one_device() -> None:
    event = torch.Event("sim:0")
    with pytest.raises(errors.OtherDeviceError, match="expected a stream of sim:0"):
        event.record(torch.Stream("sim:1"))


def test_another_devices_stream_may_wait_for_an_event() -> None:
    event = torch.Event("sim:0")
    event.record(torch.Stream("sim:0"))
    event.wait(torch.Stream("sim:1"))


def test_memory_cannot_be_recorded_on_another_devices_stream() -> None:
    with pytest.raises(errors.OtherDeviceError, match="record_stream"):
        torch.zeros(4, device="sim:0").record_stream(torch.Stream("sim:1"))


def test_an_op_on_two_devices_is_refused() -> None:
    model = torch.nn.Linear(4, 4).to("sim:0")
    with pytest.raises(RuntimeError, match=r"sim:0.*sim:1|sim:1.*sim:0"):
        model(torch.zeros(2, 4, device="sim:1"))
    with pytest.raises(RuntimeError, match="cpu"):
        torch.zeros(4, device="sim") + torch.zeros(4)
    with pytest.raises(
        errors.MixedDevicesError, match="expected all tensors on sim:1, got one on sim:0"
    ):
        torch.ops.shardgrad.sum_chunks(
            [torch.ones(2, device="sim:1")], torch.ones(2, device="sim:0"), 1.0, False
        )


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(IndexError, match="expected a device from sim:0 to sim:7, got sim:8"):
        torch.zeros(1, device="sim:8")


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 1 to 8 ranks, got 9"):
        VirtualRanks(9)


def _tensor_of_another_rank() -> None:
    dist.all_reduce(torch.ones(1, device=f"sim:{1 - dist.get_rank()}"))


def test_a_collective_on_another_ranks_device_is_refused() -> None:
    with pytest.raises(
        RankError, match="expected tensors on sim:0, this rank's device, got one on sim:1"
    ):
        VirtualRanks(2).run(_tensor_of_another_rank)


def _model_on_two_devices() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].to(f"sim:{dist.get_rank()}")
    model[1].to("sim:7")
    shardgrad.fully_shard(model, mesh=init_device_mesh("sim", (dist.get_world_size(),)))


def test_a_model_on_two_devices_is_refused_by_the_engine() -> None:
    with pytest.raises(RankError, match="parameters of one unit live on several devices") as caught:
        VirtualRanks(2).run(_model_on_two_devices)
    assert isinstance(caught.value.__cause__, DeviceError)
