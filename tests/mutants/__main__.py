"""The audit: does a test notice when a line of the package is wrong?

`make mutants` tries every mutant (`mutant.py` says where they are listed) against the test that is
known to notice it, and `.ci/run` does so with forty that are drawn at random. Both print, and
`--out` records, the share that was noticed by folder. A mutant that is not noticed is one of these:

- The test that noticed it has moved: with `--search`, all tests that run its line are tried, and
  the one that fails becomes the known one (`python -m tests.mutants lines` first).
- Nothing notices it: write the test.
- There is nothing to notice: its name goes into `equivalent.toml`, with the reason.

    python -m tests.mutants try --draw 40 --seed 7     what a run of CI has drawn, again
    python -m tests.mutants try --only engine/ --search 20
    python -m tests.mutants lines                      measures which tests run which lines
    python -m tests.mutants renew                      new mutants for lines that are no more
"""

from __future__ import annotations

import gc
import hashlib
import random
import sys
import time
from pathlib import Path

import click

from tests.mutants import generate, lines
from tests.mutants.audit import audit, control, latest, report
from tests.mutants.mutant import (
    all_mutants,
    equivalent,
    fits,
    generated,
    noticed_by,
    write_generated,
)

_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_QUICK_S = 4.0  # of CPU; what CI draws from


@click.group()
def main() -> None:
    """Try mutants of the package."""


@main.command("try")
@click.option(
    "--draw", type=click.IntRange(1), help="So many at random, of those that are quickly noticed."
)
@click.option("--seed", type=int, help="Of --draw.  [default: another one each time]")
@click.option("--only", default="", help="Mutants whose name or path begins with this.")
@click.option(
    "--search",
    type=float,
    default=0.0,
    help="Where the known test notices nothing, or none is known, try others for about so many "
    "seconds.",
)
@click.option(
    "--test",
    "tests",
    multiple=True,
    help="Try this instead; with --search, it becomes the known one.",
)
@click.option("--resume", is_flag=True, help="Go on where an interrupted audit ended.")
@click.option("--missed", is_flag=True, help="Only those that were not noticed the last time.")
@click.option("--unknown", is_flag=True, help="Only those of which no test is known.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--budget-s", type=float, default=float("inf"), help="Begins no mutant after so many seconds."
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help=f"As {_RESULTS.name}."
)
def try_(
    draw: int | None,
    seed: int | None,
    only: str,
    search: float,
    tests: tuple[str, ...],
    resume: bool,
    missed: bool,
    unknown: bool,
    jobs: int,
    budget_s: float,
    out: Path | None,
) -> None:
    """Try mutants; fails if one is not noticed and not listed as equivalent."""
    seed = random.randrange(10**6) if seed is None else seed
    chosen = [
        each for each in all_mutants() if each.name.startswith(only) or each.path.startswith(only)
    ]
    chosen = [each for each in chosen if each.name not in equivalent()]
    # In an order that has nothing to do with the code: a part of an audit is a fair sample.
    chosen.sort(key=lambda each: hashlib.sha256(each.name.encode()).digest())
    known = noticed_by()
    if unknown:
        chosen = [each for each in chosen if each.name not in known]
    if draw is not None:
        chosen = [
            each for each in chosen if each.name in known and not each.is_native
        ]  # nothing to compile
        quick = [each for each in chosen if known[each.name].cpu_s < _QUICK_S]
        chosen = random.Random(seed).sample(quick, min(draw, len(quick)))
        click.echo(f"{len(chosen)} of {len(quick)} mutants, drawn with --seed {seed}")
    before = latest() if resume or missed else {}
    if missed:
        chosen = [
            each for each in chosen if each.name in before and not before[each.name].noticed_by
        ]
    verdicts = [before[each.name] for each in chosen if each.name in before] if resume else []
    left = [each for each in chosen if not (resume and each.name in before)]
    resumed = len(verdicts)
    began_s = time.monotonic()
    preload()
    control(left, seed=seed, is_whole=draw is None)
    for verdict in audit(left, tests=tests, search_s=search, jobs=jobs, until_s=began_s + budget_s):
        verdicts.append(verdict)
        click.echo(verdict)
    wall_s = time.monotonic() - began_s
    click.echo(
        report(
            verdicts, wall_s=wall_s, out=out, is_whole=draw is None and not only, resumed=resumed
        )
    )
    if any(not verdict.noticed_by for verdict in verdicts):
        sys.exit(1)


@main.command("lines")
@click.argument("begins", nargs=-1)
@click.option(
    "--budget-s", type=float, default=800.0, show_default=True, help="Begins no file after this."
)
def lines_(begins: tuple[str, ...], budget_s: float) -> None:
    """Measure which tests run which lines: of all test files, or of those whose path begins with
    BEGINS.
    """
    preload()
    for line in lines.measure(budget_s, begins):
        click.echo(line)


@main.command()
@click.option("--seed", type=int, default=1, show_default=True)
def renew(seed: int) -> None:
    """Replace the generated mutants that do not fit the code any more; files that have grown get
    more.
    """
    kept = [mutant for mutant in generated() if fits(mutant)]
    names = {mutant.name for mutant in kept}
    new = []
    for path, count in generate.wanted().items():
        missing = count - sum(mutant.path == path for mutant in kept)
        if missing > 0:
            drawn = [
                mutant for mutant in generate.draw(path, count, seed) if mutant.name not in names
            ]
            new += random.Random(seed).sample(drawn, min(missing, len(drawn)))
    write_generated(sorted([*kept, *new], key=lambda mutant: mutant.name))
    click.echo(f"{len(kept)} kept, {len(generated()) - len(kept)} new")


def preload() -> None:
    """Imports what trials have in common: not the package, which each imports with its change."""
    import hypothesis
    import numpy
    import rich.console
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    import torch.testing
    import torch.utils.data

    assert all((hypothesis, numpy, rich, torch))
    assert "shardgrad" not in sys.modules
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()
