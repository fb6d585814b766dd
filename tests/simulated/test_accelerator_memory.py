"""Memory is lent again in stream order, as a caching allocator does it."""

from __future__ import annotations

import torch

from tests.simulated.accelerator.device import checked

NUMEL = 3_333  # no other test asks for as much, so these blocks are not in the pools yet


def _pointer(stream: torch.Stream | None = None) -> int:
    if stream is None:
        return torch.empty(NUMEL, device="sim").data_ptr()
    with stream:
        return torch.empty(NUMEL, device="sim").data_ptr()


def test_a_freed_block_goes_to_the_next_who_asks_on_its_stream() -> None:
    side = torch.Stream("sim")
    first = _pointer()
    assert _pointer(side) != first
    assert _pointer() == first


def test_record_stream_keeps_a_block_until_the_host_knows_the_stream_is_done() -> None:
    side = torch.Stream("sim")
    with checked():
        x = torch.zeros(NUMEL, device="sim")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            x.add_(1)
        x.record_stream(side)
        first = x.data_ptr()
        del x
        assert _pointer() != first
        side.synchronize()
        kept = [torch.empty(NUMEL, device="sim") for _ in range(3)]
        assert first in [tensor.data_ptr() for tensor in kept]


def test_a_block_lent_again_still_belongs_to_its_stream() -> None:
    side = torch.Stream("sim")
    with checked(raises=False) as found:
        x = torch.zeros(NUMEL, device="sim")
        del x
        y = torch.empty(NUMEL, device="sim")
        with side:
            y.fill_(1)  # while the zeros may still be on their way
        side.synchronize()
    assert [hazard.kind for hazard in found] == ["write-after-write"]


def test_a_storage_may_be_freed_and_filled_again() -> None:
    x = torch.arange(NUMEL, device="sim", dtype=torch.float32)
    view = x[10:20]
    storage = x.untyped_storage()
    before = torch.get_device_module("sim").memory_allocated()
    with checked():
        storage.resize_(0)
        assert torch.get_device_module("sim").memory_allocated() < before
        storage.resize_(4 * NUMEL)
        x.fill_(2)
        assert view.tolist() == [2.0] * 10


def test_freeing_a_storage_that_another_stream_uses_is_a_hazard() -> None:
    side = torch.Stream("sim")
    x = torch.zeros(NUMEL, device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.add_(1)
    with checked(raises=False) as found:
        x.untyped_storage().resize_(0)
    assert [hazard.kind for hazard in found] == ["free-while-in-flight"]


def test_growing_a_storage_keeps_its_content() -> None:
    x = torch.arange(4.0, device="sim")
    x.resize_(NUMEL)
    assert x[:4].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_memory_that_nobody_wrote_is_not_a_number() -> None:
    assert torch.empty(NUMEL, device="sim").isnan().all().item()


def test_an_output_of_another_size_is_resized() -> None:
    out = torch.empty(0, device="sim")
    torch.nonzero(
        torch.tensor([0.0, 1.0, 1.0], device="sim"),
        out=(index := torch.empty(0, dtype=torch.int64, device="sim")),
    )
    assert index.flatten().tolist() == [1, 2]
    torch.add(torch.ones(3, device="sim"), 1, out=out)
    assert out.tolist() == [2.0] * 3
