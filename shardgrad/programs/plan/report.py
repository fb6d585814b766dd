"""The report of a plan: tables for a terminal, or plain values for JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from shardgrad.programs.plan.hardware import BANDWIDTH_SHARE, MATMUL_SHARE, TAKEN_NBYTES
from shardgrad.programs.plan.planning import Plan
from shardgrad.programs.train.display import nice_nbytes

_TIMES = ("step_s", "compute_s", "exposed_s", "transfers_s", "host_s")


def show(plan: Plan, console: Console) -> None:
    """Prints a plan."""
    tables = _memory(plan), "", _traffic(plan), "", _time(plan)
    console.print(Group(_heading(plan), "", *tables, "", _sources(plan)))


def as_json(plan: Plan) -> dict[str, Any]:
    """Returns a plan as plain values of one rank; sizes are in bytes, times in seconds."""
    return {
        "model": plan.name,
        "parameters": plan.parameters,
        "request": dataclasses.asdict(plan.request),
        "device": plan.machine.device.name,
        "memory": {
            "resting_nbytes": dict(plan.resting),
            "at_peak_nbytes": dict(plan.memory.at_peak),
            "peak_nbytes": plan.memory.peak_nbytes,
            "reserved_nbytes": plan.memory.reserved_nbytes,
            "margin_nbytes": plan.machine.device.margin_nbytes,
            "needed_nbytes": plan.needed_nbytes,
            "fits": plan.fits,
        },
        "traffic": [dataclasses.asdict(each) for each in plan.traffic],
        "time": {
            **{name: getattr(plan.timeline, name) for name in _TIMES},
            "step_range_s": plan.step_range_s,
            "tokens_per_s": plan.tokens_per_s,
            "tokens_per_s_range": plan.tokens_per_s_range,
            "mfu": plan.mfu,
        },
    }


def _heading(plan: Plan) -> str:
    request, machine = plan.request, plan.machine
    mesh = f"{request.shards} shards"
    if request.replicas > 1:
        mesh = f"{request.replicas} replicas of {mesh}"
    return (
        f"[bold]{plan.name}[/bold], {_numel(plan.parameters)} parameters in {plan.units} units, on "
        f"{request.ranks} x {machine.device.name}: {mesh}, stage {request.stage}, "
        f"{request.precision}, {request.accumulate} x {request.batch_size} x {request.seq_len} "
        "tokens a rank"
    )


def _memory(plan: Plan) -> Table:
    resting, memory, device = plan.resting, plan.memory, plan.machine.device
    peak = memory.at_peak
    table = Table("memory of a rank", "between steps", "at the peak", box=None, pad_edge=False)
    for owner in sorted(dict.fromkeys((*resting, *peak)), key=lambda owner: -peak.get(owner, 0)):
        if max(resting.get(owner, 0), peak.get(owner, 0)) > 0:
            table.add_row(
                owner, nice_nbytes(resting.get(owner, 0)), nice_nbytes(peak.get(owner, 0))
            )
    table.add_row(
        "[bold]allocated",
        nice_nbytes(sum(resting.values())),
        f"[bold]{nice_nbytes(memory.peak_nbytes)}",
    )
    table.add_row("kept by the allocator, at least", "", nice_nbytes(memory.reserved_nbytes))
    table.add_row("context, communicators, workspaces", "", nice_nbytes(TAKEN_NBYTES))
    table.add_row("margin: fragmentation, NCCL", "", nice_nbytes(device.margin_nbytes))
    verdict = "[green]fits" if plan.fits else "[red]does not fit"
    room = f"{nice_nbytes(plan.needed_nbytes)} of {nice_nbytes(device.memory_nbytes)}"
    table.add_row(f"[bold]{verdict}", "", f"[bold]{room}")
    return table


def _traffic(plan: Plan) -> RenderableType:
    rows = plan.traffic
    if not rows:
        return "No traffic: there is one rank."
    table = Table(
        "traffic of a rank in a step", "over", "count", "sent", "busy", box=None, pad_edge=False
    )
    for row in rows:
        name = f"{row.kind}, axis {row.axis}"
        table.add_row(name, row.link, str(row.count), nice_nbytes(row.sent_nbytes), _ms(row.busy_s))
    return table


def _time(plan: Plan) -> Table:
    request, timeline, (least, most) = plan.request, plan.timeline, plan.tokens_per_s_range
    fast, slow = plan.step_range_s
    is_range = slow > fast
    table = Table("time of a step", "", box=None, pad_edge=False)
    table.add_row(
        "[bold]step", f"[bold]{_ms(fast)} to {_ms(slow)}" if is_range else f"[bold]{_ms(fast)}"
    )
    if is_range:
        table.add_row("[bold]tokens/s, a rank", f"[bold]{least:,.0f} to {most:,.0f}")
        table.add_row("", "give --mfu, as measured on one node, for one number; likely:")
        table.add_row("step", _ms(timeline.step_s))
    table.add_row("compute stream busy", _ms(timeline.compute_s))
    table.add_row(
        "exposed communication", f"{_ms(timeline.exposed_s)} of {_ms(timeline.transfers_s)}"
    )
    table.add_row("host launches", _ms(timeline.host_s))
    table.add_row("tokens/s, a rank", f"{plan.tokens_per_s:,.0f}")
    table.add_row("tokens/s, all ranks", f"{plan.tokens_per_s * request.ranks:,.0f}")
    table.add_row("MFU, as PaLM counts", f"{plan.mfu:.1%}")
    return table


def _sources(plan: Plan) -> str:
    machine = plan.machine
    lines = [
        f"device: {machine.device.source}; {MATMUL_SHARE:.0%} of its products' peak, "
        f"{BANDWIDTH_SHARE:.0%} of its bandwidth, durations times {plan.compute_scale:.2f}",
        f"link {machine.link.name}: {machine.link.source}",
        f"network {machine.network.name} x {machine.cards_per_node}: {machine.network.source}",
    ]
    return "\n".join(f"[dim]{line}[/dim]" for line in lines)


def _numel(count: int) -> str:
    return f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
