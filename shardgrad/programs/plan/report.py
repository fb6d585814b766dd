"""The report of a plan: tables for a terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table

from shardgrad.programs.plan.hardware import TAKEN_NBYTES
from shardgrad.programs.plan.planning import Plan
from shardgrad.programs.plan.recording import Transfer
from shardgrad.programs.train.display import nice_nbytes


def show(plan: Plan, console: Console) -> None:
    """Prints a plan."""
    console.print(Group(_heading(plan), "", _memory(plan), "", _traffic(plan), "", _time(plan)))


def _heading(plan: Plan) -> str:
    rehearsal, request = plan.rehearsal, plan.rehearsal.request
    mesh = f"{request.shards} shards"
    if request.replicas > 1:
        mesh = f"{request.replicas} replicas of {mesh}"
    return (
        f"[bold]{request.name}[/bold], {_numel(rehearsal.parameters)} parameters in "
        f"{rehearsal.units} units, on {request.ranks} x {plan.cost.machine.device}: {mesh}, stage "
        f"{request.stage}, {request.precision}, {request.accumulate} x {request.batch_size} x "
        f"{request.seq_len} tokens per rank"
    )


def _memory(plan: Plan) -> Table:
    memory, machine = plan.rehearsal.memory, plan.cost.machine
    resting, peak = memory.resting, memory.at_peak
    owners = sorted(dict.fromkeys((*resting, *peak)), key=lambda owner: -peak.get(owner, 0))
    sizes = ((owner, resting.get(owner, 0), peak.get(owner, 0)) for owner in owners)
    verdict = "[green]fits" if plan.fits else "[red]does not fit"
    room = f"{nice_nbytes(plan.needed_nbytes)} of {nice_nbytes(machine.gpu.memory_nbytes)}"
    return _table(
        ("memory per rank", "between steps", "at the peak"),
        *(
            (owner, nice_nbytes(low), nice_nbytes(high))
            for owner, low, high in sizes
            if low or high
        ),
        (
            "[bold]allocated",
            nice_nbytes(sum(resting.values())),
            f"[bold]{nice_nbytes(memory.peak_nbytes)}",
        ),
        ("kept by the allocator, at least", "", nice_nbytes(memory.reserved_nbytes)),
        ("context, communicators, workspaces", "", nice_nbytes(TAKEN_NBYTES)),
        ("margin: fragmentation, NCCL", "", nice_nbytes(machine.margin_nbytes)),
        (f"[bold]{verdict}", "", f"[bold]{room}"),
    )


def _traffic(plan: Plan) -> RenderableType:
    """Shows what a rank moves in a step, added up for each kind of collective over each axis."""
    alike: dict[tuple[str, str, str], list[Transfer]] = defaultdict(list)
    for event in plan.rehearsal.events:
        if isinstance(event, Transfer) and event.ranks > 1:
            alike[event.axis, event.kind, plan.cost.links_of(event)].append(event)
    if not alike:
        return "No traffic: there is one rank."
    return _table(
        ("traffic per rank and step", "over", "count", "sent", "busy"),
        *(
            (
                f"{kind}, axis {axis}",
                link,
                str(len(transfers)),
                nice_nbytes(sum(transfer.sent_nbytes for transfer in transfers)),
                _ms(sum(map(plan.cost.transfer_s, transfers))),
            )
            for (axis, kind, link), transfers in sorted(alike.items())
        ),
    )


def _time(plan: Plan) -> Table:
    timeline, (least, most), (fast, slow) = (
        plan.timeline,
        plan.tokens_per_s_range,
        plan.step_range_s,
    )
    steps = [("[bold]step", f"[bold]{_ms(fast)}")]
    if slow > fast:
        steps = [
            ("[bold]step", f"[bold]{_ms(fast)} to {_ms(slow)}"),
            ("[bold]tokens/s per rank", f"[bold]{least:,.0f} to {most:,.0f}"),
            ("", "for one number, give --mfu as measured on one node; likely:"),
            ("step", _ms(timeline.step_s)),
        ]
    return _table(
        ("time per step", ""),
        *steps,
        ("compute stream busy", _ms(timeline.compute_s)),
        ("exposed communication", f"{_ms(timeline.exposed_s)} of {_ms(timeline.transfers_s)}"),
        ("host launches", _ms(timeline.host_s)),
        ("tokens/s per rank", f"{plan.tokens_per_s:,.0f}"),
        ("tokens/s of all ranks", f"{plan.tokens_per_s * plan.rehearsal.request.ranks:,.0f}"),
        ("MFU, as PaLM counts", f"{plan.mfu:.1%}"),
    )


def _table(columns: Sequence[str], *rows: Sequence[str]) -> Table:
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table


def _numel(count: int) -> str:
    return f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
