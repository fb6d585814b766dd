"""Thousands of programs, and the records of them: `python -m tests.fuzz.programs.record --help`.

Each call runs the programs after those of which the file has a record, and adds a record with
counts by dimension; with `--defects`, it adds one for each old defect that has none. It ends with
status 1 if anything differs without an explanation, or a defect is not found.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import click

from benchmarks.records import RESULTS, append, environment, make_record, read
from tests.fuzz.programs.compare import Outcome
from tests.fuzz.programs.contract import blocks_of
from tests.fuzz.programs.defects import DEFECTS
from tests.fuzz.programs.generate import program_of
from tests.fuzz.programs.program import Program
from tests.fuzz.programs.worlds import Worlds, side_by_side

_CHUNK = 100  # programs between two lines of progress
FIRST_SEED = 1_000_000


@click.command()
@click.option("--count", type=click.IntRange(1), default=2_000, show_default=True)
@click.option(
    "--seconds", type=float, default=780.0, show_default=True, help="Begin no programs after that."
)
@click.option(
    "--first", type=int, help="Seed of the first; by default, the one after those recorded."
)
@click.option("--lanes", type=click.IntRange(1), default=3, show_default=True, help="Side by side.")
@click.option("--defects", is_flag=True, help="Put each old defect back until it is found.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, show_default=True
)
def main(
    count: int, seconds: float, first: int | None, lanes: int, defects: bool, out: Path
) -> None:
    """Runs programs and keeps a record."""
    runs: list[tuple[str, Callable[[], dict[str, Any]]]]
    if defects:
        known = _found_so_far(out / "program_defects.jsonl")
        runs = [
            ("program_defects", partial(found_defects, count, (d,), lanes))
            for d in DEFECTS
            if d not in known
        ]
    else:
        begin = _next_seed(out / "programs.jsonl") if first is None else first
        runs = [("programs", partial(_run, count, seconds, begin, lanes))]
    is_right = True
    for name, run in runs:
        started, began_s = environment(), time.perf_counter()
        summary = run()
        samples = {"wall_s": time.perf_counter() - began_s}
        config = {"count": count, "first_seed": FIRST_SEED, "lanes": lanes}
        append(
            out,
            make_record(name, environment=started, config=config, samples=samples, summary=summary),
        )
        click.echo(summary)
        is_right &= not summary.get("differences") and "not found" not in summary.values()
    sys.exit(not is_right)


def _found_so_far(path: Path) -> set[str]:
    return (
        {defect for record in read(path) for defect in record["summary"]}
        if path.exists()
        else set()
    )


def _next_seed(path: Path) -> int:
    if not path.exists():
        return FIRST_SEED
    return max((record["summary"]["next_seed"] for record in read(path)), default=FIRST_SEED)


def _run(count: int, seconds: float, first: int, lanes: int) -> dict[str, Any]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    differences: list[str] = []
    done, began_s = 0, time.perf_counter()

    def chunks() -> Iterator[list[Program]]:
        for begin in range(first, first + count, _CHUNK):
            if time.perf_counter() - began_s > seconds:
                return
            yield [program_of(seed) for seed in range(begin, min(begin + _CHUNK, first + count))]

    for outcomes in side_by_side(lanes, chunks()):
        for program, outcome in outcomes:
            differences += [f"seed {program.seed}: {found}"[:1000] for found in outcome.differences]
            for dimension, value in _dimensions(program, outcome):
                counts[dimension][value] += 1
        done += len(outcomes)
        click.echo(
            f"{done} of {count}, {len(differences)} differences, "
            f"{time.perf_counter() - began_s:.0f} s"
        )
    by_dimension = {name: dict(sorted(counter.items())) for name, counter in sorted(counts.items())}
    return {
        "programs": done,
        "first_seed": first,
        "next_seed": first + done,
        "differences": differences,
        "counts": by_dimension,
    }


def _dimensions(program: Program, outcome: Outcome) -> Iterator[tuple[str, str]]:
    """Yields what a program counts for."""
    sharding, model, optimizer = program.sharding, program.model, program.optimizer
    yield "world", program.world
    yield "fsdp2", outcome.explained[0] if outcome.explained else "compared"
    for name in (
        "mesh",
        "stage",
        "reshard",
        "columns",
        "param_dtype",
        "reduce_dtype",
        "wire_dtype",
        "zero_copy",
        "prefetch",
    ):
        yield name, str(getattr(sharding, name) or "default")
    yield "optimizer", f"{optimizer.library}.{optimizer.kind}"
    blocks = blocks_of(program)
    kinds = {block.kind for block in blocks} | {
        block.recompute for block in blocks if block.recompute
    }
    has = {"ties": model.ties, "list of modules": model.several, "second output": model.aux}
    has |= {
        "nested": any(block.inner for block in blocks),
        "frozen": any(block.frozen for block in blocks),
    }
    has |= {"calls itself": model.guess, "runs twice": len(set(model.order)) < len(model.order)}
    for kind in sorted(kinds) + [name for name, value in has.items() if value]:
        yield "model", kind
    for do in sorted({f"{op.do} {op.how}".strip() for op in program.ops}):
        yield "operation", do


def found_defects(count: int, names: Sequence[str], lanes: int = 1) -> dict[str, Any]:
    """Returns for each defect after how many programs it was found, or "not found"."""
    return {name: _programs_until_found(name, count, lanes) for name in names}


def _programs_until_found(defect: str, count: int, lanes: int) -> int | str:
    """Returns how many programs it took until one differed that does not without the defect."""
    chunks = (
        [program_of(FIRST_SEED + n) for n in range(begin, min(begin + _CHUNK, count))]
        for begin in range(0, count, _CHUNK)
    )
    with (
        Worlds(with_fsdp2=False) as right,
        closing(side_by_side(lanes, chunks, defect=defect, with_fsdp2=False)) as all_outcomes,
    ):
        for program, outcome in chain.from_iterable(all_outcomes):
            if outcome.differences and not right.run(program).differences:
                click.echo(f"{defect}: seed {program.seed}: {outcome.differences[0]}")
                return program.seed - FIRST_SEED + 1
    return "not found"


if __name__ == "__main__":
    main()
