"""Writes the tables of `explanation/scaling.md`: the numbers in that page are what the planner says
today.

    python docs/scaling.py                 write them; ten minutes
    python docs/scaling.py --check         exit with status 1 if one is out of date
    python docs/scaling.py --table 8b      only one of them
    python docs/scaling.py --slowdowns     what published runs took, over the roofline
"""

from __future__ import annotations

import re
import statistics
import sys
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "explanation" / "scaling.md"
sys.path.insert(0, str(DOCS.parent))
warnings.filterwarnings("ignore")

from shardgrad.optim.ownership import Matrix, buckets, owners  # noqa: E402
from shardgrad.programs.plan.hardware import MATMUL_SHARE, Machine  # noqa: E402
from shardgrad.programs.plan.planning import Plan, plan_of  # noqa: E402
from shardgrad.programs.plan.rehearsal import Rehearsal, rehearse  # noqa: E402
from shardgrad.programs.plan.request import Request  # noqa: E402
from shardgrad.programs.train.presets import PRESETS, TransformerConfig  # noqa: E402

GIB = 2**30
SIZES = (8, 64, 4096)


@dataclass(frozen=True)
class Case:
    """A step on a machine, and how it is called in the table."""

    name: str
    request: Request
    machine: Machine


@cache
def predicted(name: str, scale: float | None = None) -> Plan:
    return plan_of(rehearsal(name), CASES[name].machine, compute_scale=scale)


@cache
def rehearsal(name: str) -> Rehearsal:
    print(name, file=sys.stderr)
    return rehearse(CASES[name].request)


# -- weak scaling

GRAPHED = Machine(graph=True)
SHORT = "8b short"  # a sixteenth of the tokens: nothing to hide behind
LONG = Request(preset="8b", batch_size=2, seq_len=8192, activation_checkpointing="full")


def weak_cases() -> list[Case]:
    cases = []
    for ranks in SIZES:
        cases.append(Case(f"8b FSDP {ranks}", replace(LONG, ranks=ranks), GRAPHED))
        if ranks > 8:
            replicas = replace(LONG, ranks=ranks, mesh=f"{ranks // 8}x8")
            cases.append(Case(f"8b HSDP {ranks}", replicas, GRAPHED))
            cases.append(Case(f"8b HFSDP {ranks}", replace(replicas, stage="hfsdp"), GRAPHED))
    return cases


def short_cases() -> list[Case]:
    base = replace(LONG, batch_size=1, seq_len=1024)
    return [
        Case(f"{SHORT} FSDP 8", replace(base, ranks=8), GRAPHED),
        Case(f"{SHORT} FSDP 512", replace(base, ranks=512), GRAPHED),
        Case(f"{SHORT} HSDP 512", replace(base, ranks=512, mesh="64x8"), GRAPHED),
        Case(f"{SHORT} FSDP 4096", replace(base, ranks=4096), GRAPHED),
        Case(f"{SHORT} HSDP 4096", replace(base, ranks=4096, mesh="512x8"), GRAPHED),
        Case(
            f"{SHORT} HFSDP 4096", replace(base, ranks=4096, mesh="512x8", stage="hfsdp"), GRAPHED
        ),
    ]


def weak_table(preset: str) -> list[str]:
    lines = [
        "| GPUs | layout | needs | fits in 80 GiB | step | exposed | tokens/s per GPU | of the "
        "first |",
        "|---:|---|---:|---|---:|---:|---:|---:|",
    ]
    first: float | None = None  # that fits
    for name in (name for name in CASES if re.match(rf"{preset} (FSDP|HSDP|HFSDP) ", name)):
        lines.append(weak_row(name, first))
        if first is None and predicted(name).fits:
            first = predicted(name).tokens_per_s
    return lines


def weak_row(name: str, first: float | None) -> str:
    """One case; `first` is what it is compared with, None if it is that itself, or if nothing fits
    yet.
    """
    guess, request = predicted(name), CASES[name].request
    layout = name.split()[-2]
    if request.replicas > 1:
        layout += f", {request.replicas} x {request.shards}"
    share = f"{guess.tokens_per_s / first:.1%}" if first else ""
    return (
        f"| {request.ranks:,} | {layout} | {guess.needed_nbytes / GIB:.1f} GiB "
        f"| {'yes' if guess.fits else 'no'} | {guess.timeline.step_s * 1e3:,.0f} ms | "
        f"{guess.timeline.exposed_s * 1e3:,.0f} ms "
        f"| {guess.tokens_per_s:,.0f} | {share} |"
    )


# -- a step of Muon

NS_STEPS, IN_NODE = 5, 8


def muon_table() -> list[str]:
    """The matrices of Llama 3 8B's blocks, over one shard group."""
    lines = [
        "| GPUs | buckets | Newton-Schulz, evenly divided | exchanges alone | Muon's step "
        "| if nothing had to be sent |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for ranks in (8, 16, 32, 64):
        matrices = [m for shape in _block_8b() for m in Matrix.all_of(shape, 1, ranks)]
        layers = PRESETS["8b"].layers
        found = []
        for indices, chosen in buckets([matrices] * layers, ranks):
            together = matrices * len(indices)
            works_s = [_newton_schulz_s(load) for load in _loads(together, chosen, ranks)]
            found.append((works_s, _exchange_s(together, ranks)))
        _, whole = owners(matrices * layers, [0] * ranks)
        times_s = (
            _newton_schulz_s(sum(whole)) / ranks,
            sum(2 * exchange_s for _, exchange_s in found),
            _in_turn_s(found),
            _newton_schulz_s(max(whole)),
        )
        lines.append(
            f"| {ranks} | {len(found)} | "
            + " | ".join(f"{time_s * 1e3:.1f} ms" for time_s in times_s)
            + " |"
        )
    return lines


def _block_8b() -> list[tuple[int, int]]:
    preset = PRESETS["8b"]
    kv = preset.kv_heads * preset.head_width
    attention = [(preset.width, preset.width)] * 2 + [(kv, preset.width)] * 2
    feed_forward = [(preset.hidden, preset.width)] * 2 + [(preset.width, preset.hidden)]
    return attention + feed_forward


def _loads(matrices: list[Matrix], chosen: list[int], ranks: int) -> list[int]:
    loads = [0] * ranks
    for matrix, rank in zip(matrices, chosen, strict=True):
        loads[rank] += matrix.work
    return loads


def _newton_schulz_s(work: int) -> float:
    return 2 * NS_STEPS * work / (MATMUL_SHARE * GRAPHED.gpu.flops["bf16"])


def _exchange_s(matrices: list[Matrix], ranks: int) -> float:
    """One way, in bfloat16: what a rank sends to others, in its node and to other nodes."""
    sent = 2 * sum(prod(matrix.shape) for matrix in matrices) / ranks**2  # to each rank
    return max(
        sent * (IN_NODE - 1) / GRAPHED.gpu.link.bandwidth,
        sent * (ranks - IN_NODE) / GRAPHED.card.bandwidth,
    )


def _in_turn_s(found: list[tuple[list[float], float]]) -> float:
    """When a step ends, in the order of `in_turn` in `muon_bucket.py`."""
    clocks_s, link_s, returned_s = [0.0] * len(found[0][0]), 0.0, 0.0

    def exchanged(number: int) -> float:
        """When an exchange ends that ranks begin now, after those before it."""
        return max(link_s, *clocks_s) + found[number][1]

    link_s = sent_s = exchanged(0)
    for number, (works_s, _) in enumerate(found):
        arrived_s = sent_s
        if number + 1 < len(found):
            link_s = sent_s = exchanged(number + 1)
        clocks_s = [
            max(clock, arrived_s) + work for clock, work in zip(clocks_s, works_s, strict=True)
        ]
        link_s = exchanged(number)
        clocks_s = [max(clock, returned_s) for clock in clocks_s]
        returned_s = link_s
    return link_s


# -- beside what others published


@dataclass(frozen=True)
class Published:
    """Tokens per second and GPU that others measured.

    `after` is another row, which differs in the number of GPUs only. `memory_gib` is of one GPU.
    """

    name: str
    request: Request
    machine: Machine
    tokens_per_s: float
    after: str | None = None
    memory_gib: float | None = None


def _mpt(width: int, layers: int, heads: int) -> TransformerConfig:
    """MPT's widths; a gated feed-forward with as many weights as its plain one."""
    hidden = 8 * width // 3 // 32 * 32
    return replace(
        PRESETS["8b"],
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        hidden=hidden,
        vocab_size=50_368,
    )


H100, A100 = Machine(), Machine("a100", network="ib200")
TITAN = Request(preset="8b", batch_size=2, seq_len=8192, activation_checkpointing="selective")
OLDER = Request(
    preset="8b", ranks=64, batch_size=1, seq_len=8192, activation_checkpointing="selective"
)
OLDER_70B = replace(OLDER, preset="70b", activation_checkpointing="full")
LLAMA_2 = {
    "7b": {"kv_heads": 32, "hidden": 11_008},
    "13b": {"width": 5120, "layers": 40, "heads": 40, "kv_heads": 40, "hidden": 13_824},
    "34b": {"width": 8192, "layers": 48, "heads": 64, "hidden": 22_016},
    "70b": {"width": 8192, "layers": 80, "heads": 64, "hidden": 28_672},
}
MPT = {
    "1b": _mpt(2048, 24, 16),
    "3b": _mpt(2560, 32, 20),
    "7b": _mpt(4096, 32, 32),
    "13b": _mpt(5120, 40, 40),
    "30b": _mpt(7168, 48, 64),
    "70b": _mpt(8192, 80, 64),
}
ADDED = {
    **{
        f"llama2 {size}": replace(PRESETS["8b"], vocab_size=32_000, **sizes)
        for size, sizes in LLAMA_2.items()
    },
    **{f"mpt {size}": config for size, config in MPT.items()},
}
PRESETS.update(ADDED)


def _fms(size: str, batch_size: int, *, recompute: str = "none", **changes: Any) -> Request:
    return Request(
        preset=f"llama2 {size}",
        batch_size=batch_size,
        seq_len=4096,
        activation_checkpointing=recompute,
        **{"ranks": 128, **changes},
    )


def _older(size: str, recompute: str) -> Request:
    return _fms(size, 2, recompute=recompute, ranks=64)


def _foundry(
    size: str,
    ranks: int,
    seq_len: int,
    batch_size: int,
    accumulate: int = 1,
    recompute: str = "none",
) -> Request:
    return Request(
        preset=f"mpt {size}",
        ranks=ranks,
        seq_len=seq_len,
        batch_size=batch_size,
        accumulate=min(accumulate, 3),  # more change nothing per token
        activation_checkpointing=recompute,
    )


PUBLISHED = [
    Published("torchtitan (eager), Llama 3.1 8B, 8 x H100", TITAN, H100, 5762, None, 82.4),
    Published(
        "torchtitan (eager), Llama 3.1 8B, 128 x H100",
        replace(TITAN, ranks=128),
        H100,
        5605,
        "torchtitan (eager), Llama 3.1 8B, 8 x H100",
        67.0,
    ),
    Published(
        "torchtitan (compiled), Llama 3.1 8B, 8 x H100",
        TITAN,
        H100,
        6667,
        None,
        77.0,
    ),
    Published(
        "torchtitan (compiled), Llama 3.1 8B, 128 x H100",
        replace(TITAN, ranks=128),
        H100,
        6514,
        "torchtitan (compiled), Llama 3.1 8B, 8 x H100",
        62.0,
    ),
    Published("torchtitan (older), Llama 3 8B, 64 x A100", OLDER, A100, 2973),
    Published("torchtitan (older), Llama 3 70B, 64 x A100", OLDER_70B, A100, 331),
    Published("torchtitan (older), Llama 2 13B, 64 x A100", _older("13b", "none"), A100, 2162),
    Published("torchtitan (older), Llama 2 13B, selective", _older("13b", "selective"), A100, 1904),
    Published("torchtitan (older), Llama 2 70B, 64 x A100", _older("70b", "full"), A100, 353),
    Published("fms-fsdp, Llama 2 7B, HSDP, 128 x A100", _fms("7b", 2, mesh="16x8"), A100, 3760),
    Published(
        "fms-fsdp, Llama 2 7B, HSDP, 96 x H100", _fms("7b", 2, ranks=96, mesh="12x8"), H100, 7500
    ),
    Published("fms-fsdp, Llama 2 13B, HSDP, 128 x A100", _fms("13b", 1, mesh="16x8"), A100, 1700),
    Published("fms-fsdp, 34B, 128 x A100", _fms("34b", 8, recompute="full"), A100, 772),
    Published("fms-fsdp, Llama 2 70B, 128 x A100", _fms("70b", 6, recompute="full"), A100, 380),
    Published("llm-foundry, MPT 1B, 8 x H100", _foundry("1b", 8, 2048, 14), H100, 45_455),
    Published("llm-foundry, MPT 1B, 64 x H100", _foundry("1b", 64, 2048, 20), H100, 44_402),
    Published("llm-foundry, MPT 3B, 16 x H100", _foundry("3b", 16, 2048, 10, 3), H100, 24_142),
    Published("llm-foundry, MPT 7B, 8 x H100", _foundry("7b", 8, 2048, 6), H100, 10_643),
    Published(
        "llm-foundry, MPT 7B, 8 x H100, 8,192", _foundry("7b", 8, 8192, 8, 2, "full"), H100, 6935
    ),
    Published("llm-foundry, MPT 13B, 8 x H100", _foundry("13b", 8, 2048, 2), H100, 4792),
    Published(
        "llm-foundry, MPT 13B, 64 x H100",
        _foundry("13b", 64, 2048, 2),
        H100,
        4800,
        "llm-foundry, MPT 13B, 8 x H100",
    ),
    Published(
        "llm-foundry, MPT 30B, 16 x H100", _foundry("30b", 16, 2048, 10, 3, "full"), H100, 2263
    ),
    Published(
        "llm-foundry, MPT 70B, 64 x H100", _foundry("70b", 64, 2048, 8, 4, "full"), H100, 1039
    ),
    Published("llm-foundry, MPT 1B, 8 x A100", _foundry("1b", 8, 2048, 14, 4), A100, 20_513),
    Published("llm-foundry, MPT 3B, 8 x A100", _foundry("3b", 8, 2048, 10, 2), A100, 10_811),
    Published("llm-foundry, MPT 7B, 8 x A100", _foundry("7b", 8, 2048, 6, 2), A100, 4641),
    Published(
        "llm-foundry, MPT 13B, 8 x A100", _foundry("13b", 8, 4096, 10, 3, "full"), A100, 2060
    ),
    Published("llm-foundry, MPT 30B, 8 x A100", _foundry("30b", 8, 2048, 3, 21, "full"), A100, 916),
]


def published_table() -> list[str]:
    lines = [
        "| runs | GPU | how many | in the range | likely / published: least, median, most |",
        "|---|---|---:|---:|---:|",
    ]
    ratios = {row.name: predicted(row.name).tokens_per_s / row.tokens_per_s for row in PUBLISHED}
    inside = [row for row in PUBLISHED if _is_inside(row)]
    kinds = dict.fromkeys((_source(row), row.machine.device) for row in PUBLISHED)
    for source, device in kinds:
        rows = [row for row in PUBLISHED if (_source(row), row.machine.device) == (source, device)]
        of_kind = [ratios[row.name] for row in rows]
        lines.append(
            f"| {source} | {device.upper()} | {len(rows)} | {sum(row in inside for row in rows)} "
            f"| {min(of_kind):.2f}, {statistics.median(of_kind):.2f}, {max(of_kind):.2f} |"
        )
    by_name = {row.name: row for row in PUBLISHED}
    unseen = [
        predicted(row.name, _median_of_others(row)).tokens_per_s / row.tokens_per_s - 1
        for row in PUBLISHED
    ]
    scaled = [
        predicted(row.name, fitted(by_name[row.after])).tokens_per_s / row.tokens_per_s - 1
        for row in PUBLISHED
        if row.after is not None
    ]
    memory = [
        predicted(row.name).rehearsal.memory.reserved_nbytes / GIB / row.memory_gib
        for row in PUBLISHED
        if row.memory_gib is not None
    ]
    said = (
        f"Of {len(ratios)} runs {len(inside)} are inside the range. The median error of what is "
        f"likely is {statistics.median(abs(ratio - 1) for ratio in ratios.values()):.0%}; with the "
        "median of the other sources' runs in its place, so that no run predicts itself, "
        f"{statistics.median(map(abs, unseen)):.0%}, and the worst {max(unseen, key=abs):+.0%}. "
        f"With the compute of the same run on fewer GPUs, the worst error of {len(scaled)} is "
        f"{max(map(abs, scaled)):.1%}. Memory, of the {len(memory)} runs that say it, is "
        f"{min(memory):.2f} to {max(memory):.2f} of theirs."
    )
    return [*lines, "", *textwrap.wrap(said, 100, break_on_hyphens=False)]


def _is_inside(row: Published) -> bool:
    least, most = predicted(row.name).tokens_per_s_range
    return least <= row.tokens_per_s <= most


def _source(row: Published) -> str:
    return row.name.partition(",")[0]


def _median_of_others(row: Published) -> float:
    """The likely compute, as runs of the same GPU from other sources have it."""
    source = _source(row).split()[0]
    others = [
        each
        for each in PUBLISHED
        if each.machine.device == row.machine.device and not each.name.startswith(source)
    ]
    return statistics.median(map(fitted, others))


def show_slowdowns() -> None:
    """Prints, for each run, the factor on the roofline's compute with which the plan says what was
    published.

    The least, the median and the largest of each kind of GPU are `Device.slowdowns`.
    """
    by_device: dict[str, list[float]] = {}
    for row in PUBLISHED:
        scale = fitted(row)
        by_device.setdefault(row.machine.device, []).append(scale)
        print(f"{scale:.3f}  {row.machine.device}  {row.name}", flush=True)
    for name, scales in by_device.items():
        print(f"{name}: {min(scales):.3f}, {statistics.median(scales):.3f}, {max(scales):.3f}")


def fitted(row: Published) -> float:
    """The factor on the roofline with which the plan says what was published."""
    return _fitted(row.name)


@cache
def _fitted(name: str) -> float:
    row = next(row for row in PUBLISHED if row.name == name)
    wanted_s = row.request.tokens / row.tokens_per_s
    scale = 1.0
    for _ in range(8):  # the step is nearly all compute, so this converges at once
        scale *= wanted_s / predicted(row.name, round(scale, 4)).timeline.step_s
    return round(scale, 4)


PUBLISHED_CASES = [Case(row.name, row.request, row.machine) for row in PUBLISHED]
CASES = {case.name: case for case in (*weak_cases(), *short_cases(), *PUBLISHED_CASES)}
TABLES: dict[str, Callable[[], list[str]]] = {
    "8b": lambda: weak_table("8b"),
    "short": lambda: weak_table(SHORT),
    "muon": muon_table,
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
    if "--slowdowns" in arguments:
        show_slowdowns()
        return 0
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
