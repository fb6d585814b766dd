"""Tries mutants, and says which were noticed."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.mutants import lines
from tests.mutants.mutant import (
    HERE,
    ROOT,
    Mutant,
    Noticed,
    all_mutants,
    equivalent,
    noticed_by,
    write_noticed_by,
)
from tests.mutants.trial import LATE, Result, Trial

_KEPT = ROOT / "build" / "mutants" / "verdicts.jsonl"
# A trial that takes this many times what it took, or this long, hangs.
_PATIENCE, _LEAST_S = 6.0, 40.0
_CONTROLS = 5


class ControlError(AssertionError):
    """A test fails without a mutant."""


@dataclass(frozen=True)
class Verdict:
    """What came of a mutant.

    Attributes:
        name: of the mutant.
        room: its folder.
        noticed_by: the test that failed; "" if none did.
        why: the last line of its report.
        tried: number of tests that were run.
        cpu_s: seconds of CPU.
    """

    name: str
    room: str
    noticed_by: str
    why: str
    tried: int
    cpu_s: float

    def __str__(self) -> str:
        what = self.noticed_by or f"NOT NOTICED by {self.tried} tests"
        return f"{self.name} | {what} | {self.cpu_s:.1f} s"


def control(mutants: Sequence[Mutant], *, seed: int, is_whole: bool) -> None:
    """Requires that the known tests pass without a mutant: some of them, or all.

    Raises:
        ControlError: one does not, so that its failures say nothing.
    """
    known = noticed_by()
    tests = sorted({known[mutant.name].test for mutant in mutants if mutant.name in known})
    if not is_whole:
        tests = random.Random(seed).sample(tests, min(_CONTROLS, len(tests)))
    if tests:
        result = Trial(tests, None, limit_s=60 + 10 * len(tests)).result()
        if result.failed or len(result.passed) < len(tests):
            gone = sorted(set(tests) - set(result.passed))
            raise ControlError(
                f"without any mutant, {result.failed or gone} does not pass:\n{result.why}"
            )


def audit(
    mutants: Sequence[Mutant], *, tests: Sequence[str], search_s: float, jobs: int, until_s: float
) -> Iterator[Verdict]:
    """Tries mutants in order; yields a verdict for each, as it is known.

    Args:
        mutants: what to try.
        tests: to try, instead of those that are known or run the line.
        search_s: seconds that tests of the line may take, after the known one; 0 for none.
        jobs: trials at a time.
        until_s: of the monotonic clock; no mutant is begun later.
    """
    known = noticed_by()
    measured = lines.read() if search_s else []
    waiting = list(mutants)
    running: list[
        tuple[Mutant, Trial, bool]
    ] = []  # the last: whether the known test is being tried
    _KEPT.parent.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        if time.monotonic() > until_s:
            waiting.clear()
        while waiting and len(running) < jobs:
            mutant = waiting.pop(0)
            expected = known.get(mutant.name)
            if expected is not None and not tests:
                limit_s = max(_LEAST_S, _PATIENCE * expected.cpu_s)
                running.append((mutant, Trial([expected.test], mutant, limit_s=limit_s), True))
            else:
                chosen = tests or _chosen(mutant, measured, search_s)
                if chosen:
                    running.append(
                        (mutant, Trial(chosen, mutant, limit_s=_LEAST_S + 3 * search_s), False)
                    )
                else:
                    yield _kept(
                        Verdict(
                            mutant.name,
                            mutant.room,
                            "",
                            "no test is known, or --search finds none",
                            0,
                            0.0,
                        )
                    )
        for entry in [entry for entry in running if not entry[1].is_running()]:
            running.remove(entry)
            mutant, trial, was_known = entry
            result = trial.result()
            if was_known and result.is_gone and "[" in known[mutant.name].test:
                # Its cases have other names now: any of them will do.
                function = known[mutant.name].test.partition("[")[0]
                known[mutant.name] = replace(known[mutant.name], test=function)
                waiting.insert(0, mutant)
                continue
            if was_known and not result.failed and search_s:
                del known[mutant.name]
                waiting.insert(0, mutant)
                continue
            if not was_known and result.failed and result.why == LATE:
                # On a busy machine, or after tests that leave threads, others end so: it has to by
                # itself.
                result = Trial([result.failed], mutant, limit_s=_LEAST_S).result()
            if result.failed and search_s:
                known[mutant.name] = Noticed(mutant.name, result.failed, round(result.cpu_s, 1))
                write_noticed_by(known)
            yield _kept(_verdict(mutant, result))
        time.sleep(0.02)


def _chosen(mutant: Mutant, measured: list[lines.Ran], search_s: float) -> list[str]:
    """Returns the tests to try: the fastest that run the line, and not longer than there is time
    for.
    """
    took_s = {ran.test: ran.took_s for ran in measured}
    chosen, sum_s = [], 0.0
    for test in lines.candidates(mutant, measured):
        sum_s += took_s[test]
        if chosen and sum_s > search_s:
            break
        chosen.append(test)
    return chosen


def _verdict(mutant: Mutant, result: Result) -> Verdict:
    why = result.why.strip().splitlines()[-1] if result.why.strip() else ""
    tried = len(result.passed) + bool(result.failed)
    return Verdict(
        mutant.name, mutant.room, result.failed, why[:200], tried, round(result.cpu_s, 2)
    )


def _kept(verdict: Verdict) -> Verdict:
    with _KEPT.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(asdict(verdict), ensure_ascii=False) + "\n")
    return verdict


def latest() -> dict[str, Verdict]:
    """Returns the last verdict on each mutant."""
    lines = _KEPT.read_text(encoding="utf-8").splitlines() if _KEPT.exists() else []
    verdicts = [Verdict(**json.loads(line)) for line in lines]
    return {verdict.name: verdict for verdict in verdicts}


def report(
    verdicts: Sequence[Verdict], *, wall_s: float, out: Path | None, is_whole: bool, resumed: int
) -> str:
    """Returns the shares by folder; records them. `resumed` of the verdicts are of earlier runs."""
    by_room: dict[str, list[bool]] = {}
    for verdict in verdicts:
        by_room.setdefault(verdict.room, []).append(bool(verdict.noticed_by))
    rows = {room: (sum(found), len(found)) for room, found in sorted(by_room.items())}
    noticed, tried = sum(row[0] for row in rows.values()), sum(row[1] for row in rows.values())
    if out is not None:
        _record(out, rows, verdicts, wall_s=wall_s, config={"whole": is_whole, "resumed": resumed})
    width = max([5, *map(len, rows)])
    table = [
        f"{room:<{width}} {part:4} of {of:4}  {part / of:6.1%}" for room, (part, of) in rows.items()
    ]
    total = f"{'all':<{width}} {noticed:4} of {tried:4}  {noticed / max(1, tried):6.1%}   in {wall_s:.0f} s"
    missed = [
        f"not noticed: {verdict.name} ({verdict.why})"
        for verdict in verdicts
        if not verdict.noticed_by
    ]
    return "\n".join([*missed, *table, total])


def _record(
    out: Path,
    rows: dict[str, tuple[int, int]],
    verdicts: Sequence[Verdict],
    *,
    wall_s: float,
    config: dict[str, bool | int],
) -> None:
    from benchmarks.records import append, environment, make_record

    struck_off = Counter(mutant.room for mutant in all_mutants() if mutant.name in equivalent())
    noticed = {"noticed": sum(row[0] for row in rows.values()), "tried": len(verdicts)}
    append(
        out,
        make_record(
            "mutants",
            environment=environment(),
            config={**config, "lists": str(HERE.relative_to(ROOT))},
            samples={
                "wall_s": wall_s,
                "noticed_by": {verdict.name: verdict.noticed_by for verdict in verdicts},
                "cpu_s": {verdict.name: verdict.cpu_s for verdict in verdicts},
            },
            summary={
                "all": {**noticed, "struck off": sum(struck_off.values())},
                **{
                    room: {"noticed": part, "tried": of, "struck off": struck_off[room]}
                    for room, (part, of) in rows.items()
                },
            },
        ),
    )
