"""The fuzzer for as long as one likes, and its record: `python -m tests.fuzz.long --inputs 100000`."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.records import append, environment, make_record
from tests.fuzz.targets import TARGETS

_ROUND = 2_000  # inputs between two lines of progress; each round has a seed of its own
# A command line costs a hundred times what a text costs.
_SHARES = {"command line": 2, "files": 10, "files of torch": 8, "index": 20}
_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@click.command()
@click.option("--inputs", type=click.IntRange(100), default=100_000, show_default=True)
@click.option("--first-seed", type=int, default=1, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"Folder of the record, as {_RESULTS.name}.",
)
def main(inputs: int, first_seed: int, out: Path | None) -> None:
    """Feed so many inputs to all targets; the first that comes out wrong ends it, made small."""
    started, began_s = environment(), time.perf_counter()
    outcomes: dict[str, Counter[str]] = {}
    for name, count in _counts(inputs).items():
        outcomes[name] = Counter()
        for number, done in enumerate(range(0, count, _ROUND)):
            _feed(name, min(_ROUND, count - done), first_seed + number, outcomes[name])
            click.echo(f"{name}: {outcomes[name].total()} of {count}  {dict(outcomes[name])}")
    if out is not None:
        append(
            out,
            make_record(
                "fuzz",
                environment=started,
                config={"inputs": inputs, "first_seed": first_seed},
                samples={"wall_s": time.perf_counter() - began_s},
                summary={name: dict(found) for name, found in outcomes.items()},
            ),
        )


def _counts(inputs: int) -> dict[str, int]:
    """Returns how many inputs each target gets; together at least as many as asked for."""
    rest = [name for name in TARGETS if name not in _SHARES]
    shares = {name: _SHARES.get(name, (100 - sum(_SHARES.values())) / len(rest)) for name in TARGETS}
    return {name: round(inputs * share / 100 + 0.5) for name, share in shares.items()}


def _feed(name: str, count: int, number: int, outcomes: Counter[str]) -> None:
    target = TARGETS[name]

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(st.data())
    def feed(data: Any) -> None:
        outcomes[target.feed(data.draw(target.inputs))] += 1

    feed()


if __name__ == "__main__":
    main()
