"""Records as one HTML file that needs no network: tables, charts, and a timeline to zoom into."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from shardgrad.bench.catalogue import CATALOGUE
from shardgrad.bench.observation import LANES
from shardgrad.bench.words import COLUMNS, Record, cells, setting, title, verdicts

__all__ = ["render", "write"]

_MIB = 2**20


@dataclass(frozen=True)
class Strip:
    """One line of a chart; places are percent of its width.

    Attributes:
        name: of the contestant.
        value: the median, in words.
        median: its place.
        quartiles: their places.
        dots: places of single rounds.
    """

    name: str
    value: str
    median: float
    quartiles: tuple[float, float]
    dots: tuple[float, ...] = ()


@dataclass(frozen=True)
class Chart:
    """Lines on one scale that begins at zero.

    Attributes:
        heading: what is shown.
        strips: a line for each contestant.
        mark: place of a line across all of them; None for none.
    """

    heading: str
    strips: tuple[Strip, ...]
    mark: float | None = None


def write(records: Sequence[Record], path: Path) -> Path:
    """Writes the report of some records; folders are made if they are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(records), encoding="utf-8")
    return path


def render(records: Sequence[Record]) -> str:
    """The report as HTML. Whatever records hold is shown as text and never becomes markup or script."""
    from jinja2 import Environment, StrictUndefined

    page = files("shardgrad.bench") / "page"
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    template = environment.from_string((page / "report.html").read_text(encoding="utf-8"))
    shown = dict.fromkeys(name for record in records for name in record["config"]["contestants"])
    return template.render(
        style=(page / "report.css").read_text(encoding="utf-8"),
        script=(page / "report.js").read_text(encoding="utf-8"),
        sections=[_section(record) for record in records],
        lanes=LANES,
        contestants={name: CATALOGUE[name].words for name in shown if name in CATALOGUE},
        columns=[(heading, words) for heading, _, _, words in COLUMNS],
    )


def _section(record: Record) -> dict[str, Any]:
    headings, rows = cells(record)
    return {
        "title": title(record),
        "setting": setting(record),
        "verdicts": verdicts(record),
        "headings": headings,
        "rows": rows,
        "left_out": record["left_out"],
        "charts": [chart for chart in _charts(record) if chart.strips],
        "peak": record["config"].get("mfu_peak"),
        "timelines": record["timelines"],
        "facts": json.dumps({"environment": record["environment"], "config": record["config"]}, indent=2),
    }


def _charts(record: Record) -> list[Chart]:
    summary, samples = record["summary"], record["samples"]
    step = {
        name: (of["wall_s"]["median"], of["wall_s"]["quartiles"], samples[name]["wall_s"])
        for name, of in summary.items()
    }
    ratio = {
        name: (of["ratio_to_base"]["median"], of["ratio_to_base"]["quartiles"], ())
        for name, of in summary.items()
        if "ratio_to_base" in of
    }
    return [
        _chart("Step time, ms: median, quartiles, every round", step, lambda value: f"{value * 1e3:.2f}"),
        _chart(
            "Step time as a multiple of fsdp2's in the same round", ratio, lambda value: f"{value:.3f}", 1.0
        ),
        _chart(*_memory(summary), lambda value: f"{value / _MIB:.0f}"),
    ]


def _memory(summary: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """On a device what its allocator reserved, otherwise resident memory."""
    field, words = "peak_rss_beyond_imports_nbytes", "Peak resident memory beyond imports, MiB"
    if any("peak_reserved_nbytes" in of for of in summary.values()):
        field, words = "peak_reserved_nbytes", "Peak memory reserved on the device, MiB"
    return words, {name: (of[field], (of[field],) * 2, ()) for name, of in summary.items() if field in of}


def _chart(heading: str, values: Mapping[str, Any], say: Any, mark: float | None = None) -> Chart:
    # A round that was interrupted shall not squeeze all others together: it ends at the edge.
    top = 1.15 * max([mark or 0.0, *(high for _, (_, high), _ in values.values())], default=1.0) or 1.0

    def place(value: float) -> float:
        return round(min(100.0, 100 * value / top), 2)

    strips = tuple(
        Strip(name, say(median), place(median), (place(low), place(high)), tuple(map(place, dots)))
        for name, (median, (low, high), dots) in values.items()
    )
    return Chart(heading, strips, None if mark is None else place(mark))
