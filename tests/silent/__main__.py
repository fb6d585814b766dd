"""`python -m tests.silent`: runs all programs under all engines, keeps records, and writes the
page.
"""

from __future__ import annotations

import importlib.metadata
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from benchmarks.records import RESULTS, append, environment
from shardgrad.programs.audit import audit
from tests.silent.engines import ENGINES
from tests.silent.judge import LIMIT_S, TOLERANCE, judged, run
from tests.silent.table import AUDITS, CASES, PAGE, newest_records, written
from tests.support.apart import RANKS
from tests.support.processes import CONTEXT


@click.command()
@click.option("--page", "only_page", is_flag=True, help="Run nothing, write the page.")
@click.option(
    "--audit",
    "audits",
    is_flag=True,
    help="Instead, audit with `shardgrad doctor --audit` what the records say is right or wrong.",
)
@click.option(
    "--engine", "engines", type=click.Choice(list(ENGINES)), multiple=True, help="Default: all."
)
@click.option(
    "--at-once",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Programs at a time.",
)
def main(only_page: bool, audits: bool, engines: tuple[str, ...], at_once: int) -> None:
    """Run the programs of tests/silent/cases with every engine on two ranks.

    DeepSpeed is one of the engines if it can be imported: pip install --no-build-isolation
    deepspeed.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    CONTEXT.set_forkserver_preload(["tests.silent.preloaded"])
    started = environment()
    told = audited if audits else measured
    is_installed = _versions()["deepspeed"] != "not installed"
    for engine in () if only_page else engines or (ENGINES if not audits else list(ENGINES)[1:]):
        if engine == "ZeRO-3" and not is_installed:
            click.echo("DeepSpeed is not installed: what is recorded of ZeRO-3 stays")
            continue
        append(RESULTS, told(engine, at_once, started))
    PAGE.write_text(written(newest_records(), newest_records(AUDITS)), encoding="utf-8")
    click.echo(PAGE)


def measured(engine: str, at_once: int, started: dict[str, Any]) -> dict[str, Any]:
    """Returns the record of an engine."""
    usual = {line for ending in run("control", engine) for line in ending.warned}

    def told(name: str) -> dict[str, Any]:
        found = judged(name, engine, usual)
        click.echo(f"{engine}: {name}: {found['verdict']}")
        return found

    with ThreadPoolExecutor(at_once) as pool:
        summary = dict(zip(CASES, pool.map(told, CASES), strict=True))
    return {
        "benchmark": "silent",
        "environment": started,
        "config": {
            "engine": engine,
            "versions": _versions(),
            "ranks": RANKS,
            "limit_s": LIMIT_S,
            "tolerance": TOLERANCE,
            "usual_warnings": sorted(usual),
        },
        "samples": {},
        "summary": summary,
    }


def audited(engine: str, at_once: int, started: dict[str, Any]) -> dict[str, Any]:
    """Returns the record of what audits say of an engine's programs that end."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    audit._START = "forkserver"  # whose server the tests have
    verdicts = newest_records()[engine]["summary"]
    ended = [name for name in CASES if verdicts[name]["verdict"].startswith(("right", "wrong"))]

    def told(name: str) -> dict[str, Any]:
        target = f"tests.silent.audited:{engine.replace('-', '_')}__{name}"
        passed, sentence = audit.audit(target, ranks=RANKS)
        click.echo(f"{engine}: {name}: {verdicts[name]['verdict']}: {sentence}")
        said = {"passed": passed, "said": sentence}
        return {"is_right": verdicts[name]["verdict"] == "right"} | said

    with ThreadPoolExecutor(at_once) as pool:
        summary = dict(zip(ended, pool.map(told, ended), strict=True))
    config = {"engine": engine, "versions": _versions(), "ranks": RANKS}
    return {
        "benchmark": "audit",
        "environment": started,
        "config": config,
        "samples": {},
        "summary": summary,
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in ("torch", "deepspeed"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


if __name__ == "__main__":
    main(prog_name="python -m tests.silent")
