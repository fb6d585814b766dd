"""`python -m tests.silent`: runs all programs under all engines, keeps records, and writes the
page.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import click

from benchmarks.records import RESULTS, append, environment
from shardgrad.programs.audit import audit
from tests.silent.cases import CASES
from tests.silent.engines import ENGINES
from tests.silent.judge import LIMIT_S, TOLERANCE, judged, run
from tests.silent.table import AUDITS, PAGE, newest_records, written
from tests.support.apart import RANKS
from tests.support.processes import CONTEXT


@click.command()
@click.option("--page", "only_page", is_flag=True, help="Run nothing, write the page.")
@click.option(
    "--audit",
    "is_audit",
    is_flag=True,
    help="Instead, audit with `shardgrad doctor --audit` what the records say is right or wrong.",
)
@click.option(
    "--engine", "engines", type=click.Choice(list(ENGINES)), multiple=True, help="Default: all."
)
def main(only_page: bool, is_audit: bool, engines: tuple[str, ...]) -> None:
    """Run the programs of tests/silent/cases with every engine on two ranks.

    DeepSpeed is one of the engines if it can be imported: pip install --no-build-isolation
    deepspeed.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    CONTEXT.set_forkserver_preload(["tests.silent.preloaded"])
    installed = [
        engine for engine in ENGINES if engine != "ZeRO-3" or importlib.util.find_spec("deepspeed")
    ]
    for engine in () if only_page else engines or installed[is_audit:]:  # torch needs no audit
        append(RESULTS, recorded(engine, is_audit))
    PAGE.write_text(written(newest_records(), newest_records(AUDITS)), encoding="utf-8")
    click.echo(PAGE)


def recorded(engine: str, is_audit: bool) -> dict[str, Any]:
    """Returns the record of an engine: how its programs end, or what audits say of those that
    do.
    """
    versions = {"torch": importlib.metadata.version("torch")}
    if engine == "ZeRO-3":
        versions["deepspeed"] = importlib.metadata.version("deepspeed")
    started = environment()
    config = {"engine": engine, "versions": versions, "ranks": RANKS}
    names = list(CASES)
    if is_audit:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        audit._START = "forkserver"  # whose server the tests have
        verdicts = {
            name: each["verdict"] for name, each in newest_records()[engine]["summary"].items()
        }
        names = [name for name in CASES if verdicts[name].startswith(("right", "wrong"))]
        judge = partial(audited, engine, verdicts)
    else:
        usual = {line for ending in run("control", engine) for line in ending.warned}
        config |= {"limit_s": LIMIT_S, "tolerance": TOLERANCE, "usual_warnings": sorted(usual)}
        judge = partial(judged, engine=engine, usual=usual)

    def told(name: str) -> dict[str, Any]:
        found = judge(name)
        click.echo(f"{engine}: {name}: {found}")
        return found

    with ThreadPoolExecutor(3) as pool:
        summary = dict(zip(names, pool.map(told, names), strict=True))
    return {
        "benchmark": "audit" if is_audit else "silent",
        "environment": started,
        "config": config,
        "samples": {},
        "summary": summary,
    }


def audited(engine: str, verdicts: dict[str, str], name: str) -> dict[str, Any]:
    """Returns what `shardgrad doctor --audit` says of a program."""
    target = f"tests.silent.audited:{engine.replace('-', '_')}__{name}"
    passed, sentence = audit.audit(target, ranks=RANKS)
    return {"is_right": verdicts[name] == "right", "passed": passed, "said": sentence}


if __name__ == "__main__":
    main(prog_name="python -m tests.silent")
