"""`python -m tests.clients`: runs programs of many packages with FSDP2 and with this engine, keeps
a record, and writes the page *Clients*.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import click
import torch

from benchmarks.records import RESULTS, ROOT, append, environment, read
from tests.clients import frameworks, programs, trainers  # noqa: F401
from tests.clients.catalogue import CLIENTS, Client, alone, compared, with_sources
from tests.support.processes import CONTEXT
from tests.support.ranks import RankError, Ranks

PAGE = ROOT / "docs" / "reference" / "clients.md"
RECORDS = RESULTS / "clients.jsonl"
LIMIT_S = 120.0


@click.command()
@click.option("--page", "only_page", is_flag=True, help="Run nothing, write the page.")
@click.option(
    "--only", multiple=True, help="Only clients with this in their name; others stay as they were."
)
@click.option("--sources", default="", help="A folder with more packages, used only by ranks.")
def main(only_page: bool, only: tuple[str, ...], sources: str) -> None:
    """Run programs of many packages on two CPU ranks, with FSDP2 and with this engine.

    What is not installed, is not in the record. tests/clients/frameworks.py says how a client is
    written.
    """
    if not only_page:
        chosen = {
            name: each
            for name, each in CLIENTS.items()
            if not only or any(word in name for word in only)
        }
        record = measured(chosen, sources)
        if only:  # the others stay as they were found, with their commit
            *_, newest = read(RECORDS)
            commit = {"commit": newest["environment"]["git"]}
            others = {name: commit | each for name, each in newest["summary"].items()}
            record["summary"] = others | record["summary"]
        append(RESULTS, record)
    PAGE.write_text(written([*read(RECORDS)][-1]), encoding="utf-8")
    click.echo(PAGE)


def measured(clients: Mapping[str, Client], sources: str) -> dict[str, Any]:
    """Returns the record."""
    started, ranks, summary = environment(), Ranks(2), {}
    CONTEXT.set_forkserver_preload(["tests.support.preloaded"])
    for name, client in clients.items():
        versions = {package: _version(package, sources) for package in client.packages}
        if None in versions.values():
            continue
        found = {"versions": versions} | _judged(ranks, client, sources)
        click.echo(f"{name}: {found['verdict']} {found.get('error', '')}")
        summary[name] = found
    ranks.stop()
    config = {"torch": torch.__version__, "ranks": 2}
    return {
        "benchmark": "clients",
        "environment": started,
        "config": config,
        "samples": {},
        "summary": summary,
    }


def _version(package: str, sources: str) -> str | None:
    found = importlib.metadata.distributions(name=package, path=[*sys.path, sources])
    return next((each.version for each in found), None)


def _judged(ranks: Ranks, client: Client, sources: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for runs, verdict in ((compared, "fails"), (alone, "fails with FSDP2")):
        try:
            (ended, _) = ranks.run(
                with_sources, sources, runs, client.program, client.options, timeout_s=LIMIT_S
            )
        except RankError as error:
            said = str(error).strip().splitlines()[-1][:300]
            found = {"verdict": verdict, "error": said}
        else:
            return found or ended
    return found


# -- the page


def written(record: Mapping[str, Any]) -> str:
    """Returns the page of a record."""
    found = {name: each for name, each in record["summary"].items() if name in CLIENTS}
    same = sum(each["verdict"] == "same bits" for each in found.values())
    lines = [
        _INTRODUCTION.format(
            count=len(found),
            same=same,
            packages=len({package for each in found.values() for package in each["versions"]}),
            torch=record["config"]["torch"],
            commit=" and ".join(dict.fromkeys(_commits(record))),
            cpu=record["environment"]["cpu"],
        ),
        "| of | programs | versions | result |",
        "| --- | --- | --- | --- |",
    ]
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, each in found.items():
        versions = ", ".join(f"{package} {number}" for package, number in each["versions"].items())
        of, _, program = name.partition(": ")
        rows.setdefault((of, versions, _words(each)), []).append(program)
    lines += [
        f"| {of} | {'; '.join(names)} | {versions} | {result} |"
        for (of, versions, result), names in rows.items()
    ]
    return "\n".join(lines) + "\n"


def _commits(record: Mapping[str, Any]) -> Iterator[str]:
    for each in record["summary"].values():
        yield (each.get("commit") or record["environment"]["git"] or "")[:12]


def _words(each: Mapping[str, Any]) -> str:
    if each["verdict"] == "differs":
        return f"differs by {each['off']:.1g}"
    return each["verdict"] + (f": `{each['error']}`" if "error" in each else "")


_INTRODUCTION = """\
# Clients

This page lists {count} programs from {packages} packages that use FSDP2. Each runs on two CPU ranks
over gloo, once unchanged and once inside `shardgrad.patch()`. {same} are bitwise equal: losses,
gradient norms, all parameters and buffers. If a result differs, the number is the largest
difference of a value, relative to its norm. Accelerate's policy for `bf16` lets FSDP2 round each
sum of gradients to bfloat16, where shardgrad adds in float32
([how to avoid that](../how_to/use_a_framework.md#what-was-tested)).

`python -m tests.clients` runs the programs again, with packages that are installed or in the folder
given by `--sources`, and writes this page from its record, `benchmarks/results/clients.jsonl`. For
frameworks that start clusters, only the code that calls FSDP2 runs. Programs that FSDP2 does not
run are omitted.

torch {torch}, commit {commit}, {cpu}.
"""


if __name__ == "__main__":
    main(prog_name="python -m tests.clients")
