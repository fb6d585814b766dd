"""The command line; see the package's docstring."""

from __future__ import annotations

import time
from pathlib import Path

import click

from tests.fuzz.programs.compare import Difference
from tests.fuzz.programs.generate import program_of
from tests.fuzz.programs.program import Program
from tests.fuzz.programs.shrink import shrunk
from tests.fuzz.programs.worlds import Worlds


@click.command()
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--only", type=int, multiple=True, help="These seeds.")
@click.option("--count", type=click.IntRange(1), default=100, show_default=True)
@click.option("--world", default="", help="2, 4, sim1, sim2 (all by default), cuda1, cuda2.")
@click.option("--replay", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--most", default=3, show_default=True, help="Failures to make small.")
def main(
    seed: int,
    only: tuple[int, ...],
    count: int,
    world: str,
    replay: Path | None,
    most: int,
) -> None:
    """Runs random programs, or one from a file."""
    if replay is not None:
        programs = [Program.from_json(replay.read_text())]
    else:
        programs = [program_of(number, world) for number in only or range(seed, seed + count)]
    began = time.perf_counter()
    bad = 0
    failing: list[tuple[Program, Difference]] = []
    with Worlds() as worlds:
        for program in programs:
            for found in worlds.run(program).differences:
                bad += 1
                click.echo(f"--- seed {program.seed} world {program.world}: {found}")
                failing.append((program, found))
        for program, found in failing[:most]:
            small = shrunk(
                program,
                lambda p, kind=found.kind: any(
                    other.kind == kind for other in worlds.run(p).differences
                ),
            )
            outcome = worlds.run(small)
            click.echo(
                f"=== seed {program.seed}, made small: {[str(d) for d in outcome.differences]}\n"
                f"{small}"
            )
            (Path("/tmp") / f"small_{program.world}_{program.seed}.json").write_text(
                small.to_json()
            )
    click.echo(f"{len(programs)} programs, {bad} differences, {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
