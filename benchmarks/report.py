"""Records as tables on the terminal and in Markdown, and as one HTML file that needs no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.records import Record, read

_MIB = 2**20
_WIDTH = 240  # where there is no terminal that says how wide it is
_PAGE = Path(__file__).with_name("page")


# -- values in words -----------------------------------------------------------------------------------------


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The unit that suits a value: the largest that is not above it."""
    return next((unit for unit in units if abs(value) >= unit[0]), units[-1])


_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_RATES = ((1e9, "GB/s"), (1e6, "MB/s"))


def _unit(field: str, value: float) -> tuple[float, str]:
    """What a field's values are divided by, and the unit they have then."""
    if field.endswith("bytes_per_s"):
        return _scaled(value, _RATES)
    if (field.endswith("_s") and not field.endswith("_per_s")) or "_s_per_" in field:
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
        factor, unit = _unit(field, value["median"])
        low, high = value["quartiles"]
        quartiles = f"{_number(low / factor, 3)} .. {_number(high / factor, 3)}"
        return f"{_number(value['median'] / factor)} ({quartiles}) {unit}".strip()
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {words(field, one)}" for name, one in value.items())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    factor, unit = _unit(field, value)
    return f"{value if factor == 1 and isinstance(value, int) else _number(value / factor)} {unit}".strip()


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
    "wall_s": ("wall time", "of one repetition, on the slowest rank: median and quartiles over rounds"),
    "bytes_per_s": ("bytes per second", "read and written"),
    "host_s": ("host time", "until the host had asked for one repetition"),
    "cpu_s": ("CPU time", "of a rank's threads"),
    "ratio_to_base": ("/ fsdp2", "median over rounds of the ratio to fsdp2 in the same round"),
    "ratio_to_hand_graphed": ("/ hand-graphed", "the same to a plain CUDA graph without an engine"),
    "tokens_per_s": ("tokens/s", "of all ranks together"),
    "mfu": ("MFU", "6 N + 12 L H Q T FLOPs for a token, of the peak named below"),
    "beyond_compute_s": (
        "beyond compute",
        "step time less that of compute alone in the same round: what the engine and its traffic expose",
    ),
    "collectives": (
        "sent: calls, MiB",
        "collectives of a step, and what a rank sends for them",
    ),
    "loopback_nbytes": ("on the wire", "received on the loopback interface, all ranks"),
    "host_s_per_unit": (
        "host/unit",
        "until a step's call returns; on a CPU, CPU time beyond that of compute alone",
    ),
    "launches": ("launches", "what the host gives the device to do in a step"),
    "dtensors": ("DTensors", "constructed from Python in a steady step"),
    "peak_rss_beyond_imports_nbytes": (
        "resident",
        "peak beyond imports and process group, heaviest rank",
    ),
    "peak_allocated_nbytes": ("allocated", "peak on the device"),
    "peak_reserved_nbytes": ("reserved", "peak on the device, with what the allocator keeps"),
    "pool_nbytes": ("graphs", "of it, by graphs"),
    "joules": ("joules", "of a step"),
}
# In summaries of training steps, and only there, fields without a heading are not shown.
_SILENT = ("minor_faults", "communication_s", "exposed_s", "loss_difference", "peak_rss_nbytes")


# -- tables --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A record's summary in words.

    Attributes:
        title: what sets a record apart from its neighbours.
        setting: where and with what it was measured.
        headings: of the columns after the first.
        rows: by name, a cell for each heading.
        notes: what a reader has to know before looking at the numbers.
    """

    title: str
    setting: str
    headings: list[str]
    rows: dict[str, list[str]]
    notes: list[str]


def table_of(record: Record) -> Table:
    """The summary of a record as a table."""
    found = {", ".join(path): row for path, row in rows_of(record["summary"])}
    on_cpu = record["config"].get("device", "cpu") == "cpu"
    silent = {*_SILENT} if record["benchmark"] == "training_step" else set()
    if not on_cpu:
        silent |= {"loopback_nbytes", "cpu_s"}
    used = dict.fromkeys(field for row in found.values() for field in row if row[field] is not None)
    # The fields that are known in their order, and then the others in theirs.
    fields = [field for field in (*COLUMNS, *(one for one in used if one not in COLUMNS)) if field in used]
    fields = [field for field in fields if field not in silent]
    rows = {
        name: ["" if row.get(field) is None else words(field, row[field]) for field in fields]
        for name, row in found.items()
    }
    return Table(title(record), setting(record), [_heading(one) for one in fields], rows, notes(record))


def rows_of(summary: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
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


def _heading(field: str) -> str:
    if field in COLUMNS:
        return COLUMNS[field][0]
    what, ratio, base = field.rpartition("ratio_to_")
    if ratio:
        return f"{what.replace('_', ' ')}/ {base}".strip()
    return field.removesuffix("_nbytes").removesuffix("_s").replace("_", " ")


def title(record: Record) -> str:
    """What sets a record apart from its neighbours."""
    config = record["config"]
    if record["benchmark"] != "training_step":
        options = {name: value for name, value in config.items() if name != "smoke" and value is not None}
        return (
            f"{record['benchmark']}: {', '.join(f'{name} {_option(one)}' for name, one in options.items())}"
        )
    model = config["hf"] or config["preset"]
    ranks = f"{config['ranks']} rank{'s' * (config['ranks'] > 1)}"
    if config["mesh"]:
        ranks = f"mesh {config['mesh']}"
    accumulate = f", {config['accumulate']} micro-batches" if config["accumulate"] > 1 else ""
    clip = f", clipped at {config['clip']:g}" if config["clip"] else ""
    return (
        f"{model}, {config['precision']}, {ranks}, {config['batch_size']} x {config['seq_len']} tokens each"
        f"{accumulate}{clip}"
    )


def _option(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def setting(record: Record) -> str:
    """Where and with what a record was measured."""
    environment = record["environment"]
    device = environment.get("device_name") or environment["cpu"]
    commit = (environment["git"] or "no commit")[:10]
    changed = "" if environment["git_is_clean"] in (True, None) else " with changes"
    ops = f", {environment['ops_backend']} ops" if environment.get("ops_backend") else ""
    return (
        f"{device}, {environment['cores']} cores, load {environment['load_average_1min']:.1f} at the start; "
        f"torch {environment['torch']}{ops}; {commit}{changed}; {environment['time']}"
    )


def notes(record: Record) -> list[str]:
    """What a reader has to know before looking at the numbers."""
    found = []
    if record["config"].get("smoke"):
        found.append("A smoke run: the numbers mean nothing.")
    if record["config"].get("share_device"):
        found.append("The ranks shared one device: this shows that it works, not how fast.")
    noise = record.get("noise", {"is_quiet": True})
    if not noise["is_quiet"]:
        loud = max(noise["by_name"], key=lambda name: noise["by_name"][name])
        found.append(
            f"The machine was too noisy: a quartile of {loud} is {noise['by_name'][loud]:.0%} from its "
            f"median, {noise['allowed']:.0%} are allowed. Let nothing else run, and measure again."
        )
    for name in record.get("disagreed", ()):
        found.append(f"{name} was not compared: it does not compute the same.")
    for name, reason in record.get("unobserved", {}).items():
        found.append(f"{name} has times only: {reason}")
    return found


def show(record: Record) -> None:
    """Prints a record: its rows, the reasons of those that have none, and its notes."""
    from rich import table as rich_table
    from rich.console import Console
    from rich.markup import escape

    console, table = Console(highlight=False), table_of(record)
    if not console.is_terminal:
        console.width = _WIDTH
    if table.rows:
        drawn = rich_table.Table(title=escape(table.title), caption=escape(table.setting))
        drawn.add_column("", no_wrap=True)
        for number, heading in enumerate(table.headings):
            drawn.add_column(escape(heading), justify="right", no_wrap=number == 0)
        for name, cells in table.rows.items():
            drawn.add_row(escape(name), *map(escape, cells))
        console.print(drawn)
    else:
        console.print(table.title, markup=False)
    for name, reason in record.get("left_out", {}).items():
        console.print(f"  {name}: {reason}", markup=False, soft_wrap=True)
    for note in table.notes:
        console.print(note, style="yellow", markup=False)


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


# -- the page ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strip:
    """One line of a chart; positions are percent of its width.

    Attributes:
        name: of the row.
        value: the median, in words.
        median: its position.
        quartiles: their positions.
        dots: positions of single rounds.
    """

    name: str
    value: str
    median: float
    quartiles: tuple[float, float]
    dots: tuple[float, ...] = ()


@dataclass(frozen=True)
class Chart:
    """Strips on one scale that begins at zero.

    Attributes:
        heading: what is shown.
        strips: a line for each row.
        mark: position of a line across all of them; None for none.
    """

    heading: str
    strips: tuple[Strip, ...]
    mark: float | None = None


def write(records: Sequence[Record], path: Path) -> Path:
    """Writes the page of some records; folders are made if they are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(records), encoding="utf-8")
    return path


def render(records: Sequence[Record]) -> str:
    """The page as HTML. Whatever records hold is shown as text and never becomes markup or script."""
    from jinja2 import Environment, StrictUndefined

    from benchmarks.engines.catalogue import ENGINES
    from benchmarks.engines.trace import LANES

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    template = environment.from_string((_PAGE / "report.html").read_text(encoding="utf-8"))
    steps = [record for record in records if record["benchmark"] == "training_step"]
    named = dict.fromkeys(name for record in steps for name in (*record["summary"], *record["left_out"]))
    return template.render(
        style=(_PAGE / "report.css").read_text(encoding="utf-8"),
        script=(_PAGE / "report.js").read_text(encoding="utf-8"),
        sections=[_section(record) for record in records],
        lanes=LANES,
        engines={name: ENGINES[name].words for name in named if name in ENGINES},
        columns=list(COLUMNS.values()),
    )


def _section(record: Record) -> dict[str, Any]:
    return {
        "table": table_of(record),
        "left_out": record.get("left_out", {}),
        "charts": [chart for chart in _charts(record) if chart.strips],
        "peak": record["config"].get("mfu_peak"),
        "timelines": record.get("timelines"),
        "facts": json.dumps({"environment": record["environment"], "config": record["config"]}, indent=2),
    }


def _charts(record: Record) -> Iterator[Chart]:
    """Times with every round, ratios with a mark at one, and, of training steps, memory."""
    rows = dict(rows_of(record["summary"]))
    fields = dict.fromkeys(field for row in rows.values() for field, one in row.items() if is_spread(one))
    for field in fields:
        if field in ("wall_s", "host_s", "cpu_s"):
            values = {
                path: (row[field], _at(record["samples"], path, field))
                for path, row in rows.items()
                if field in row
            }
            yield _chart(f"{COLUMNS[field][0].capitalize()}: median, quartiles, every round", field, values)
        elif field.startswith("ratio_to_") and field != "ratio_to_hand_graphed":
            ratios = {path: (row[field], ()) for path, row in rows.items() if field in row}
            yield _chart(f"Time {_heading(field)} in the same round", field, ratios, mark=1.0)
    memory, heading = "peak_rss_beyond_imports_nbytes", "Peak resident memory beyond imports"
    if any("peak_reserved_nbytes" in row for row in rows.values()):
        memory, heading = "peak_reserved_nbytes", "Peak memory reserved on the device"
    yield _chart(heading, memory, {path: (row[memory], ()) for path, row in rows.items() if memory in row})


def _at(samples: Any, path: Sequence[str], field: str) -> Sequence[float]:
    """A row's values of each round; nothing where older records have them elsewhere."""
    for name in (*path, field):
        samples = samples.get(name, ()) if isinstance(samples, Mapping) else ()
    return samples if isinstance(samples, list) else ()


def _chart(heading: str, field: str, values: Mapping[Any, Any], mark: float | None = None) -> Chart:
    spreads = {
        path: value if is_spread(value) else {"median": value, "quartiles": [value, value]}
        for path, (value, _) in values.items()
    }
    # A round that was interrupted shall not squeeze all others together: it ends at the edge.
    top = 1.15 * max([mark or 0.0, *(of["quartiles"][1] for of in spreads.values())], default=1.0) or 1.0

    def position(value: float) -> float:
        return round(max(0.0, min(100.0, 100 * value / top)), 2)

    strips = tuple(
        Strip(
            ", ".join(path),
            words(field, of["median"]),
            position(of["median"]),
            (position(of["quartiles"][0]), position(of["quartiles"][1])),
            tuple(map(position, values[path][1])),
        )
        for path, of in spreads.items()
    )
    return Chart(heading, strips, None if mark is None else position(mark))


@click.command()
@click.option(
    "--record",
    "paths",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    required=True,
    help="File of records; repeatable.",
)
@click.pass_obj
def main(run: Any, paths: Sequence[Path]) -> None:
    """Measure nothing: print records, and write the page and the pictures of them."""
    for path in paths:
        try:
            found = list(read(path))
        except ValueError as error:
            raise click.UsageError(f"{error}.") from error
        for record in found:
            show(record)
        run.records += found
