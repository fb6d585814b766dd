"""Every benchmark runs, and leaves the record that benchmarks/README.md promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 100  # several times what a smoke run takes: others may be using the machine


def smoke(benchmark: str, out: Path, *options: str) -> dict[str, Any]:
    """Runs a benchmark and returns its one record."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--smoke", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = (out / f"{benchmark}.jsonl").read_text(encoding="utf-8").splitlines()
    record: dict[str, Any] = json.loads(line)
    assert set(record) == {"benchmark", "environment", "config", "samples", "summary"}
    assert record["benchmark"] == benchmark
    assert record["config"]["smoke"] is True
    assert {"git", "torch", "python", "cpu", "cores", "ops_backend"} <= set(record["environment"])
    return record


def assert_spread(spread: dict[str, Any]) -> None:
    low, high = spread["quartiles"]
    assert low <= spread["median"] <= high


def test_host_overhead(tmp_path: Path) -> None:
    record = smoke("host_overhead", tmp_path)
    for by_engine in record["summary"].values():
        for count in map(str, record["config"]["units"]):
            for name in ("fsdp2", "shardgrad", "ratio_to_fsdp2"):
                assert_spread(by_engine[name][count])
        assert set(by_engine["growth_exponent"]) == {"fsdp2", "shardgrad"}


def test_collectives(tmp_path: Path) -> None:
    record = smoke("collectives", tmp_path)
    for operation in ("all_gather", "reduce_scatter"):
        assert list(record["summary"][operation]) == [
            str(nbytes) for nbytes in record["config"]["shard_nbytes"]
        ]
        for by_transport in record["summary"][operation].values():
            for field in ("wall_s", "cpu_s", "loopback_nbytes"):
                assert_spread(by_transport["gloo"][field])
                assert_spread(by_transport["exchange"][field])
            assert_spread(by_transport["exchange"]["wall_ratio_to_gloo"])


def test_direct(tmp_path: Path) -> None:
    record = smoke("direct", tmp_path)
    assert list(record["summary"]) == [str(nbytes) for nbytes in record["config"]["piece_nbytes"]]
    for by_way in record["summary"].values():
        for of in ("packed", "direct", "ratio"):
            assert_spread(by_way[of])


def test_kernels(tmp_path: Path) -> None:
    record = smoke("kernels", tmp_path)
    names = {"copy", "reference"}
    if record["environment"]["ops_backend"] == "compiled":
        names.add("compiled")
    assert {case.split()[0] for case in record["summary"]} == {"pack", "unpack", "sum"}
    for by_name in record["summary"].values():
        assert set(by_name) == names
        for of in by_name.values():
            assert_spread(of["gb_per_s"])
            assert_spread(of["ratio_to_copy"])


def test_construction(tmp_path: Path) -> None:
    record = smoke("construction", tmp_path)
    for name in ("fsdp2", "shardgrad"):
        assert len(record["samples"][name]) == record["config"]["rounds"]
        assert_spread(record["summary"][name]["wall_s"])
    assert_spread(record["summary"]["shardgrad"]["ratio_to_fsdp2"])


def test_smoke_runs_write_nothing_unasked(tmp_path: Path) -> None:
    from benchmarks.construction import main

    context = main.make_context("construction", ["--smoke"])
    assert context.params["out"] is None
    context = main.make_context("construction", [])
    assert context.params["out"] == ROOT / "benchmarks" / "results"


def test_optimizer(tmp_path: Path) -> None:
    bases = {"one_unit": "fsdp2", "many_units": "fsdp2", "large": "flat", "clip": "fsdp2"}
    for case, base in bases.items():
        record = smoke("optimizer", tmp_path / case, "--case", case)
        assert record["config"]["case"] == case
        of = record["summary"]["shardgrad"]
        for field in ("wall_s", f"ratio_to_{base}", "bytes_per_s"):
            assert_spread(of[field])


def test_loss_curves(tmp_path: Path) -> None:
    record = smoke("loss_curves", tmp_path)
    of = record["summary"]
    assert of["shardgrad, torch.optim"]["largest_relative_difference"] == 0
    assert of["shardgrad, shardgrad.optim"]["largest_relative_difference"] < 1e-5


def run_script(python: Path, out: Path) -> tuple[int, dict[str, str]]:
    """Runs the script for GPUs; returns its status, and how each part went."""
    done = subprocess.run(
        ["bash", "benchmarks/gpu.sh", "--smoke", "--out", str(out)],
        cwd=ROOT,
        env=os.environ | {"PYTHON": str(python)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    summary = (out / "summary.txt").read_text(encoding="utf-8")
    parts = [line.split("  ", 1) for line in summary.splitlines()[-5:]]
    return done.returncode, {name.strip(): rest.strip().rpartition("  ")[0].strip() for name, rest in parts}


def test_the_script_for_gpus_goes_on_after_a_part_that_failed_and_repeats_only_that(tmp_path: Path) -> None:
    python, out = tmp_path / "python", tmp_path / "out"
    fails = 'case "$*" in *is_available*) echo cpu 0 cpu;; *"-m pytest "*) exit 1;; esac\n'
    python.write_text(f"#!/bin/sh\n{fails}")
    python.chmod(0o755)
    rest = ("bench-tiny", "kernels", "optimizer", "replay")
    assert run_script(python, out) == (1, {"tests": "failed", **dict.fromkeys(rest, "ok")})
    python.write_text(f"#!/bin/sh\n{fails.replace('exit 1', 'exit 0')}")
    assert run_script(python, out) == (0, {"tests": "ok", **dict.fromkeys(rest, "done before")})


def test_plan(tmp_path: Path) -> None:
    smoke("plan", tmp_path)


def test_every_program_that_measures_is_run_here() -> None:
    programs = {
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if "@common_options" in path.read_text(encoding="utf-8")
    }
    here = Path(__file__).read_text(encoding="utf-8")
    assert {name for name in programs if f'smoke("{name}"' not in here} == set()


def test_replay(tmp_path: Path) -> None:
    record = smoke("replay", tmp_path)
    assert set(record["summary"]) == {"function", "graphed"}
    for of in record["summary"].values():
        assert_spread(of["host_s"])
        assert_spread(of["ratio_to_function"])
    assert_spread(record["summary"]["graphed"]["overhead_s"])


def test_the_table_of_the_readme_is_made_of_records_that_count(tmp_path: Path) -> None:
    from benchmarks.readme_table import BEGIN, END, lines, newest, replaced, results
    from tests.project.test_report import make_record

    def with_time(time: str, **environment: Any) -> dict[str, Any]:
        record = make_record(spans=1)
        return record | {
            "environment": record["environment"] | {"time": time, "ops_backend": "compiled"} | environment
        }

    noisy = with_time("5")
    noisy["noise"] = noisy["noise"] | {"is_quiet": False}
    changed = with_time("6", git_is_clean=False)
    folder = tmp_path / "benchmarks" / "results"
    (folder / "a").mkdir(parents=True)
    records = [with_time("2", cores=4), with_time("3"), with_time("1"), noisy, changed]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "a" / "bench.jsonl").write_text(text, encoding="utf-8")
    found = newest(results(folder))
    assert [record["environment"]["time"] for _, record in found] == ["3", "2"]
    table = "\n".join(lines(found))
    # The actors' times are 10, 20 and 80 ms; memory is everybody's alike.
    assert (
        "| tiny, fp32, 2 ranks, 8 x 128 tokens each | 2 cores, a processor | 11.95 | 2.00 (2.00 .. 2.00) |"
        in table
    )
    assert "| 0.25 | 1.00 | [record](benchmarks/results/a/bench.jsonl) |" in table
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    fresh = replaced(page, table)
    assert fresh == f"before\n{BEGIN}\n{table}\n{END}\nafter\n"
    assert replaced(fresh, table) == fresh
    with pytest.raises(ValueError, match="lacks the marks"):
        replaced("no marks", table)


def test_the_table_of_the_readme_is_up_to_date() -> None:
    from benchmarks.readme_table import BEGIN, README, RESULTS, lines, newest, replaced, results

    text = README.read_text(encoding="utf-8")
    if BEGIN not in text:
        pytest.skip("the README has no table of records")
    assert replaced(text, "\n".join(lines(newest(results(RESULTS))))) == text


def test_checkpoints(tmp_path: Path) -> None:
    record = smoke("checkpoints", tmp_path)
    for name in ("save", "save_async", "load", "load unverified"):
        assert len(record["samples"][name]) == record["config"]["rounds"]
        assert_spread(record["summary"][name]["ratio_to_raw"])


def test_the_long_fuzzer_counts_what_came_of_every_input(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.long", "--inputs", "100", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "fuzz.jsonl").read_text(encoding="utf-8"))
    assert sum(sum(found.values()) for found in record["summary"].values()) >= 100


def test_soak(tmp_path: Path) -> None:
    record = smoke("soak", tmp_path, "--mode", "eager")
    (of,) = record["summary"].values()
    assert {"resident_nbytes", "tensors", "objects", "descriptors", "threads", "is_flat"} <= set(of)
    assert of["descriptors"] == of["threads"] == of["tensors"] == 0


def test_journal(tmp_path: Path) -> None:
    summary = smoke("journal", tmp_path)["summary"]
    assert_spread(summary["step_cpu_s"])
    for mode in ("journal", "default"):
        assert_spread(summary["ratio_to_without"][mode])
    assert 0 < summary["parts_of_step"] < 0.1
