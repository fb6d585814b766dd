"""The page of the table: made of a record, and of what the programs say about themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.records import RESULTS, ROOT, read
from tests.silent.cases import CASES, TOPICS
from tests.silent.engines import ENGINES

PAGE = ROOT / "docs" / "explanation" / "right_where_others_are_wrong.md"
RECORDS, AUDITS = RESULTS / "silent.jsonl", RESULTS / "audit.jsonl"
OURS = "shardgrad"

# What a program says: what the user did, addresses of reports, and what it has to come to.
_DOC = re.compile(
    r"(.+?)\.\n\n((?:Report: https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+\n)+)Right: .+",
    re.DOTALL,
)

_WORDS = {
    "right": "right",
    "refused": "refused",
    "wrong": "**wrong**",
    "wrong, warned": "wrong, warns",
    "hangs": "**hangs**",
    "hangs, warned": "hangs, warns",
    "backend error": "**backend fails**",
    "crashes": "**crashes**",
    "not offered": "-",
}


def about(name: str) -> tuple[str, list[str]]:
    """Returns the title of a program, and the addresses of its reports."""
    found = _DOC.fullmatch(inspect.getdoc(CASES[name]) or "")
    assert found is not None, f"{name} lacks a title, a report, or what is right"
    return " ".join(found[1].split()), re.findall(r"\S+//\S+", found[2])


def newest_records(path: Path = RECORDS) -> dict[str, dict[str, Any]]:
    """Returns the last record of each engine in a file."""
    newest = {record["config"]["engine"]: record for record in read(path)}
    return {engine: newest[engine] for engine in ENGINES if engine in newest}


def written(
    records: Mapping[str, Mapping[str, Any]], audits: Mapping[str, Mapping[str, Any]]
) -> str:
    """Returns the page of records by engine, and of audits by engine."""
    columns = {engine: record["summary"] for engine, record in records.items()}
    ours = records[OURS]
    commits: dict[str, list[str]] = {}
    for engine, record in records.items():
        commits.setdefault(record["environment"]["git"][:12], []).append(engine)
    lines = [
        _INTRODUCTION.format(
            count=len(columns[OURS]),
            torch=ours["config"]["versions"]["torch"],
            deepspeed=records["ZeRO-3"]["config"]["versions"]["deepspeed"],
            commits=", ".join(f"{at} ({', '.join(engines)})" for at, engines in commits.items()),
            cpu=ours["environment"]["cpu"],
            counts="\n".join(_counted(columns)),
        ),
        *_headed(["what a program does", "reported", *columns]),
    ]
    for topic, names in TOPICS.items():
        path = Path(topic.__file__).relative_to(ROOT)
        lines.append(_row([f"**{topic.__doc__.rstrip('.')}**", *[""] * (len(columns) + 1)]))
        for name in names:
            title, urls = about(name)
            reports = [f"[{'#'.join(url.split('/')[4::2])}]({url})" for url in urls]
            verdicts = [_cell(engine, column[name]) for engine, column in columns.items()]
            lines.append(_row([f"[{title}](../../{path})", ", ".join(reports), *verdicts]))
    lines += ["", _WHAT_AUDITS_FIND]
    lines += _headed(["", "wrong", "of them found", "right", "of them passed"])
    for engine, record in audits.items():
        wrong, right = (
            [each["passed"] for each in record["summary"].values() if each["is_right"] is is_right]
            for is_right in (False, True)
        )
        lines.append(_row([engine, len(wrong), wrong.count(False), len(right), right.count(True)]))
    return "\n".join(lines) + "\n"


def _cell(engine: str, found: Mapping[str, Any]) -> str:
    """Returns the verdict; of a refusal here, the error too."""
    names_error = engine == OURS and found["verdict"] == "refused"
    return _WORDS[found["verdict"]] + (f": `{found['error']}`" if names_error else "")


def _counted(columns: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    ends = {"hangs": "hangs or crashes", "crashes": "hangs or crashes"}
    ends |= {
        "backend error": "hangs or crashes",
        "wrong, warned": "warns",
        "hangs, warned": "warns",
    }
    kinds = ("right", "refused", "warns", "wrong", "hangs or crashes", "not offered")
    yield from _headed(["", *kinds])
    for engine, column in columns.items():
        found = [ends.get(each["verdict"], each["verdict"]) for each in column.values()]
        yield _row([engine, *map(found.count, kinds)])


def _headed(cells: list[str]) -> list[str]:
    return [_row(cells), _row(["---"] * len(cells))]


def _row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


_INTRODUCTION = """\
# Right where others are wrong

The table has {count} programs from bug reports. With at least one engine, each trained other values
than its author expected, hung, or wrote a file that was not the model. Each runs with every engine
on two CPU ranks over gloo, and is compared with plain torch, where every rank has the unsharded
model and the test averages gradients. `python -m tests.silent` runs them again, and writes this
page from its record, `benchmarks/results/silent.jsonl`. CI tests that shardgrad is *never silently
wrong* in them. To look for such mistakes in your own program, with any engine,
[audit it](../how_to/check_a_program.md).

| result | meaning |
| --- | --- |
| wrong | other values, without an error or warning |
| wrong, warns | other values, with a warning that a correct program does not get |
| hangs | no end and no message within 13 seconds |
| hangs, warns | waits, and [a warning names what for](../how_to/read_an_error.md#one-rank-does-what-the-others-do-not) |
| backend fails | an error of gloo's, such as a lost connection; over NCCL, this is a hang |
| refused | any other exception; a `RuntimeError` is torch's own |

{counts}

torch {torch}, DeepSpeed {deepspeed}, {cpu}. Recorded at commits
{commits}.
FSDP1 uses `use_orig_params=True`, DDP `find_unused_parameters=True`, and DeepSpeed ZeRO stage 3 in
float32 without clipping. If a case is right with an engine, the reported bug may have been fixed
since.

## The programs
"""

_WHAT_AUDITS_FIND = """\
## What an audit finds

`shardgrad doctor --audit` [runs a program with and without its
engine](../how_to/check_a_program.md). Its findings for these programs, if they end
(`python -m tests.silent --audit`, record `benchmarks/results/audit.jsonl`):
"""
