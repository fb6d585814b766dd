"""Records as tables of words, the same on the terminal, in Markdown and on the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.noise import verdict
from benchmarks.records import Record

_MIB = 2**20

# -- values


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The unit that suits a value: the largest that is not above it."""
    return next((unit for unit in units if abs(value) >= unit[0]), units[-1])


_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_RATES = ((1e9, "GB/s"), (1e6, "MB/s"))


def unit_of(field: str, value: float) -> tuple[float, str]:
    """What a field's values of this size are divided by, and the unit they have then."""
    if field.endswith("bytes_per_s"):
        return _scaled(value, _RATES)
    if (field.endswith("_s") and not field.endswith("per_s")) or "_s_per_" in field:
        return _scaled(value, _SECONDS)
    if field.endswith("nbytes"):
        return _scaled(value, _BYTES)
    return 1.0, ""


def words(field: str, value: Any) -> str:
    """A value of a summary; the end of the field's name tells its unit.

    Args:
        field: name in the summary, such as `wall_s`.
        value: a number, a spread, text, or a dictionary of such.
    """
    if field in _FORMATS:
        return _FORMATS[field](value)
    if is_spread(value):
        factor, unit = unit_of(field, value["median"])
        low, high = value["quartiles"]
        quartiles = f"{_number(low / factor, 3)} .. {_number(high / factor, 3)}"
        return f"{_number(value['median'] / factor)} ({quartiles}) {unit}".strip()
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {words(field, one)}" for name, one in value.items())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    factor, unit = unit_of(field, value)
    number = value if factor == 1 and isinstance(value, int) else _number(value / factor)
    return f"{number} {unit}".strip()


def _number(value: float, digits: int = 4) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.{digits}g}"


def _collectives(by_kind: Mapping[str, Any]) -> str:
    count = sum(of["count"] for of in by_kind.values())
    return f"{count}, {sum(of['nbytes'] for of in by_kind.values()) / _MIB:.2f}"


_FORMATS: Mapping[str, Callable[[Any], str]] = {
    "mfu": lambda value: f"{value:.1%}",
    "tokens_per_s": lambda value: f"{value:,.0f}",
    "collectives": _collectives,
}

# Headings, and what they mean, of the fields that need either.
COLUMNS: Mapping[str, tuple[str, str]] = {
    "wall_s": (
        "wall time",
        "of one repetition, on the slowest rank: median and quartiles over rounds",
    ),
    "bytes_per_s": ("bytes per second", "read and written"),
    "host_s": ("host time", "until the host had asked for one repetition"),
    "cpu_s": ("CPU time", "of a rank's threads"),
    "ratio_to_base": ("/ fsdp2", "median over rounds of the ratio to fsdp2 in the same round"),
    "ratio_to_hand_graphed": ("/ hand-graphed", "the same to a plain CUDA graph without an engine"),
    "tokens_per_s": ("tokens/s", "of all ranks together"),
    "mfu": ("MFU", "6 N + 12 L H Q T FLOPs for a token, of the peak named below"),
    "beyond_compute_s": (
        "beyond compute",
        "step time less that of compute alone in the same round: what the engine and its traffic "
        "expose",
    ),
    "collectives": ("sent: calls, MiB", "collectives of a step, and what a rank sends for them"),
    "loopback_nbytes": ("on the wire", "received on the loopback interface, all ranks"),
    "host_s_per_unit": (
        "host/unit",
        "until a step's call returns; on a CPU, CPU time beyond that of compute alone",
    ),
    "launches": ("launches", "what the host gives the device to do in a step"),
    "peak_rss_beyond_imports_nbytes": (
        "resident",
        "peak beyond imports and process group, heaviest rank",
    ),
    "peak_allocated_nbytes": ("allocated", "peak on the device"),
    "peak_reserved_nbytes": ("reserved", "peak on the device, with what the allocator keeps"),
    "pool_nbytes": ("graphs", "of it, by graphs"),
}
# What a record has and its table does not, by benchmark.
_SILENT: Mapping[str, tuple[str, ...]] = {
    "training_step": ("loss_difference",),
    "counts": (
        "events",
        "allocations",
        "graphs",
        "edges",
        "peak_requested_nbytes",
        "peak_reserved_nbytes",
        "requested_ratio_to_fsdp2",
        "beyond_fsdp2_and_gradients_nbytes",
        "requested_beyond_fsdp2_and_gradients_nbytes",
    ),
}


# -- tables


@dataclass(frozen=True)
class Table:
    """A record's summary in words.

    Attributes:
        title: what sets a record apart from its neighbors.
        setting: where and with what it was measured.
        headings: of the columns after the first.
        rows: by name, a cell for each heading.
        is_quiet: whether the machine was.
        verdict: a sentence that says so, or why the numbers mean less.
        notes: what else a reader has to know before looking at the numbers.
    """

    title: str
    setting: str
    headings: list[str]
    rows: dict[str, list[str]]
    is_quiet: bool
    verdict: str
    notes: list[str]


def table_of(record: Record) -> Table:
    """The summary of a record as a table."""
    found = {", ".join(path): row for path, row in rows_of(record["summary"])}
    on_cpu = record["config"].get("device", "cpu") == "cpu"
    silent = {*_SILENT.get(record["benchmark"], ())}
    if not on_cpu:
        silent |= {"loopback_nbytes", "cpu_s"}
    if record["config"].get("hosts", 1) > 1:
        silent.add("loopback_nbytes")  # of one machine, and of what stays on it
    used = dict.fromkeys(field for row in found.values() for field in row if row[field] is not None)
    # The fields that are known in their order, and then the others in theirs.
    fields = [
        field for field in (*COLUMNS, *(one for one in used if one not in COLUMNS)) if field in used
    ]
    fields = [field for field in fields if field not in silent]
    rows = {
        name: ["" if row.get(field) is None else words(field, row[field]) for field in fields]
        for name, row in found.items()
    }
    headings = [heading(one) for one in fields]
    is_quiet, sentence = verdict(record)
    if record["config"].get("smoke"):
        is_quiet, sentence = False, "A smoke run: the numbers mean nothing."
    return Table(title(record), setting(record), headings, rows, is_quiet, sentence, notes(record))


def rows_of(
    summary: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The innermost dictionaries of a summary, each with the names that lead to it."""
    if not summary or any(is_spread(of) or not isinstance(of, Mapping) for of in summary.values()):
        if summary:
            yield path, summary
        return
    for name, of in summary.items():
        yield from rows_of(of, (*path, str(name)))


def is_spread(value: Any) -> bool:
    """Whether a value is a median with quartiles."""
    return isinstance(value, Mapping) and "median" in value


def heading(field: str) -> str:
    """What a field's column is called."""
    if field in COLUMNS:
        return COLUMNS[field][0]
    what, ratio, base = field.rpartition("ratio_to_")
    if ratio:
        return f"{what.replace('_', ' ')}/ {base}".strip()
    return re.sub("_nbytes$|(?<!per)_s$", "", field).replace("_", " ")


def title(record: Record) -> str:
    """What sets a record apart from its neighbors."""
    config = record["config"]
    if record["benchmark"] != "training_step":
        options = {
            name: value for name, value in config.items() if name != "smoke" and value is not None
        }
        return (
            f"{record['benchmark']}: "
            f"{', '.join(f'{name} {_option(one)}' for name, one in options.items())}"
        )
    several = config["ranks"] > 1
    ranks = f"mesh {config['mesh']}" if config["mesh"] else f"{config['ranks']} rank{'s' * several}"
    accumulate = f", {config['accumulate']} micro-batches" if config["accumulate"] > 1 else ""
    clip = f", clipped at {config['clip']:g}" if config["clip"] else ""
    return (
        f"{config['preset']}, {config['precision']}, {ranks}, "
        f"{config['batch_size']} x {config['seq_len']} tokens{' each' * several}{accumulate}{clip}"
    )


def _option(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def setting(record: Record) -> str:
    """Where and with what a record was measured."""
    environment = record["environment"]
    device = environment.get("device_name") or environment["cpu"]
    commit = (environment["git"] or "no commit")[:10]
    changed = " with changes" if environment["git_is_clean"] is False else ""
    hosts = record["config"].get("hosts", 1)
    device = device if hosts == 1 else f"{hosts} machines of {device}"
    return (
        f"{device}, {environment['cores']} cores, load {environment['load_average_1min']:.1f} at "
        f"the start; torch {environment['torch']}, {environment['ops_backend']} ops; "
        f"{commit}{changed}; {environment['time']}"
    )


def headline(record: Record) -> str:
    """One sentence that compares the engine with its peer; empty where a record does not."""
    if record["benchmark"] != "training_step" or record["config"].get("smoke"):
        return ""
    found = []
    for name in ("shardgrad", "shardgrad-graphed"):
        ratio = record["summary"].get(name, {}).get("ratio_to_base")
        if ratio:
            low, high = ratio["quartiles"]
            found.append(f"{name} takes {ratio['median']:.2f} (quartiles {low:.2f} to {high:.2f})")
    return f"Of FSDP2's step {', '.join(found)}." if found else ""


def notes(record: Record) -> list[str]:
    """What a reader has to know before looking at the numbers, beside the verdict on noise."""
    found = []
    if record["config"].get("share_device"):
        found.append("The ranks shared one device: this shows that it works, not how fast.")
    for name in record.get("disagreed", ()):
        found.append(f"{name} was not compared: it does not compute the same.")
    for name, reason in record.get("unobserved", {}).items():
        found.append(f"{name} has times only: {reason}")
    return found


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
