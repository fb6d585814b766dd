"""`ops.quantize` and `ops.sum_quantized` against float64 and a table of codes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shardgrad import ops
from shardgrad.ops import float8
from tests.support.float8_blocks import TABLE, Sender

BLOCK = ops.FLOAT8_BLOCK_NUMEL


@pytest.fixture(autouse=True, params=["installed", "reference"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs on the kernels that are installed, and on the reference."""
    if request.param == "reference":
        monkeypatch.setattr(float8, "_quantize", float8._quantize_reference)
        monkeypatch.setattr(float8, "_sum_quantized", float8._sum_quantized_reference)


class Message:
    """A message of values, and what it has lost."""

    def __init__(
        self, numel: int, row_numel: int = 0, period: int = 0, tail_offset: int | None = None
    ) -> None:
        self.numel, self.row_numel = numel, row_numel or numel
        self.row_nbytes = -(-self.row_numel * 129 // 128 // 128) * 128 + 128
        self.period = period or numel
        self.tail_offset = self.period if tail_offset is None else tail_offset
        self.kept = torch.zeros(numel + numel // BLOCK, dtype=torch.uint8)
        self.bytes = torch.full(
            (-(-numel // self.row_numel) * self.row_nbytes,), 0xA5, dtype=torch.uint8
        )

    def send(self, values: Tensor) -> Tensor:
        """Returns what arrives."""
        ops.quantize(
            values,
            self.kept,
            self.bytes,
            row_numel=self.row_numel,
            row_nbytes=self.row_nbytes,
            period=self.period,
            tail_offset=self.tail_offset,
        )
        return self.received([self.bytes])

    def received(self, messages: list[Tensor]) -> Tensor:
        out = torch.full((self.numel,), math.nan)
        ops.sum_quantized(messages, out, row_numel=self.row_numel, row_nbytes=self.row_nbytes)
        return out


def values_of_all_sizes(blocks: int, seed: int = 0) -> Tensor:
    """Returns blocks of values over 12 powers of ten each, around another size in each."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-36, 36, blocks).repeat_interleave(BLOCK)
    spread = torch.logspace(-12, 0, BLOCK).repeat(blocks)
    return torch.randn(blocks * BLOCK, generator=generator) * spread * sizes


def same(ours: Tensor, right: Tensor) -> bool:
    return torch.equal(ours.nan_to_num(nan=math.pi), right.nan_to_num(nan=math.pi))


def test_what_arrives_is_the_nearest_code_of_the_values_and_of_what_was_lost_before() -> None:
    message, oracle = Message(40 * BLOCK), Sender()
    for step in range(4):
        values = values_of_all_sizes(40, step)
        assert same(message.send(values), oracle.send(values))


def test_every_code_and_every_middle_between_two_is_rounded_to_even() -> None:
    middles = (TABLE[1:] + TABLE[:-1]) / 2
    edges = torch.cat([TABLE, middles, -middles, torch.tensor([448.0, 464 - 2**-14, -448.0])])
    numel = -(-edges.numel() // (BLOCK - 1)) * BLOCK
    values = torch.zeros(numel, dtype=torch.float64).view(-1, BLOCK)
    values[:, 0] = 448.0  # the scale is 1
    for i, part in enumerate(edges[edges.abs() <= 448].split(BLOCK - 1)):
        values[i, 1 : 1 + part.numel()] = part
    flat = values.view(-1).float()
    assert same(Message(numel).send(flat), Sender().send(flat))


@pytest.mark.parametrize("largest", [448.0, 449.0, 2.0**-126, 1e-40, 3.4e38, 0.875, 0.8751, 1.0])
def test_a_scale_is_the_smallest_power_of_two_with_room_for_the_block(largest: float) -> None:
    values = torch.linspace(-1, 1, BLOCK) * torch.tensor(largest)
    message, oracle = Message(BLOCK), Sender()
    for _ in range(3):
        assert same(message.send(values), oracle.send(values))


def test_losses_add_up_to_what_a_bfloat16_would_lose_over_many_steps() -> None:
    values, message, steps = values_of_all_sizes(20, 3), Message(20 * BLOCK), 256
    total = sum((message.send(values).double() for _ in range(steps)), torch.zeros(()))
    off = (total / steps - values.double()).abs()
    largest = values.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK).double()
    scale = (largest / 224).clamp(min=2.0**-118)
    # Lost in each step is a sixteenth of a sixteenth of what is sent, or half of the smallest loss
    # there is; and once, after the last step, what is kept: a sixteenth, or half of the smallest
    # code.
    in_each = (values.abs().double() * 1.07 * 2**-8).maximum(scale * 2**-14)
    once = (values.abs().double() * 1.07 * 2**-4).maximum(scale * 2**-10)
    assert (off <= in_each + once / steps).all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_arrives_as_nan_in_its_place_and_is_forgotten(bad: float) -> None:
    values, message, oracle = values_of_all_sizes(3), Message(3 * BLOCK), Sender()
    values[5], values[-1] = bad, bad
    arrived, right = message.send(values), oracle.send(values)
    assert arrived.isnan().nonzero().view(-1).tolist() == [5, 3 * BLOCK - 1]
    assert same(arrived, right)
    values[5] = values[-1] = 0.5
    assert same(message.send(values), oracle.send(values)), (
        "it had come back, or took its block along"
    )


def test_a_block_that_is_not_finite_at_all_leaves_no_loss() -> None:
    message = Message(BLOCK)
    assert message.send(torch.full((BLOCK,), math.inf)).isnan().all()
    assert same(message.send(torch.zeros(BLOCK)), torch.zeros(BLOCK))
    assert same(message.send(torch.ones(BLOCK)), torch.ones(BLOCK))


def test_a_block_of_zeros_is_sent_as_zeros_and_keeps_what_it_owes() -> None:
    message, oracle, values = Message(2 * BLOCK), Sender(), torch.linspace(0.9, 1.1, 2 * BLOCK)
    gone = values.clone()
    gone[:BLOCK] = 0
    for sent in (values, gone, gone, values):
        arrived = message.send(sent)
        assert same(arrived, oracle.send(sent))
        is_empty = bool((sent[:BLOCK] == 0).all())
        assert (arrived[:BLOCK] == 0).all() == is_empty
        assert (message.bytes[:BLOCK] == 0).all() == is_empty


def test_flags_and_counts_travel_as_they_are_and_lose_nothing() -> None:
    period, tail = 3 * BLOCK, 2 * BLOCK
    message = Message(2 * period, row_numel=period, period=period, tail_offset=tail)
    values = values_of_all_sizes(6)
    flags = torch.tensor([0.0, 1.0, 16.0, 17.0, 1000.0]).repeat(26)[:BLOCK]
    values.view(2, -1)[:, tail:] = flags
    oracle = Sender()
    for _ in range(3):
        arrived = message.send(values).view(2, -1)
        exact = flags <= 16
        assert torch.equal(arrived[:, tail:][:, exact], flags[exact].expand(2, -1))
        assert set(arrived[:, tail:][:, ~exact].unique().tolist()) == {16.0, 448.0}, "17 and 1000"
        plain = values.view(2, -1)[:, :tail].reshape(-1)
        assert same(arrived[:, :tail].reshape(-1), oracle.send(plain))


@pytest.mark.parametrize("numel", [5 * BLOCK, 6 * BLOCK])
def test_rows_of_a_message_lie_apart_and_what_values_do_not_fill_is_left_alone(numel: int) -> None:
    values, message = values_of_all_sizes(6)[:numel], Message(numel, row_numel=2 * BLOCK)
    oracle = Sender()
    assert same(message.send(values), oracle.send(values))
    rows = message.bytes.view(3, message.row_nbytes)
    assert (rows[:, 2 * BLOCK + 2 :] == 0xA5).all()
    if numel == 5 * BLOCK:
        assert (rows[2, BLOCK : 2 * BLOCK] == 0xA5).all()
        assert rows[2, 2 * BLOCK + 1] == 0xA5


@pytest.mark.parametrize("ranks", [2, 5])
def test_messages_are_summed_in_float32_in_their_order(ranks: int) -> None:
    messages, right = [], torch.zeros(())
    for rank in range(ranks):
        message, values = Message(4 * BLOCK), values_of_all_sizes(4, rank)
        arrived = message.send(values)
        messages.append(message.bytes)
        right = arrived if rank == 0 else right + arrived
    assert torch.equal(Message(4 * BLOCK).received(messages), right)


def arguments(**changes: object) -> dict[str, object]:
    numel = 4 * BLOCK
    given = {
        "values": torch.zeros(numel),
        "kept": torch.zeros(numel + 4, dtype=torch.uint8),
        "message": torch.zeros(2 * 384, dtype=torch.uint8),
        "row_numel": 2 * BLOCK,
        "row_nbytes": 384,
        "period": numel,
        "tail_offset": numel,
    }
    return given | changes


@pytest.mark.parametrize(
    "changes",
    [
        {"values": torch.zeros(4 * BLOCK, dtype=torch.bfloat16)},
        {"values": torch.zeros(4 * BLOCK + 1)},
        {"values": torch.zeros(8 * BLOCK)[::2]},
        {"kept": torch.zeros(4 * BLOCK, dtype=torch.uint8)},
        {"kept": torch.zeros(4 * BLOCK + 4)},
        {"message": torch.zeros(700, dtype=torch.uint8)},
        {"message": torch.zeros(768)},
        {"row_numel": 100},
        {"row_numel": 0},
        {"row_nbytes": 257},
        {"period": 100},
        {"period": 0},
        {"tail_offset": 100},
        {"tail_offset": 5 * BLOCK},
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes: dict[str, object]) -> None:
    ops.quantize(**arguments())
    with pytest.raises(RuntimeError):
        ops.quantize(**arguments(**changes))


@pytest.mark.parametrize(
    ("messages", "out"),
    [
        ([], torch.zeros(BLOCK)),
        ([torch.zeros(100, dtype=torch.uint8)], torch.zeros(BLOCK)),
        ([torch.zeros(256, dtype=torch.uint8)], torch.zeros(BLOCK, dtype=torch.float64)),
        ([torch.zeros(256)], torch.zeros(BLOCK)),
        (
            [torch.zeros(256, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)],
            torch.zeros(BLOCK),
        ),
    ],
)
def test_messages_that_do_not_fit_are_refused(messages: list[Tensor], out: Tensor) -> None:
    with pytest.raises(RuntimeError):
        ops.sum_quantized(messages, out, row_numel=BLOCK, row_nbytes=256)
