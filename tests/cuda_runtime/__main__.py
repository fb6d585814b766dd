"""Sets up a venv whose CUDA build of torch runs on the host: `python -m tests.cuda_runtime VENV`.

Nothing is done again that is done already: the venv is made anew if what is installed changes, the
libraries if a source of theirs does, our ops if one of `csrc/` does. Torch takes 1.7 GB of disk; no
package of NVIDIA's is needed.

Exit status: 0 if the venv is ready; 3, with a sentence, if something that is needed cannot be had
here.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.cuda_runtime import build
from tests.ops import host_kernels

REPOSITORY = Path(__file__).resolve().parents[2]
TORCH = "2.11.0"
NOT_HERE = 3
# What torch imports, and what tests do.
PACKAGES = [
    "filelock",
    "typing-extensions",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "MarkupSafe",
    "fsspec",
    "numpy",
]
TOOLS = [
    "setuptools>=77,<82",
    "wheel",
    "pytest>=8",
    "pytest-timeout>=2.3",
    "hypothesis>=6.100",
    "click>=8.1",
    "rich>=13",
    "matplotlib>=3.8",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cuda_runtime", description=__doc__.splitlines()[0]
    )
    parser.add_argument("venv", type=Path)
    parser.add_argument("--torch", default=TORCH, help=f"version of torch, by default {TORCH}")
    options = parser.parse_args()
    folder = options.venv.resolve()
    headers = build.cuda_headers()
    if headers is None or shutil.which("g++") is None:
        _leave("the headers of CUDA 13 and g++ are needed to build the runtime, and are not here")
    python = folder / "bin/python"
    _unless_done(
        folder / "hostcuda/torch",
        [options.torch, *PACKAGES, *TOOLS],
        lambda: _install(folder, python, options.torch),
    )
    [site_packages] = folder.glob("lib/python3*/site-packages")
    sources = [*build.CSRC.glob("*"), build.HERE / "build.py"]
    _unless_done(
        folder / "hostcuda/runtime",
        _contents(sources),
        lambda: build.build(site_packages, folder / "hostcuda/stubs", headers),
    )
    (site_packages / "hostcuda.pth").write_text(f"{build.HERE}\nimport startup\n")
    sources = [path for path in (REPOSITORY / "csrc").rglob("*") if path.is_file()]
    sources += [*host_kernels.HERE.glob("*.*"), Path(host_kernels.__file__)]
    ops = _contents([*sources, REPOSITORY / "setup.py"])
    _unless_done(folder / "hostcuda/ops", ops, lambda: _provide_ops(folder, python, ops))


def _unless_done(stamp: Path, made_of: Sequence[str], make: Callable[[], None]) -> None:
    if _is_done(stamp, made_of):
        return
    stamp.unlink(missing_ok=True)
    make()
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(_digest(made_of))


def _is_done(stamp: Path, made_of: Sequence[str]) -> bool:
    return stamp.is_file() and stamp.read_text() == _digest(made_of)


def _digest(made_of: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(made_of).encode()).hexdigest()


def _contents(paths: Iterable[Path]) -> list[str]:
    return [f"{path.name}\n{path.read_text()}" for path in sorted(paths)]


def _install(folder: Path, python: Path, version: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    [site_packages] = folder.glob("lib/python3*/site-packages")
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run([*install, "--no-deps", f"torch=={version}"], check=True)
        subprocess.run([*install, *PACKAGES, *TOOLS], check=True)
    except subprocess.CalledProcessError:
        _leave(f"torch {version} for CUDA, or a package that it needs, could not be installed")
    if not (site_packages / "torch/lib/libtorch_cuda.so").exists():
        _leave(f"pip installs a torch {version} that was not built for CUDA")


def _provide_ops(folder: Path, python: Path, made_of: Sequence[str]) -> None:
    """Takes the ops of a venv beside this one, or builds them: every version of torch has the
    same.
    """
    for other in folder.parent.glob(".venv-cuda*/hostcuda"):
        if _is_done(other / "ops", made_of) and (other / "shardgrad").exists():
            for built in ("shardgrad", "kernels"):
                shutil.copytree(other / built, folder / "hostcuda" / built, dirs_exist_ok=True)
            return
    _build_ops(folder, python)


def _build_ops(folder: Path, python: Path) -> None:
    """Compiles csrc/ with nvcc, and its kernels for the host. Without an nvcc the ops are the
    references.
    """
    if shutil.which("nvcc") is None:
        print("cuda_runtime: there is no nvcc, so the ops on CUDA are the Python references")
        return
    command = [str(python), "setup.py", "-q", "build_ext"]
    command += [
        "--build-temp",
        str(folder / "hostcuda/objects"),
        "--build-lib",
        str(folder / "hostcuda"),
    ]
    environment = {**os.environ, "TORCH_CUDA_ARCH_LIST": "9.0", "SHARDGRAD_CUDA_RUNTIME": "shared"}
    subprocess.run(command, check=True, cwd=REPOSITORY, env=environment)
    sources = host_kernels.copy_sources(folder / "hostcuda/kernels/csrc")
    checked = ["-fsanitize=undefined", "-fno-sanitize-recover=undefined"]
    host_kernels.compile_library(
        folder / "hostcuda/kernels/kernels.so",
        [*sources, host_kernels.HERE / "control.cpp"],
        checked,
        checked,
    )


def _leave(why: str) -> None:
    print(f"cuda_runtime: {why}", file=sys.stderr)
    sys.exit(NOT_HERE)


if __name__ == "__main__":
    main()
