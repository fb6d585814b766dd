"""Pictures of records: charts of times, ratios and memory, and a timeline of one step of some
engines.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.engines.catalogue import ENGINES
from benchmarks.engines.trace import LANES
from benchmarks.records import Record
from benchmarks.tables import heading, is_spread, rows_of, title, unit_of, words

_COLOURS = dict(
    zip(LANES, ("#4c78a8", "#f28e2b", "#b23a8e", "#c44e52", "#3a8a4d", "#8b8f95"), strict=True)
)
_ENGINE, _FLOOR = "#4c78a8", "#a9b0b8"
_IN_TIMELINE = ("fsdp2", "shardgrad", "shardgrad-graphed")
_TIMES = ("wall_s", "host_s", "cpu_s")
# Of the device, where it has some.
_MEMORY = (
    "peak_reserved_nbytes",
    "peak_rss_beyond_imports_nbytes",
)


def draw(record: Record) -> dict[str, bytes]:
    """PNGs by name: `charts`, and `timeline` where a record has one."""
    figures: dict[str, Figure] = {}
    # What records hold is text, in which no dollar begins a formula.
    with matplotlib.rc_context({"text.parse_math": False}):
        fields = _fields(record)
        if fields:
            figures["charts"] = _charts(record, fields)
        if record.get("timelines"):
            figures["timeline"] = _timeline(record)
        found = {}
        for name, figure in figures.items():
            stream = io.BytesIO()
            figure.savefig(stream, format="png", dpi=120)
            found[name] = stream.getvalue()
    return found


def _fields(record: Record) -> list[str]:
    """What there is a chart of: times and ratios, and, of training steps, memory."""
    rows = [row for _, row in rows_of(record["summary"])]
    spreads = dict.fromkeys(
        field for row in rows for field, value in row.items() if is_spread(value)
    )
    wanted = [field for field in spreads if field in _TIMES or field.startswith("ratio_to_")]
    return wanted + [field for field in _MEMORY if any(field in row for row in rows)][:1]


def _charts(record: Record, fields: Sequence[str]) -> Figure:
    """A panel for each field, a bar for each row, with quartiles as whiskers and a dot for every
    round.
    """
    rows = list(rows_of(record["summary"]))[::-1]
    figure = Figure(figsize=(9, len(fields) * (0.9 + 0.3 * len(rows))), layout="constrained")
    panels = figure.subplots(len(fields), 1, squeeze=False)[:, 0]
    for axes, field in zip(panels, fields, strict=True):
        places = [number for number, (_, row) in enumerate(rows) if row.get(field) is not None]
        spreads = [_spread_of(rows[place][1][field]) for place in places]
        top = 1.5 * max([*(high for _, _, high in spreads)], default=1.0) or 1.0
        factor, unit = unit_of(field, top)
        medians = [median / factor for _, median, _ in spreads]
        below = [max(0.0, median - low) / factor for low, median, _ in spreads]
        above = [max(0.0, high - median) / factor for _, median, high in spreads]
        colours = [_FLOOR if _is_floor(rows[place][0]) else _ENGINE for place in places]
        bars = axes.barh(places, medians, xerr=(below, above), color=colours, capsize=2)
        axes.bar_label(
            bars, [words(field, median) for _, median, _ in spreads], padding=6, fontsize=8
        )
        for place in places if field in _TIMES else ():
            rounds = [value / factor for value in _at(record["samples"], (*rows[place][0], field))]
            axes.plot(rounds, [place] * len(rounds), "|", color="black", alpha=0.3)
        if field.startswith("ratio_to_"):
            axes.axvline(1.0, color="black", linestyle="--", linewidth=1)
        # A round that was interrupted shall not squeeze all others together: it is not shown.
        axes.set(xlim=(0, top / factor), xlabel=", ".join(filter(None, (heading(field), unit))))
        axes.set_yticks(range(len(rows)), [", ".join(path) for path, _ in rows], fontsize=8)
    if any(_is_floor(path) for path, _ in rows):
        legend = [Patch(color=_ENGINE, label="engines"), Patch(color=_FLOOR, label="floors")]
        figure.legend(handles=legend, loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    figure.suptitle(title(record), fontsize="medium")
    return figure


def _is_floor(path: Sequence[str]) -> bool:
    """Whether a row is of a floor: what is left if an engine costs nothing."""
    return any(name in ENGINES and not ENGINES[name].trains for name in path)


def _spread_of(value: Any) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; a number alone is all three."""
    if not is_spread(value):
        return value, value, value
    low, high = value["quartiles"]
    return low, value["median"], high


def _at(samples: Any, path: Sequence[str]) -> Sequence[float]:
    """A row's values of each round; nothing where older records have them elsewhere."""
    for name in path:
        samples = samples.get(name, ()) if isinstance(samples, Mapping) else ()
    return samples if isinstance(samples, list) else ()


def _timeline(record: Record) -> Figure:
    """One step of the first rank, under the profiler, by lane."""
    timelines = record["timelines"]
    names = [name for name in _IN_TIMELINE if name in timelines] or list(timelines)[:1]
    figure = Figure(figsize=(10, 0.8 + 1.5 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        spans = timelines[name]["spans"]
        lanes = [lane for lane in LANES if any(span[0] == lane for span in spans)][::-1]
        for position, lane in enumerate(lanes):
            parts = [
                (start / 1e3, length / 1e3) for kind, _, start, length in spans if kind == lane
            ]
            axes.broken_barh(parts, (position - 0.4, 0.8), color=_COLOURS[lane])
        axes.set_yticks(range(len(lanes)), lanes, fontsize=8)
        axes.set_title(name, fontsize="small")
    panels[-1].set_xlabel("ms")
    return figure
