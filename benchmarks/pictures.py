"""Pictures of records for documents: PNGs, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.engines.trace import LANES
from benchmarks.records import Record
from benchmarks.report import title, words

_COLOURS = dict(zip(LANES, ("#4c78a8", "#f28e2b", "#b23a8e", "#c44e52", "#3a8a4d", "#8b8f95"), strict=True))
_IN_TIMELINE = ("fsdp2", "shardgrad", "shardgrad-graphed")


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    """Draws times of all records of training steps, and a timeline of each; nothing without matplotlib."""
    steps = [record for record in records if record["benchmark"] == "training_step" and record["summary"]]
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return []
    if not steps:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    paths = [_draw_steps(steps, folder / "steps.png")]
    for number, record in enumerate(steps, start=1):
        if record["timelines"]:
            paths.append(_draw_timeline(record, folder / f"timeline-{number}.png"))
    return paths


def _draw_steps(records: Sequence[Record], path: Path) -> Path:
    """A panel for each record, a bar for each engine, quartiles as whiskers."""
    from matplotlib.figure import Figure

    most = max(len(record["summary"]) for record in records)
    figure = Figure(figsize=(9, len(records) * (1.2 + 0.32 * most)), layout="constrained")
    panels = figure.subplots(len(records), 1, squeeze=False)[:, 0]
    for axes, record in zip(panels, records, strict=True):
        names = list(record["summary"])[::-1]
        rows = [record["summary"][name] for name in names]
        medians = [1e3 * row["wall_s"]["median"] for row in rows]
        below = [m - 1e3 * row["wall_s"]["quartiles"][0] for m, row in zip(medians, rows, strict=True)]
        above = [1e3 * row["wall_s"]["quartiles"][1] - m for m, row in zip(medians, rows, strict=True)]
        bars = axes.barh(names, medians, xerr=(below, above), color=_COLOURS["compute"], capsize=2)
        ratios = [
            f" ({row['ratio_to_base']['median']:.2f} x fsdp2)" if "ratio_to_base" in row else ""
            for row in rows
        ]
        labels = [words("wall_s", row["wall_s"]["median"]) + of for row, of in zip(rows, ratios, strict=True)]
        axes.bar_label(bars, labels=labels, padding=6, fontsize=8)
        axes.set_title(title(record), fontsize="medium")
        axes.set(xlabel="step time, ms: median and quartiles", xlim=(0, 1.25 * max(medians)))
    figure.savefig(path, dpi=120)
    return path


def _draw_timeline(record: Record, path: Path) -> Path:
    from matplotlib.figure import Figure

    timelines = record["timelines"]
    names = [name for name in _IN_TIMELINE if name in timelines] or list(timelines)[:1]
    figure = Figure(figsize=(10, 0.8 + 1.5 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        spans = timelines[name]["spans"]
        lanes = [lane for lane in LANES if any(span[0] == lane for span in spans)][::-1]
        for position, lane in enumerate(lanes):
            parts = [(start / 1e3, length / 1e3) for kind, _, start, length in spans if kind == lane]
            axes.broken_barh(parts, (position - 0.4, 0.8), color=_COLOURS[lane])
        axes.set_yticks(range(len(lanes)), lanes, fontsize=8)
        axes.set_title(f"{name}: {title(record)}", fontsize="small")
    panels[-1].set_xlabel("ms")
    figure.savefig(path, dpi=120)
    return path
