"""The picture of a plan: memory over one step by owner, and the timeline under it."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

from shardgrad.extras import require
from shardgrad.plan.cost import CostModel
from shardgrad.plan.memory import MemoryCurve, memory_of
from shardgrad.plan.planning import Plan
from shardgrad.plan.recording import Kernel, Transfer
from shardgrad.plan.rehearsal import Rehearsal, rehearse
from shardgrad.plan.timeline import Timeline, play
from shardgrad.train.failure import UsageError

__all__ = ["draw"]

_COLOURS = {
    "parameters": "#4d6480",
    "gradients": "#7a9cc6",
    "optimizer state": "#a8c0dd",
    "unsharded parameters": "#5aa469",
    "post-forward shards": "#8cc79a",
    "all-gather staging": "#bfe3c4",
    "reduction staging": "#e2cdf2",
    "unreduced gradients": "#c39bd3",
    "activations": "#f5b041",
    "unsharded gradients and temporaries": "#ec7063",
    "temporaries": "#f1a9a0",
    "tails": "#d7dbdd",
    "inner shards": "#6c8ebf",
    "buffers": "#aab7b8",
    "other": "#e5e7e9",
}
_PHASES = {"forward": "#ffe0a3", "backward": "#f3a683", "optimizer": "#a8c0dd"}
_KINDS = {
    "all-gather": "#5aa469",
    "reduce-scatter": "#af7ac5",
    "all-reduce": "#884ea0",
    "exchange": "#5aa469",
}
_MARGIN_S = 1e-9


def draw(plan: Plan, path: Path) -> None:
    """Rehearses the plan's step with all blocks, and draws memory and timeline in the format of the
    suffix.

    Raises:
        PartnerUnavailableError: matplotlib is not installed.
        UsageError: the file cannot be written, or matplotlib does not know the suffix.
    """
    require("matplotlib", feature="--picture")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    memory, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    rehearsal = rehearse(plan.request)
    cost = CostModel(plan.machine, plan.request.shards, plan.compute_scale)
    timeline = play(rehearsal.events, cost)
    _draw_memory(plan, memory_of(rehearsal), timeline, memory)
    _draw_lanes(rehearsal, timeline, lanes)
    request = plan.request
    figure.suptitle(
        f"{plan.name} on {request.ranks} x {plan.machine.device.name}: "
        f"{timeline.step_s * 1e3:,.1f} ms, {plan.peak_nbytes / 2**30:,.2f} GiB (predicted)"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--picture {path} cannot be written ({error}): try a name that ends in .png."
        ) from error


def _draw_memory(plan: Plan, curve: MemoryCurve, timeline: Timeline, axes: Any) -> None:
    """Draws the memory of each owner over time; it changes when the device starts the following
    operation.
    """
    moments = curve.moments
    spans = sorted(timeline.spans, key=lambda span: span.event)
    events, begins = [span.event for span in spans], [span.begin_s * 1e3 for span in spans]
    end = timeline.step_s * 1e3
    times: list[float] = []
    for moment in moments:
        place = bisect_right(events, moment.event - 1)
        at = begins[place] if place < len(begins) else end
        times.append(max(at, times[-1] if times else 0.0))
    owners = [owner for owner in _COLOURS if any(moment.nbytes.get(owner) for moment in moments)]
    layers = [[moment.nbytes.get(owner, 0) / 2**30 for moment in moments] for owner in owners]
    axes.stackplot(
        [*times, end],
        [[*layer, layer[-1]] for layer in layers],
        labels=owners,
        colors=[_COLOURS[owner] for owner in owners],
        step="post",
    )
    room = (plan.machine.device.memory_nbytes - plan.machine.device.taken_nbytes) / 2**30
    if room < 2 * plan.peak_nbytes / 2**30:
        axes.axhline(room, color="#d1242f", linestyle="--", linewidth=1)
    axes.set(ylabel="GiB of a rank", xlim=(0, end), ylim=(0, None))
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", reverse=True, frameon=False
    )


def _draw_lanes(rehearsal: Rehearsal, timeline: Timeline, axes: Any) -> None:
    """Draws one lane for compute and one for each link; adjacent operations of one kind are one
    bar.
    """
    events = rehearsal.events
    bars: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for span in timeline.spans:
        event = events[span.event]
        if isinstance(event, Kernel) and span.end_s > span.begin_s:
            key = span.lane, "engine" if event.is_engine else event.phase, ""
        elif isinstance(event, Transfer):
            key = f"{event.kind}\n({span.lane})", event.kind, event.axis
        else:
            continue
        merged = bars.setdefault(key, [])
        if merged and span.begin_s - (merged[-1][0] + merged[-1][1]) < _MARGIN_S:
            begin = merged[-1][0]
            merged[-1] = begin, span.end_s - begin
        else:
            merged.append((span.begin_s, span.end_s - span.begin_s))
    lanes = sorted({lane for lane, _, _ in bars}, key=lambda lane: (lane != "compute", lane))
    for (lane, kind, _), pieces in bars.items():
        colour = _PHASES.get(kind) or _KINDS.get(kind, "#85929e")
        scaled = [(begin * 1e3, length * 1e3) for begin, length in pieces]
        axes.broken_barh(scaled, (lanes.index(lane) - 0.4, 0.8), facecolor=colour)
    for kind, colour in _PHASES.items():
        axes.barh(0, 0, color=colour, label=kind)
    axes.barh(0, 0, color="#85929e", label="the engine's copies")
    axes.set(yticks=range(len(lanes)), yticklabels=lanes, xlabel="ms since the step began")
    axes.invert_yaxis()
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)
