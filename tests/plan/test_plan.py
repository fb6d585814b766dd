"""Plans: sizes and schedules are the engine's own, clocks obey arithmetic, and bad input gets a
sentence.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result
from torch import nn
from torch.distributed._functional_collectives import all_reduce

from shardgrad.programs.cli import main
from shardgrad.programs.plan.cost import CostModel, compute_s, model_flops, nodes_of
from shardgrad.programs.plan.hardware import DEVICES, TAKEN_NBYTES, Machine
from shardgrad.programs.plan.planning import Plan, plan_of
from shardgrad.programs.plan.recording import Event, Kernel, Marked, Transfer, Waited
from shardgrad.programs.plan.rehearsal import Rehearsal, rehearse
from shardgrad.programs.plan.request import Request
from shardgrad.programs.plan.timeline import Timeline, play
from shardgrad.programs.train.display import nice_nbytes
from shardgrad.programs.train.failure import UsageError
from shardgrad.programs.train.model import Transformer
from shardgrad.programs.train.presets import PRESETS

# A rehearsal takes a second, or many where others use the machine.
pytestmark = pytest.mark.timeout(400)

H100 = Machine()
TINY = Request(preset="tiny", ranks=16, seq_len=64)
with torch.device("meta"):
    SHAPES = [param.shape for param in Transformer(PRESETS["tiny"]).parameters()]
NUMEL = sum(shape.numel() for shape in SHAPES)


@cache
def rehearsal_of(**changes: object) -> Rehearsal:
    return rehearse(replace(TINY, **changes))


def plan_for(machine: Machine = H100, **changes: object) -> Plan:
    return plan_of(rehearsal_of(**changes), machine)


def transfers(rehearsal: Rehearsal) -> list[Transfer]:
    return [event for event in rehearsal.events if isinstance(event, Transfer)]


def chunk_nbytes(shape: torch.Size) -> int:
    """What one parameter takes in a shard of fp32."""
    numel = -(-shape[0] // TINY.ranks) * shape[1:].numel()
    return -(-numel // 64) * 64 * 4  # pieces of 128 bytes; bf16 travels too, so 64 elements


# -- memory


def test_shards_and_states_between_steps_are_what_the_shapes_come_to() -> None:
    pieces = sum(map(chunk_nbytes, SHAPES))
    resting = rehearsal_of().memory.resting
    tails = 3 * 64 * 4  # a unit's label, and 64 elements of alignment
    assert resting["parameters"] == pytest.approx(pieces + tails, abs=3 * 512)
    assert resting["gradients"] == pytest.approx(pieces + tails, abs=3 * 512)
    assert resting["optimizer state"] == pytest.approx(2 * pieces, rel=0.05)


# -- traffic


def test_gradients_in_a_wire_dtype_are_exchanged_in_it() -> None:
    def exchanged(wire_dtype: str | None) -> int:
        moved = transfers(rehearsal_of(wire_dtype=wire_dtype, mesh="4x4"))
        return sum(t.sent_nbytes for t in moved if t.kind != "all-gather" or t.axis == "replicate")

    wide = exchanged(None)
    assert exchanged("bf16") == pytest.approx(wide / 2, rel=0.02)


def test_a_plan_says_the_same_again_in_the_same_process() -> None:
    """Process groups of a world that has ended are nobody's."""
    changes = {"mesh": "4x4", "stage": "hfsdp"}
    assert rehearse(replace(TINY, **changes)).events == rehearsal_of(**changes).events


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(16_384, marks=pytest.mark.long)])
def test_the_order_of_collectives_does_not_depend_on_the_number_of_ranks(ranks: int) -> None:
    kinds = [(each.kind, each.axis) for each in transfers(rehearsal_of(ranks=ranks))]
    assert kinds == [(each.kind, each.axis) for each in transfers(rehearsal_of())]


# -- the clock


def kernel(stream: str = "compute", nbytes: int = 268 * 10**6) -> Kernel:
    return Kernel(stream, "forward", True, 0.0, 0.0, "bf16", nbytes)


def gather(stream: str = "gather", nbytes: int = 10**9) -> Transfer:
    return Transfer(stream, "all-gather", "shard", 8, nbytes)


def played(*events: Event) -> Timeline:
    return play(events, CostModel(Machine(graph=True), shards=8))


def test_a_stream_that_waits_for_nothing_of_this_step_overlaps() -> None:
    time = played(Waited(7, "compute"), gather(), *3 * [kernel()])
    assert time.step_s == max(time.transfers_s, time.compute_s)
    assert time.exposed_s == time.step_s - time.compute_s > 0.0


def test_a_mark_holds_back_the_stream_that_waits_for_it() -> None:
    time = played(gather(), Marked(1, "gather"), Waited(1, "compute"), kernel())
    assert time.step_s == time.transfers_s + time.compute_s
    assert time.exposed_s == pytest.approx(time.transfers_s)


def test_collectives_over_one_link_follow_each_other() -> None:
    time = played(gather("gather"), gather("reduce"))
    assert time.step_s == time.transfers_s


def test_launching_one_by_one_takes_the_host_its_time() -> None:
    eager, graphed = plan_for(), plan_for(Machine(graph=True))
    assert graphed.timeline.host_s == 0.0
    assert eager.timeline.step_s >= eager.timeline.host_s > graphed.timeline.step_s


def test_a_given_mfu_is_what_compute_alone_reaches() -> None:
    events = rehearsal_of().events
    plan = plan_for(Machine(mfu=0.5))
    cost = CostModel(H100, 16, plan.cost.compute_scale)
    assert model_flops(events) / (compute_s(events, cost) * 989e12) == pytest.approx(0.5)
    assert plan.step_range_s == (plan.timeline.step_s,) * 2


def test_without_a_measurement_a_plan_is_a_range_around_what_is_likely() -> None:
    plan = plan_for(Machine(graph=True), batch_size=8)
    fast, slow = plan.step_range_s
    assert fast < plan.timeline.step_s < slow
    assert plan.tokens_per_s_range == tuple(plan.rehearsal.request.tokens / s for s in (slow, fast))


def test_model_flops_are_six_for_each_parameter_and_token() -> None:
    config = PRESETS["tiny"]
    matrices = sum(shape.numel() for shape in SHAPES if len(shape) == 2)
    attention = 12 * config.layers * config.width * TINY.seq_len  # PaLM's, of all heads together
    counted = model_flops(rehearsal_of().events)
    assert counted == pytest.approx(TINY.tokens * (6 * matrices + attention), rel=1e-6)


# -- collectives


def test_ranks_are_placed_on_nodes_as_a_launcher_places_them() -> None:
    assert nodes_of("replicate", 16, 8, 8) == 16


def test_an_exchange_between_nodes_is_limited_by_the_card_of_each_rank() -> None:
    """Of 8 parts of 8 in a node, 56 of 64 leave it, each rank's over its own 400 Gbit/s."""
    exchange = Transfer("reduce", "exchange", "shard", 64, 64 * 10**8)
    assert CostModel(H100, 64).transfer_s(exchange) == pytest.approx(56e8 / 40e9, rel=0.01)
    inside = Transfer("reduce", "exchange", "shard", 8, 8 * 10**9)
    assert CostModel(H100, 8).transfer_s(inside) == pytest.approx(7e9 / 370e9, rel=0.01)


def test_more_bandwidth_is_never_slower_and_more_ranks_are_never_faster() -> None:
    for nbytes in (10**3, 10**6, 10**9):
        times = []
        for ranks in (8, 64, 512, 4096):
            event = Transfer("gather", "all-gather", "shard", ranks, nbytes)
            slow = CostModel(Machine(network="eth100"), ranks).transfer_s(event)
            fast = CostModel(H100, ranks).transfer_s(event)
            assert fast <= slow
            times.append(fast)
        assert times == sorted(times)


# -- units


def test_an_embedding_and_a_head_of_their_own_need_not_be_gathered_together() -> None:
    untied = replace(PRESETS["tiny"], tied=False, vocab_size=8192)
    with mock.patch.dict(PRESETS, {"tiny": untied}):
        apart = rehearse(TINY)
        with mock.patch.object(Transformer, "ends", ()):
            whole = rehearse(TINY)
    assert apart.units == whole.units + 2
    assert apart.memory.peak_nbytes < whole.memory.peak_nbytes


def test_each_byte_at_the_peak_has_the_owner_that_it_has_between_steps() -> None:
    memory = rehearsal_of().memory
    for owner in ("parameters", "gradients", "optimizer state"):
        assert memory.at_peak[owner] == memory.resting[owner]


def test_a_margin_is_left_for_fragmentation() -> None:
    plan = plan_for()
    margin = plan.needed_nbytes - plan.rehearsal.memory.reserved_nbytes - TAKEN_NBYTES
    assert margin == int(0.12 * H100.gpu.memory_nbytes)
    small = replace(H100.gpu, memory_nbytes=plan.needed_nbytes - margin)
    with mock.patch.dict(DEVICES, {"h100": small}):
        assert not plan_for().fits


# -- recomputation and compilation


def test_selective_recomputation_is_between_none_and_all() -> None:
    plans = [
        plan_for(Machine(graph=True), seq_len=512, activation_checkpointing=mode)
        for mode in ("full", "selective", "none")
    ]
    least, some, most = (plan.rehearsal.memory.peak_nbytes for plan in plans)
    assert least < some < most
    slowest, slow, fastest = (plan.timeline.compute_s for plan in plans)
    assert slowest > slow > fastest


# -- the command


def run(*arguments: str) -> Result:
    model = [] if "--model" in arguments else ["--preset", "tiny"]
    return CliRunner().invoke(main, ["plan", *model, "--seq-len", "64", *arguments])


def test_the_command_prints_the_plan() -> None:
    result = run("--ranks", "16")
    assert result.exit_code == 0, result.output
    same = plan_for()
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["step", f"{same.timeline.step_s * 1e3:,.1f}", "ms"] in rows
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        moved = [transfer for transfer in transfers(same.rehearsal) if transfer.kind == kind]
        row = next(row for row in rows if row[:1] == [f"{kind},"])
        assert row[3:5] == ["network", str(len(moved))]
        assert " ".join(row[5:7]) == nice_nbytes(sum(transfer.sent_nbytes for transfer in moved))


def with_scalar() -> nn.Module:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.ones(()))
    return model


def without_parameters() -> tuple[nn.Module, object]:
    return nn.ReLU(), lambda model, batch_size, seq_len: model(torch.zeros(batch_size)).sum()


def fails() -> nn.Module:
    raise ValueError("no")


def reads_values() -> nn.Module:
    torch.zeros(2).sum().item()
    return nn.Linear(2, 2)


def branches() -> tuple[nn.Module, object]:
    def loss(model: nn.Module, batch_size: int, seq_len: int) -> torch.Tensor:
        out = model(torch.zeros(batch_size, 2))
        return out.sum() if out.sum() > 0 else -out.sum()

    return nn.Linear(2, 2), loss


def two_layers() -> tuple[nn.Module, object]:
    def loss(model: nn.Module, batch_size: int, seq_len: int) -> torch.Tensor:
        total: torch.Tensor = model(torch.zeros(batch_size, 4)).mean()
        return all_reduce(total, "sum", dist.group.WORLD)

    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), loss


def gives_a_vector() -> tuple[nn.Module, object]:
    return nn.Linear(2, 2), lambda model, batch_size, seq_len: model.weight


def test_a_model_of_ones_own_is_planned() -> None:
    result = run("--model", f"{__name__}:two_layers", "--mesh", "2x2")
    assert result.exit_code == 0, result.output
    assert f"{__name__}:two_layers, 4e-05 million parameters" in result.stdout
    assert "all-reduce, axis both" in result.stdout  # the model's own, over all ranks


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nowhere:build", "No module named 'nowhere'"),
        ("math:build", "has no attribute 'build'"),
        (f"{__name__}:fails", "cannot be built with fake tensors"),
        (f"{__name__}:reads_values", "reads a tensor's value"),
        (f"{__name__}:branches", "values"),
        (f"{__name__}:gives_a_vector", "return the mean loss"),
        (f"{__name__}:with_scalar", "has no loss"),
        (f"{__name__}:without_parameters", "without trainable parameters"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(model: str, words: str) -> None:
    result = run("--model", model)
    assert result.exit_code in (1, 2), result.output
    assert result.stderr.startswith("shardgrad: ")
    assert words in result.stderr
    assert not result.stdout
    assert not isinstance(result.exception, UsageError), "a traceback is no sentence"
