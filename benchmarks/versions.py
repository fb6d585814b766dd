"""CPU time and memory of a step with this source tree and with another version of it, in turns.

    git worktree add ../before COMMIT      # and build its ops there
    python -m benchmarks versions --before ../before

Each version has processes that stay, which import `shardgrad` from its own tree. In a round every
version has a turn, in an order that reverses from round to round, and CPU time is compared, not
time on the clock: so a busy machine slows both alike. The cases are the forward and backward of
`host_overhead`, where nothing is sent and almost nothing computed, and the training program's step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from benchmarks.measure import Cost, cost_of, in_turn, over_ranks, proc_nbytes, settle, summarise

_ROOT = Path(__file__).parents[1]
_BEFORE, _NOW = "before", "now"


# -- a rank of one version


def _serve(case: Mapping[str, Any], rank: int, store: str) -> None:
    """Answers lines of stdin, each with a number of repetitions; the end of stdin ends the
    process.
    """
    from benchmarks.workers import Worker

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    Worker("", None, rank, case["ranks"], store, 600.0).join()
    work = _work(case)
    for _ in range(case["warmup"]):
        work()
    peak_nbytes = _peak_nbytes(work)
    settle()
    for line in sys.stdin:
        repeats = json.loads(line)
        cost = cost_of(work, repeats=repeats) if repeats else Cost(0.0, 0.0)
        found = {"cost": vars(cost), "peak_nbytes": peak_nbytes}
        found["resident_nbytes"] = proc_nbytes("/proc/self/status", "VmHWM")
        print(json.dumps(found), file=answers, flush=True)
    os._exit(0)


def _work(case: Mapping[str, Any]) -> Any:
    if "units" in case:
        from benchmarks.host_overhead import _make_step

        return _make_step("shardgrad", case["layers"], case["units"])
    from benchmarks.trainer import make_step
    from shardgrad.programs.train.config import TrainConfig

    config = TrainConfig(preset=case["preset"], batch_size=4, seq_len=64, clip=1.0)
    step, _ = make_step(config, "cpu")
    return step


def _peak_nbytes(work: Any) -> int:
    """Returns the most bytes that torch's CPU allocator had lent in a call, above what it had
    before.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    live = most = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


# -- the parent


class _Version:
    """The ranks of one version."""

    def __init__(self, tree: Path, case: Mapping[str, Any], ended: ExitStack) -> None:
        store = ended.enter_context(tempfile.TemporaryDirectory())
        environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-P", __file__, json.dumps(case), str(rank), store],
                env=environment,
                cwd=tree,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(case["ranks"])
        ]
        for process in self._ranks:
            ended.callback(process.wait)
            ended.callback(process.kill)

    def turn(self, repeats: int) -> list[dict[str, Any]]:
        """Returns what each rank says of its turn."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(f"{repeats}\n")
            process.stdin.flush()
        lines = [process.stdout.readline() for process in self._ranks if process.stdout is not None]
        if not all(lines):
            raise click.ClickException("a rank ended; what it said is above")
        return [json.loads(line) for line in lines]


def _commit(tree: Path) -> str:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@click.command()
@click.option(
    "--before",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Source tree of the other version, with its compiled ops.  [default: this one, to see the "
    "noise]",
)
@click.option(
    "--preset", default="tiny", show_default=True, help="Model of the training program's step."
)
@click.option(
    "--units", type=click.IntRange(1), default=100, show_default=True, help="Of the chain."
)
@click.option(
    "--rounds", type=click.IntRange(2), default=100, show_default=True, help="Turns of each."
)
@click.option(
    "--warmup", type=click.IntRange(1), default=5, show_default=True, help="Steps before them."
)
@click.pass_obj
def main(run: Any, before: Path | None, preset: str, units: int, rounds: int, warmup: int) -> None:
    """Measure a step of this source tree and of another version of it, in turns."""
    if run.smoke:
        units, rounds, warmup = 3, 2, 1
    trees = {_BEFORE: (before or _ROOT).resolve(), _NOW: _ROOT}
    common = {"warmup": warmup}
    cases: dict[str, dict[str, Any]] = {
        f"{units} units of 2": {**common, "ranks": 1, "units": units, "layers": 1},
        f"{units} units of 9": {**common, "ranks": 1, "units": units, "layers": 4},
        f"{preset}, 1 rank": {**common, "ranks": 1, "preset": preset},
        f"{preset}, 2 ranks": {**common, "ranks": 2, "preset": preset},
    }
    if run.smoke:
        cases = {
            name: case
            for name, case in cases.items()
            if case["ranks"] == 1 and case.get("layers") != 4
        }
    samples, summary = {}, {}
    for name, case in cases.items():
        samples[name], summary[name] = _measure(case, trees, rounds)
    run.finish(
        "versions",
        config={
            "before": _commit(trees[_BEFORE]),
            "preset": preset,
            "units": units,
            "rounds": rounds,
            "warmup": warmup,
        },
        samples=samples,
        summary=summary,
    )


def _measure(case: Mapping[str, Any], trees: Mapping[str, Path], rounds: int) -> tuple[Any, Any]:
    costs: dict[str, list[Cost]] = {name: [] for name in trees}
    last: dict[str, Sequence[Mapping[str, Any]]] = {}
    with ExitStack() as ended:
        versions = {name: _Version(tree, case, ended) for name, tree in trees.items()}
        for version in versions.values():
            version.turn(0)  # all have started
        for number in range(rounds):
            for name in in_turn(list(versions), number):
                last[name] = versions[name].turn(2)
                costs[name].append(over_ranks([Cost(**rank["cost"]) for rank in last[name]]))
    samples = {name: {"cpu_s": [cost.cpu_s for cost in of]} for name, of in costs.items()}
    summary = summarise(costs, _BEFORE, "cpu_s")
    for name, ranks in last.items():
        for field in ("peak_nbytes", "resident_nbytes"):
            summary[name][field] = max(rank[field] for rank in ranks)
    return samples, summary


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
