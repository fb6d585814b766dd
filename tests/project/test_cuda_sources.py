"""The CUDA sources compile for every architecture we ship; needs nvcc, but no GPU and no torch
headers.
"""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
HEADERS = sorted((ROOT / "csrc" / "cuda").glob("*.cuh"))
ARCHITECTURES = ("80", "90", "100")
NVCC = shutil.which("nvcc")


# The sources do not ask for the architecture, so one says what the others would, in a third of the
# time.
@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize(
    "architectures",
    [pytest.param(("90",), id="90"), pytest.param(ARCHITECTURES, id="all", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_a_cuda_source_compiles_without_warnings(
    source: Path, architectures: tuple[str, ...], tmp_path: Path
) -> None:
    known = subprocess.run(
        [NVCC, "--list-gpu-arch"], check=True, capture_output=True, text=True
    ).stdout.split()
    flags = [
        f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures if f"compute_{a}" in known
    ]
    assert flags
    target = tmp_path / source.with_suffix(".o").name
    command = [
        NVCC,
        "-std=c++17",
        "-O3",
        "--fmad=false",
        *flags,
        "-c",
        str(source),
        "-o",
        str(target),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert target.stat().st_size > 0


@pytest.mark.skipif(NVCC is None, reason="nvcc is not on PATH")
def test_the_architectures_of_a_wheel_are_those_that_nvcc_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernel.cu").write_text("__global__ void set(float* x) { *x = 1; }\n")
    # The last is for later ones: no machine code.
    flags = """-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90
        -gencode=arch=compute_100,code=compute_100 -shared -Xcompiler -fPIC -o _C.so"""
    command = [NVCC, *flags.split(), "kernel.cu"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.write(tmp_path / "_C.so", "shardgrad/_C.so")
    monkeypatch.syspath_prepend(ROOT / "release")
    found = importlib.import_module("wheels").architectures(tmp_path / "a.whl")
    assert list(found) == ["sm_80", "sm_90"]


@pytest.mark.parametrize("source", [*SOURCES, *HEADERS], ids=lambda path: path.name)
def test_a_cuda_source_never_allocates_synchronizes_picks_a_stream_or_asks_for_the_architecture(
    source: Path,
) -> None:
    text = source.read_text()
    assert "__CUDA_ARCH" not in text
    calls = set(re.findall(r"\bcuda[A-Z]\w+(?=\()", text))
    asks = {
        "cudaGetDevice",
        "cudaDeviceGetAttribute",
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor",
    }
    assert calls <= {"cudaGetLastError", "cudaGetErrorString", *asks}
    assert all(config.endswith(", stream") for config in re.findall(r"<<<(.*?)>>>", text))
