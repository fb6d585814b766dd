"""Tables of measured figures, made from the records in `results/figures/` and of one GPU, so that
they say nothing else.

    make figures                           measure the former again, at one commit, and write them
    bash benchmarks/gpu.sh                 measure the latter, on a machine with GPUs
    python -m benchmarks readme            write them into README.md and benchmarks/README.md
    python -m benchmarks readme --check    exit with status 1 if they are out of date

Only records that count as results are in them: a clean tree, compiled ops, a quiet machine, no
smoke run, ranks with devices of their own.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.noise import verdict
from benchmarks.records import RESULTS, ROOT, Record, is_result, read
from benchmarks.tables import markdown, table_of, title

# Of the GPUs on record, the one that was measured at the commit of the other figures.
FIGURES = RESULTS / "figures", *sorted(RESULTS.glob("gpu_h200_202611/*/"))
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
_FRONT = ("", "shardgrad / FSDP2", "graphed / FSDP2", "floor / FSDP2")
_ENGINES = ("shardgrad", "shardgrad-graphed")
_FLOORS = ("collectives", "hand-graphed")  # whose memory says nothing: they are not sharded


@click.command()
@click.option(
    "--check",
    is_flag=True,
    help="Change nothing; exit with status 1 if the tables are out of date.",
)
def main(check: bool) -> None:
    """Measure nothing: write the tables of both README.md from the records."""
    counting = []
    for record in records_in(*FIGURES):
        if is_result(record):
            counting.append(record)
        else:
            click.echo(f"left out: {title(record)}: {verdict(record)[1]}", err=True)
    for page, fresh in pages(counting).items():
        try:
            text = replaced(page.read_text(encoding="utf-8"), fresh)
        except ValueError as error:
            raise click.ClickException(f"{page}: {error}") from error
        if not check:
            page.write_text(text, encoding="utf-8")
        elif text != page.read_text(encoding="utf-8"):
            raise click.ClickException(f"{page} is out of date; run: python -m benchmarks readme")


def pages(records: Sequence[Record]) -> dict[Path, str]:
    """What belongs between the marks of each page."""
    return {
        ROOT / "README.md": "\n".join(front(records)),
        ROOT / "benchmarks" / "README.md": "\n".join(tables(records)),
    }


def records_in(*folders: Path) -> list[Record]:
    """All records of folders, in the order of their files' names."""
    paths = [path for folder in folders for path in sorted(folder.glob("*.jsonl"))]
    return [record for path in paths for record in read(path)]


def front(records: Sequence[Record]) -> Iterator[str]:
    """What is compared with FSDP2, in one table, and where it was measured."""
    steps = _completed([each for each in records if each["benchmark"] == "training_step"])
    counts = [record for record in records if record["benchmark"] == "counts"]
    yield from markdown(_FRONT, [*_step_rows(steps), *_count_rows(counts)])
    yield from ("", _where(steps + counts))


def tables(records: Sequence[Record]) -> Iterator[str]:
    """A table of each record that README.md has more than one line of."""
    others = [record for record in records if record["benchmark"] != "training_step"]
    yield _where(others)
    for record in sorted(others, key=lambda record: str(record["benchmark"])):
        table = table_of(record)
        name, _, configuration = table.title.partition(": ")
        yield from ("", f"### {name}", "", _wrapped(f"{configuration}; {table.setting}"), "")
        yield from markdown(
            ("", *table.headings), [[row, *cells] for row, cells in table.rows.items()]
        )


def replaced(text: str, table: str) -> str:
    """The text with everything between the marks replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"it lacks the marks {BEGIN} and {END}: put them where the tables belong")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def _where(records: Sequence[Record]) -> str:
    """In a sentence, at which commits and on which machines they were measured."""
    machines: dict[str, dict[str, None]] = {}  # of each commit, in their order
    for record in records:
        environment = record["environment"]
        cores = f"{environment['cores']} cores of {environment['cpu']}"
        known = machines.setdefault(environment["git"][:10], {})
        known[f"on {environment.get('device_name') or cores}"] = None
    places = [f"{commit} {' and '.join(known)}" for commit, known in machines.items()]
    return _wrapped(f"Measured at commit {', at '.join(places)}.")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_on_hyphens=False)


def _completed(records: Sequence[Record]) -> list[Record]:
    """Records of each step that the engine took, with what others of that step and commit have: a
    ratio is to what FSDP2 took in the same rounds, and a device may lack the room for all engines.
    """
    found: dict[tuple[str, ...], Record] = {}
    for record in records:
        environment = record["environment"]
        step = environment.get("device_name", ""), title(record), environment["git"]
        first = found.setdefault(step, record)
        found[step] = {**first, "summary": {**record["summary"], **first["summary"]}}
    return [record for record in found.values() if _ENGINES[0] in record["summary"]]


def _step_rows(records: Sequence[Record]) -> Iterator[list[str]]:
    for record in records:
        device = record["environment"].get("device_name")
        where = f"step on {device.removeprefix('NVIDIA ')}" if device else "step"
        yield _row(f"{where}: {title(record)}", record["summary"], "ratio_to_base", _FLOORS)


def _count_rows(records: Sequence[Record]) -> Iterator[list[str]]:
    for record in records:
        for case, of in record["summary"].items():
            what = f"{record['config']['preset']}, {case}"
            yield _row(f"host time: {what}", of, "ratio_to_fsdp2", _FLOORS)
            yield _row(f"device memory: {what}", of, "allocated_ratio_to_fsdp2")


def _row(name: str, summary: Any, field: str, floors: Sequence[str] = ("",)) -> list[str]:
    floor = next((name for name in floors if name in summary), "")
    values = [summary.get(engine, {}).get(field) for engine in (*_ENGINES, floor)]
    medians = [value["median"] if isinstance(value, dict) else value for value in values]
    return [name, *("" if median is None else f"{median:.3g}" for median in medians)]
