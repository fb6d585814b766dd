"""Writes the tables of `explanation/scaling.md`: the numbers in that page are what the planner says today.

    python docs/scaling.py                 write them; a few minutes
    python docs/scaling.py --check         exit with status 1 if one is out of date
    python docs/scaling.py --table 8b      only one of them

Every number is of a model whose depth follows from two shallow ones (`shardgrad/plan/depth.py`).
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DOCS = Path(__file__).parent
PAGE = DOCS / "explanation" / "scaling.md"
sys.path.insert(0, str(DOCS.parent))
warnings.filterwarnings("ignore")

from shardgrad.plan.depth import Estimate, estimate, shallow  # noqa: E402
from shardgrad.plan.hardware import Machine, machine_of  # noqa: E402
from shardgrad.plan.planning import Calibration  # noqa: E402
from shardgrad.plan.rehearsal import Rehearsal  # noqa: E402
from shardgrad.plan.request import Request  # noqa: E402

GIB = 2**30
DEPTHS = {"8b": 32, "70b": 80}
SIZES = (8, 64, 512, 4096)
LLAMA_2_7B = {"kv_heads": 32, "hidden": 11_008, "vocab_size": 32_000}


@dataclass(frozen=True)
class Case:
    """A step on a machine, and how it is called in the table."""

    name: str
    request: Request
    machine: Machine


@cache
def predicted(name: str, mfu: float | None = None) -> Estimate:
    case = CASES[name]
    return estimate(rehearsals(name), case.machine, Calibration(mfu=mfu), DEPTHS[case.request.preset])


@cache
def rehearsals(name: str) -> list[Rehearsal]:
    print(name, file=sys.stderr)
    return shallow(CASES[name].request, DEPTHS[CASES[name].request.preset])


# -- weak scaling ---------------------------------------------------------------------------------------

GRAPHED = machine_of("h100", is_graphed=True)
SHORT = "8b short"  # a sixteenth of the tokens: nothing to hide behind
BASES = {
    "8b": Request(preset="8b", batch_size=2, seq_len=8192, activation_checkpointing=True),
    "70b": Request(preset="70b", batch_size=1, seq_len=8192, activation_checkpointing=True),
}
# Shards of a replica: as few as hold the model.
INNER = {("8b", "HSDP"): 8, ("8b", "HFSDP"): 8, ("70b", "HSDP"): 64, ("70b", "HFSDP"): 8}


def weak_cases() -> list[Case]:
    cases = []
    for preset, base in BASES.items():
        for ranks in SIZES:
            cases.append(Case(f"{preset} FSDP {ranks}", base.but(ranks=ranks), GRAPHED))
            for layout in ("HSDP", "HFSDP"):
                inner = INNER[preset, layout]
                if ranks > inner:
                    stage = "hfsdp" if layout == "HFSDP" else "3"
                    request = base.but(ranks=ranks, mesh=f"{ranks // inner}x{inner}", stage=stage)
                    cases.append(Case(f"{preset} {layout} {ranks}", request, GRAPHED))
    return cases


def short_cases() -> list[Case]:
    base = BASES["8b"].but(batch_size=1, seq_len=1024)
    return [
        Case(f"{SHORT} FSDP 8", base.but(ranks=8), GRAPHED),
        Case(f"{SHORT} FSDP 512", base.but(ranks=512), GRAPHED),
        Case(f"{SHORT} HSDP 512", base.but(ranks=512, mesh="64x8"), GRAPHED),
        Case(f"{SHORT} FSDP 4096", base.but(ranks=4096), GRAPHED),
        Case(f"{SHORT} HSDP 4096", base.but(ranks=4096, mesh="512x8"), GRAPHED),
        Case(f"{SHORT} HFSDP 4096", base.but(ranks=4096, mesh="512x8", stage="hfsdp"), GRAPHED),
    ]


def weak_table(preset: str) -> list[str]:
    lines = [
        "| GPUs | layout | needs | fits in 80 GiB | step | compute waits | tokens/s a GPU | of the first |",
        "|---:|---|---:|---|---:|---:|---:|---:|",
    ]
    first: float | None = None  # that fits
    for name in (name for name in CASES if re.match(rf"{preset} (FSDP|HSDP|HFSDP) ", name)):
        lines.append(weak_row(name, first))
        if first is None and predicted(name).fits:
            first = predicted(name).tokens_per_s
    return lines


def weak_row(name: str, first: float | None) -> str:
    """One case; `first` is what it is compared with, None if it is that itself, or if nothing fits yet."""
    guess, request = predicted(name), CASES[name].request
    layout = name.split()[-2]
    if request.replicas > 1:
        layout += f", {request.replicas} x {request.shards}"
    share = f"{guess.tokens_per_s / first:.1%}" if first else ""
    return (
        f"| {request.ranks:,} | {layout} | {guess.needed_nbytes / GIB:.1f} GiB "
        f"| {'yes' if guess.fits else 'no'} | {guess.step_s * 1e3:,.0f} ms | {guess.exposed_s * 1e3:,.0f} ms "
        f"| {guess.tokens_per_s:,.0f} | {share} |"
    )


# -- beside what others published -----------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """Tokens per second and GPU that others measured; rows of one `series` differ in the number of GPUs."""

    case: str
    series: str
    tokens_per_s: float
    what: str


def _eager(device: str, network: str, cards: int | None = None) -> Machine:
    return machine_of(device, network=network, cards_per_node=cards)


TITAN = Request(preset="8b", batch_size=2, seq_len=8192, activation_checkpointing=True)
OLDER = Request(preset="8b", batch_size=1, seq_len=8192, activation_checkpointing=True)
FMS = Request(preset="8b", override=LLAMA_2_7B, batch_size=2, seq_len=4096, reduce_dtype="bf16")
PUBLISHED_CASES = [
    Case("titan 8", TITAN.but(ranks=8), _eager("h100", "ib400")),
    Case("titan 128", TITAN.but(ranks=128), _eager("h100", "ib400")),
    Case("older 64", OLDER.but(ranks=64), _eager("a100", "ib200")),
    Case("fms a100", FMS.but(ranks=128, mesh="16x8"), _eager("a100", "ib200", 2)),
    Case("fms h100", FMS.but(ranks=96, mesh="12x8"), _eager("h100", "ib400")),
]
PUBLISHED = [
    Published("titan 8", "eager", 5762, "torchtitan, Llama 3.1 8B, 8 x H100, eager"),
    Published("titan 128", "eager", 5605, "the same, 128 x H100"),
    Published("titan 8", "compiled", 6667, "torchtitan, Llama 3.1 8B, 8 x H100, compiled"),
    Published("titan 128", "compiled", 6514, "the same, 128 x H100"),
    Published("older 64", "", 2904, "torchtitan (older), Llama 3 8B, 64 x A100"),
    Published("fms a100", "", 3700, "fms-fsdp, Llama 2 7B, HSDP, 128 x A100"),
    Published("fms h100", "", 7500, "fms-fsdp, Llama 2 7B, HSDP, 96 x H100"),
]


def published_table() -> list[str]:
    lines = [
        "| what | published, tokens/s a GPU | predicted, datasheet | ratio | predicted, row above |",
        "|---|---:|---:|---:|---:|",
    ]
    previous: Published | None = None
    for row in PUBLISHED:
        guess = predicted(row.case)
        scaled = ""
        if previous is not None and row.series and previous.series == row.series:
            mfu = fitted_mfu(previous)
            from_above = predicted(row.case, mfu).tokens_per_s
            scaled = f"{from_above:,.0f} ({from_above / row.tokens_per_s - 1:+.1%})"
        ratio = guess.tokens_per_s / row.tokens_per_s
        lines.append(
            f"| {row.what} | {row.tokens_per_s:,.0f} | {guess.tokens_per_s:,.0f} | {ratio:.2f} | {scaled} |"
        )
        previous = row
    return lines


@cache
def fitted_mfu(row: Published) -> float:
    """The compute's MFU with which the plan says what was published."""
    mfu = predicted(row.case).mfu
    for _ in range(4):  # the step is nearly all compute, so this converges at once
        mfu *= row.tokens_per_s / predicted(row.case, round(mfu, 6)).tokens_per_s
        mfu = round(mfu, 6)
    return mfu


CASES = {case.name: case for case in (*weak_cases(), *short_cases(), *PUBLISHED_CASES)}
TABLES: dict[str, Callable[[], list[str]]] = {
    "8b": lambda: weak_table("8b"),
    "short": lambda: weak_table(SHORT),
    "70b": lambda: weak_table("70b"),
    "published": published_table,
}


def write(text: str, name: str, lines: list[str]) -> str:
    """Puts a table between its two comments."""
    begin, end = f"<!-- table {name}: python docs/scaling.py -->", f"<!-- end of table {name} -->"
    before, found, rest = text.partition(begin)
    if not found or end not in rest:
        raise SystemExit(f"{PAGE} has no place for table {name}")
    return before + begin + "\n" + "\n".join(lines) + "\n" + end + rest.partition(end)[2]


def main(arguments: list[str]) -> int:
    wanted = [arguments[arguments.index("--table") + 1]] if "--table" in arguments else list(TABLES)
    text = old = PAGE.read_text(encoding="utf-8")
    for name in wanted:
        text = write(text, name, TABLES[name]())
        if "--check" not in arguments:
            PAGE.write_text(text, encoding="utf-8")
    if "--check" in arguments and text != old:
        print(f"out of date: {PAGE.name}; run: python docs/scaling.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
