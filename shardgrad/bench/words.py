"""How records are worded, on the terminal and in the report alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["COLUMNS", "cells", "setting", "title", "verdicts"]

Record = Mapping[str, Any]

_MIB = 2**20


def title(record: Record) -> str:
    """What sets a record apart from its neighbours."""
    config = record["config"]
    model = config["hf"] or config["preset"]
    ranks = (
        f"mesh {config['mesh']}" if config["mesh"] else f"{config['ranks']} rank{'s' * (config['ranks'] > 1)}"
    )
    accumulate = f", {config['accumulate']} micro-batches" if config["accumulate"] > 1 else ""
    clip = f", clipped at {config['clip']:g}" if config["clip"] else ""
    return (
        f"{model}, {config['precision']}, {ranks}, {config['batch_size']} x {config['seq_len']} tokens each"
        f"{accumulate}{clip}"
    )


def setting(record: Record) -> str:
    """Where and with what it was measured."""
    environment = record["environment"]
    device = environment.get("device_name") or environment["cpu"]
    commit = (environment["git"] or "no commit")[:10]
    changed = "" if environment["git_is_clean"] in (True, None) else " with changes"
    ops = f", {environment['ops_backend']} ops" if "ops_backend" in environment else ""
    return (
        f"{device}, {environment['cores']} cores, load {environment['load_average_1min']:.1f} at the start; "
        f"torch {environment['torch']}{ops}; {commit}{changed}; {environment['time']}"
    )


def verdicts(record: Record) -> list[str]:
    """What a reader has to know before looking at the numbers."""
    found = []
    config = record["config"]
    if config["smoke"]:
        found.append("A smoke run: the numbers mean nothing.")
    if config["share_device"]:
        found.append("The ranks shared one device: this shows that it works, not how fast.")
    noise = record["noise"]
    if not noise["is_quiet"]:
        loud = max(noise["by_name"], key=lambda name: noise["by_name"][name])
        found.append(
            f"The machine was too noisy: a quartile of {loud} is {noise['by_name'][loud]:.0%} from its "
            f"median, {noise['allowed']:.0%} are allowed. Let nothing else run, and measure again."
        )
    for name in record["disagreed"]:
        found.append(f"{name} was not compared: it does not compute the same.")
    for name, reason in record["unobserved"].items():
        found.append(f"{name} has times only: {reason}")
    return found


def _milliseconds(spread: Mapping[str, Any]) -> str:
    low, high = spread["quartiles"]
    return f"{spread['median'] * 1e3:.2f} ({low * 1e3:.2f} .. {high * 1e3:.2f})"


def _ratio(spread: Mapping[str, Any]) -> str:
    return f"{spread['median']:.3f}"


def _collectives(by_kind: Mapping[str, Any]) -> str:
    count = sum(of["count"] for of in by_kind.values())
    return f"{count}, {sum(of['nbytes'] for of in by_kind.values()) / _MIB:.2f}"


def _mib(nbytes: float) -> str:
    return f"{nbytes / _MIB:.1f}"


# Heading, field of the summary, how to say it, and what it means.
COLUMNS: tuple[tuple[str, str, Callable[[Any], str], str], ...] = (
    ("step ms (quartiles)", "wall_s", _milliseconds, "wall time of a step on the slowest rank"),
    ("/ fsdp2", "ratio_to_base", _ratio, "median over rounds of the ratio to fsdp2 in the same round"),
    ("/ hand-graphed", "ratio_to_hand_graphed", _ratio, "the same to a plain CUDA graph without an engine"),
    ("tokens/s", "tokens_per_s", lambda value: f"{value:,.0f}", "of all ranks together"),
    (
        "MFU %",
        "mfu",
        lambda value: f"{value:.1%}"[:-1],
        "6 N + 12 L H Q T per token, of the peak named below",
    ),
    (
        "beyond compute ms",
        "beyond_compute_s",
        lambda value: f"{value['median'] * 1e3:.2f}",
        "step time less that of compute alone in the same round: what the engine and its traffic expose",
    ),
    (
        "sent: calls, MiB",
        "collectives",
        _collectives,
        "collectives of a step, and what a rank sends for them",
    ),
    ("wire MiB", "loopback_nbytes", _mib, "received on the loopback interface, all ranks"),
    ("CPU ms", "cpu_s", lambda value: f"{value * 1e3:.2f}", "of a rank's threads"),
    (
        "host µs/unit",
        "host_s_per_unit",
        lambda value: f"{value * 1e6:.0f}",
        "until a step's call returns; on a CPU, CPU time beyond that of compute alone",
    ),
    ("launches", "launches", str, "what the host gives the device to do in a step"),
    ("DTensors", "dtensors", str, "constructed from Python in a steady step"),
    (
        "RSS MiB",
        "peak_rss_beyond_imports_nbytes",
        _mib,
        "peak beyond imports and process group, heaviest rank",
    ),
    ("allocated MiB", "peak_allocated_nbytes", _mib, "peak on the device"),
    ("reserved MiB", "peak_reserved_nbytes", _mib, "peak on the device, with what the allocator keeps"),
    ("graphs MiB", "pool_nbytes", _mib, "of it, by graphs"),
    ("joules", "joules", lambda value: f"{value:.2f}", "of a step"),
)


def cells(record: Record) -> tuple[list[str], dict[str, list[str]]]:
    """The headings that some contestant has something under, and each contestant's cells."""
    summary = record["summary"]
    on_cpu = record["config"]["device"] == "cpu"
    shown = [
        (heading, field, say)
        for heading, field, say, _ in COLUMNS
        if any(of.get(field) is not None for of in summary.values())
        and (on_cpu or field not in ("loopback_nbytes", "cpu_s"))
    ]
    rows = {
        name: [say(of[field]) if of.get(field) is not None else "" for _, field, say in shown]
        for name, of in summary.items()
    }
    return [heading for heading, _, _ in shown], rows
