"""The report of an explained step: tables for a terminal, or plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardgrad.explain.changes import Saving
from shardgrad.explain.replay import Replay
from shardgrad.explain.step import Step

__all__ = ["as_json", "show"]

_FAITHFUL = 0.05  # a replay that differs by more says little about changes
_MOST_NAMES = 8
_WORTH = 0.002  # changes that save less are not shown


def show(step: Step, played: Replay, savings: Sequence[Saving], console: Console) -> None:
    """Prints where the time goes, what the compute lane waits for, and what changes would save."""
    moved, exposed = played.exposed()
    sentence = f"The step takes {_ms(played.seconds)}"
    if step.seconds is not None:
        sentence += f" replayed, {_ms(step.seconds)} recorded"
    console.print(
        f"[bold]{sentence}; {_ms(exposed)} of {_ms(moved)} of communication is exposed.[/bold]"
    )
    if step.note:
        console.print(_printable(step.note), style="dim", markup=False)
    if not _is_faithful(step, played):
        console.print(
            "The replay differs from the record by more than 5 %: waits are missing in the trace, "
            "so what "
            "changes would save is not certain. Profile with shardgrad train --profile."
        )
    console.print(_shares("critical path, by kind", played.on_critical_path(), played.seconds))
    bubbles = played.bubbles()
    if bubbles:
        console.print(_shares("compute is idle, and waits for", bubbles, played.seconds))
    console.print(_names(played))
    console.print(_savings(savings))


def as_json(step: Step, played: Replay, savings: Sequence[Saving]) -> dict[str, Any]:
    """Returns plain values; times are in seconds."""
    moved, exposed = played.exposed()
    return {
        "recorded_s": step.seconds,
        "replayed_s": played.seconds,
        "note": step.note,
        "operations": len(step.ops),
        "critical_path_s": played.on_critical_path(),
        "idle_s": played.bubbles(),
        "communication_s": moved,
        "exposed_s": exposed,
        "changes": [
            {
                "change": each.change.name,
                "how": each.change.how,
                "step_s": each.seconds,
                "share": each.share,
            }
            for each in savings
        ],
    }


def _is_faithful(step: Step, played: Replay) -> bool:
    return not step.seconds or abs(played.seconds / step.seconds - 1) <= _FAITHFUL


def _shares(title: str, sums: dict[str, float], whole: float) -> Table:
    table = Table(title, "time", "of the step", box=None, pad_edge=False)
    for name, seconds in sorted(sums.items(), key=lambda row: -row[1]):
        table.add_row(escape(name), _ms(seconds), f"{seconds / whole:.1%}" if whole else "")
    return table


def _names(played: Replay) -> Table:
    sums: dict[str, float] = {}
    for number in played.critical_path():
        name = _short(played.ops[number].name)
        sums[name] = sums.get(name, 0.0) + played.ends[number] - played.begins[number]
    largest = dict(sorted(sums.items(), key=lambda row: -row[1])[:_MOST_NAMES])
    return _shares("critical path, largest operations", largest, played.seconds)


def _savings(savings: Sequence[Saving]) -> Table | str:
    savings = [each for each in savings if each.share < -_WORTH]
    if not savings:
        return "No change that is known here gains anything."
    table = Table("if", "step", "", "how", box=None, pad_edge=False)
    for each in savings:
        table.add_row(each.change.name, _ms(each.seconds), f"{each.share:+.1%}", each.change.how)
    return table


def _short(name: str) -> str:
    printable = _printable(name)
    return printable if len(printable) <= 60 else printable[:57] + "..."


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"
