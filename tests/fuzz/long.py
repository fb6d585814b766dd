"""The fuzzer for as long as one likes, in slots, and its record.

`python -m tests.fuzz.long --inputs 100000 --minutes 14 --out benchmarks/results`, and again until
it says that all inputs are done.
"""

from __future__ import annotations

import faulthandler
import json
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.records import append, environment, make_record
from tests.fuzz.targets import TARGETS

_ROUND = 500  # inputs between two lines of progress; each round has its own seed
_HANG_S = 60.0  # a slow machine needs seconds for the slowest input
_MOST_NBYTES = 4 * 2**30  # of memory, beyond what the process has at the start
# Of 1,000 inputs, for targets that cost more than a text costs; the others share the rest.
_SHARES = {
    **{"bench": 1, "doctor": 4, "model of transformers": 1, "requests of a plan": 2},
    **{f"checkpoint {name}": 8 for name in ("verify", "inspect", "export")},
    **{"train": 30, "plan": 30, "commands on a damaged checkpoint": 30},
    **{"text to train on": 20, "configuration of transformers": 20, "metrics": 40},
}
_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_PROGRESS = Path(__file__).parents[2] / "build" / "fuzz.json"


@click.command()
@click.option("--inputs", type=click.IntRange(100), default=100_000, show_default=True)
@click.option("--first-seed", type=int, default=1, show_default=True)
@click.option(
    "--minutes", type=float, help="Stop after the round that is running then; call again to go on."
)
@click.option("--progress", type=click.Path(path_type=Path), default=_PROGRESS, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"Folder of the record, as {_RESULTS.name}.",
)
def main(
    inputs: int, first_seed: int, minutes: float | None, progress: Path, out: Path | None
) -> None:
    """Feed so many inputs to all targets; the first that comes out wrong ends it, made small."""
    began_s = time.monotonic()
    _limit_memory()
    what = {"git": environment()["git"], "inputs": inputs, "first_seed": first_seed}
    done = _Done.read(progress, what)
    for name, count in _counts(inputs).items():
        for number in range(done.rounds.get(name, 0), -(-count // _ROUND)):
            if minutes is not None and time.monotonic() - began_s > 60 * minutes:
                sys.exit(f"{done.total} inputs are done: call again to go on.")
            before_s = time.perf_counter()
            _feed(name, min(_ROUND, count - number * _ROUND), first_seed + number, done)
            done.wall_s += time.perf_counter() - before_s
            done.rounds[name] = number + 1
            done.write(progress, what)
            click.echo(
                f"{name}: {dict(done.outcomes[name])}, the slowest in {done.worst_s[name]:.3f} s"
            )
    if out is not None:
        append(
            out,
            make_record(
                "fuzz",
                environment=environment(),
                config={"inputs": inputs, "first_seed": first_seed, "hang_s": _HANG_S},
                samples={"wall_s": done.wall_s},
                # A record is left only if nothing else came out than what is counted.
                summary={"all": {"inputs": done.total, "untyped": 0, "hangs": 0}, **done.rows()},
            ),
        )
    progress.unlink()
    click.echo(f"All {done.total} inputs are done.")


class _Done:
    """What has been fed in this slot and in those before.

    Attributes:
        rounds: that are complete, by target.
        outcomes: how often what happened, by target.
        worst_s: CPU seconds of the slowest input, by target.
        wall_s: seconds of all rounds.
    """

    def __init__(
        self, rounds: dict[str, int], outcomes: Any, worst_s: dict[str, float], wall_s: float
    ) -> None:
        self.rounds = rounds
        self.outcomes: dict[str, Counter[str]] = {
            name: Counter(found) for name, found in outcomes.items()
        }
        self.worst_s = worst_s
        self.wall_s = wall_s

    @classmethod
    def read(cls, path: Path, what: dict[str, Any]) -> _Done:
        """Goes on where a file says; refuses one of other code."""
        if not path.exists():
            return cls({}, {}, {}, 0.0)
        kept = json.loads(path.read_text())
        if kept.pop("of") != what:
            sys.exit(f"{path} is of another commit or has other options: remove it to begin again.")
        return cls(**kept)

    def write(self, path: Path, what: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps({"of": what, **vars(self)}))
        fresh.replace(path)

    def rows(self) -> dict[str, dict[str, Any]]:
        return {
            name: {"inputs": found.total(), **found, "slowest_s": self.worst_s[name]}
            for name, found in self.outcomes.items()
        }

    @property
    def total(self) -> int:
        return sum(found.total() for found in self.outcomes.values())


def _limit_memory() -> None:
    now_nbytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now_nbytes + _MOST_NBYTES,) * 2)


def _counts(inputs: int) -> dict[str, int]:
    """Returns how many inputs each target gets; together at least as many as asked for."""
    rest = [name for name in TARGETS if name not in _SHARES]
    shares = {
        name: _SHARES.get(name, (1000 - sum(_SHARES.values())) / len(rest)) for name in TARGETS
    }
    return {name: int(inputs * share / 1000) + 1 for name, share in shares.items()}


def _feed(name: str, count: int, number: int, done: _Done) -> None:
    target, outcomes = TARGETS[name], done.outcomes.setdefault(name, Counter())

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
        given = data.draw(target.inputs)
        faulthandler.dump_traceback_later(_HANG_S, exit=True)
        before_s = time.process_time()
        try:
            outcomes[target.feed(given)] += 1
        finally:
            faulthandler.cancel_dump_traceback_later()
        done.worst_s[name] = max(done.worst_s.get(name, 0.0), time.process_time() - before_s)

    feed()


if __name__ == "__main__":
    main()
