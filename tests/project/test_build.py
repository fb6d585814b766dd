"""Building the compiled ops, and what importing does when they are not there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTRUCTION = (
    "pip install --no-build-isolation --no-deps --force-reinstall --no-binary shardgrad shardgrad"
)
USE_OPS = """
import torch
from shardgrad import ops

out = torch.zeros(3)
ops.sum_chunks([torch.ones(3), torch.ones(3)], out, divisor=4.0)
print(ops.backend(), out.tolist())
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environment, check=False, capture_output=True, text=True
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The parts of the package that ops need, in a path with a space, and no compiled library."""
    package = tmp_path / "a place" / "shardgrad"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copytree(ROOT / "shardgrad" / "ops", package / "ops")
    shutil.copy(ROOT / "shardgrad" / "errors.py", package)
    return package


def use(package: Path, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-c", USE_OPS, cwd=cwd, PYTHONPATH=str(package.parent))


def assert_warned_once(done: subprocess.CompletedProcess[str], because: str) -> None:
    assert done.stdout == "reference [0.5, 0.5, 0.5]\n", done.stderr
    assert done.stderr.count("RuntimeWarning") == done.stderr.count(INSTRUCTION) == 1
    assert because in done.stderr
    assert "Python reference ops are used" in done.stderr


def test_a_corrupt_library_is_reported_once_and_the_reference_answers(
    package: Path, tmp_path: Path
) -> None:
    (package / "_C.so").write_bytes(b"not a library")
    assert_warned_once(use(package, cwd=tmp_path), "_C.so could not be loaded by torch")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_library_for_another_torch_is_reported_once_and_the_reference_answers(
    package: Path, tmp_path: Path
) -> None:
    source = tmp_path / "other.c"
    source.write_text(
        "extern int torch_of_another_time(void); int (*needed)(void) = torch_of_another_time;"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", package / "_C.so", source], check=True)
    assert_warned_once(use(package, cwd=tmp_path), "undefined symbol: torch_of_another_time")


def test_without_the_library_import_warns_once_and_loads_none_of_the_working_directory(
    package: Path, tmp_path: Path
) -> None:
    for decoy in (tmp_path / "_C.so", tmp_path / "shardgrad" / "_C.so"):
        decoy.parent.mkdir(exist_ok=True)
        decoy.write_bytes(b"not a library")
    done = run(
        sys.executable,
        "-P",
        "-c",
        USE_OPS,
        cwd=tmp_path,
        PYTHONPATH=str(package.parent),
        LD_LIBRARY_PATH=str(tmp_path),
    )
    assert_warned_once(done, f"there is no compiled library {package / '_C.so'}")


@pytest.fixture
def sources(package: Path) -> Path:
    """A source tree in a path with a space."""
    root = package.parent
    shutil.copytree(ROOT / "csrc", root / "csrc")
    for name in ("setup.py", "pyproject.toml", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, root)
    (root / "README.md").write_text("[a](docs/README.md), [b](#b), [c](https://example.org/c)\n")
    (root / "tests").mkdir()
    (root / "tests" / "test_of_a_tree.py").touch()
    return root


def wheel_without_compiler(root: Path, **environment: str) -> Path:
    command = (sys.executable, "setup.py", "--quiet", "sdist", "bdist_wheel")
    done = run(*command, cwd=root, CC="no-such-compiler", CXX="no-such-compiler", **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the compiled ops were not built") == 1
    (wheel,) = root.glob("dist/*.whl")
    return wheel


def metadata_of(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return archive.read(name).decode()


def test_without_a_compiler_the_wheel_is_for_every_platform_and_says_what_it_is(
    sources: Path,
) -> None:
    (sources / "shardgrad" / "_commit.txt").write_text("0123456789ab\n")
    wheel = wheel_without_compiler(sources, SHARDGRAD_SOURCE_URL="https://example.org/shardgrad/")
    assert wheel.name.endswith("+g0123456789ab-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not any(name.endswith(".so") for name in archive.namelist())
        assert archive.read("shardgrad/_commit.txt") == b"0123456789ab\n"
    with tarfile.open(next(sources.glob("dist/*.tar.gz"))) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert "csrc/element.h" in names
    assert not any("test_of_a_tree" in name for name in names)  # it would need the others
    source = "https://example.org/shardgrad"
    metadata = metadata_of(wheel)
    assert f"Project-URL: Source, {source}\n" in metadata
    assert (
        f"[a]({source}/blob/main/docs/README.md), [b](#b), [c](https://example.org/c)" in metadata
    )


def test_an_address_of_the_source_and_a_commit_are_not_made_up(sources: Path) -> None:
    (sources / ".git").mkdir()  # and there is no git
    wheel = wheel_without_compiler(sources, SHARDGRAD_SOURCE_URL="", PATH="")
    assert "+g" not in wheel.name
    metadata = metadata_of(wheel)
    assert "Project-URL" not in metadata
    assert "\na, [b](#b), [c](https://example.org/c)" in metadata


def test_in_a_source_tree_the_command_builds_that_tree(package: Path, tmp_path: Path) -> None:
    (package.parent / "setup.py").touch()
    done = use(package, cwd=tmp_path)
    assert done.stderr.count(f"pip install --no-build-isolation -e '{package.parent}'") == 1


@pytest.mark.parametrize(("compiler", "asked"), [("cat", 1), ("no-such-compiler", 0)])
def test_an_isolated_build_asks_for_torch_only_where_there_is_a_compiler(
    compiler: str, asked: int
) -> None:
    program = "import backend; print(*backend.get_requires_for_build_wheel())"
    done = run(
        sys.executable, "-c", program, cwd=ROOT, PYTHONPATH=str(ROOT / "release"), CXX=compiler
    )
    assert done.stdout.count("torch>=") == asked, done.stderr


def build(root: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "setup.py", "build_ext", "--inplace", cwd=root, **environment)


def test_without_a_compiler_the_build_succeeds_and_says_so_in_one_sentence(sources: Path) -> None:
    stale = sources / "shardgrad" / "_C.so"
    stale.write_bytes(b"from an earlier build")
    done = build(sources, CC="no-such-compiler", CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the compiled ops were not built") == 1
    assert done.stdout.count(INSTRUCTION) == 1
    assert not stale.exists()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_the_library_builds_in_a_path_with_spaces_and_again_when_a_header_changes(
    sources: Path,
) -> None:
    done = build(sources)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    used = use(sources / "shardgrad", cwd=sources.parent)
    assert (used.stdout, used.stderr) == ("compiled [0.5, 0.5, 0.5]\n", "")

    # Whether a build is attempted shows in whether the compiler is missed.
    assert "not built" not in build(sources, CC="no-such-compiler", CXX="no-such-compiler").stdout
    with (sources / "csrc" / "element.h").open("a") as header:
        header.write("// changed\n")
    assert "not built" in build(sources, CC="no-such-compiler", CXX="no-such-compiler").stdout
