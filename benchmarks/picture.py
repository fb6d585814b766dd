"""The picture of a comparison: each round's time as a multiple of FSDP2's, and the median."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_COLOURS = {"shardgrad": "tab:blue", "compute": "tab:green", "collectives": "tab:orange"}


def draw(records: Sequence[dict[str, Any]], path: Path) -> Path | None:
    """Draws one panel per record of `compare`; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(1 + 4 * len(records), 4), layout="constrained")
    panels = figure.subplots(1, len(records), sharey=True, squeeze=False)[0]
    for axes, record in zip(panels, records, strict=True):
        axes.set(title=title(record["config"]), xlabel="round")
        axes.axhline(1.0, color="grey", linestyle="--", linewidth=1)
        for name, colour in _COLOURS.items():
            ratio = record["summary"][name]["wall_ratio_to_fsdp2"]
            rounds = record["samples"][name]["wall_ratio_to_fsdp2"]
            axes.plot(rounds, ".", color=colour, markersize=4, alpha=0.6)
            axes.axhline(ratio["median"], color=colour, label=f"{name} {ratio['median']:.2f}")
        axes.legend(fontsize="small")
    panels[0].set(ylabel="wall time of a step / FSDP2's", ylim=(0, None))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def title(config: dict[str, Any]) -> str:
    """What sets a record apart from its neighbours, in a few words."""
    reshard = {None: "default", True: "always", False: "never"}[config["reshard"]]
    return (
        f"{config['preset']}, {config['precision']}, {config['ranks']} ranks, "
        f"{config['batch_size']} x {config['seq_len']} tokens\n"
        f"accumulate {config['accumulate']}, reshard {reshard}"
    )
