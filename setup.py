"""Builds `shardgrad/_C.so`, the compiled ops, against the torch that is installed.

The library is optional: without a compiler the install still succeeds, says so in one sentence, and
the package runs on its Python reference ops. It is a plain shared library on torch's stable ABI,
not a Python module, so one build serves torch 2.11 to 2.15 and every Python: a wheel with it is
`py3-none-<platform>`, one without it `py3-none-any`. `release/backend.py` says when an isolated
build asks for torch.

CUDA kernels are linked in where torch was built for CUDA and an `nvcc` of the same major version is
found in CUDA_HOME or on PATH. An isolated build leaves them out, unless SHARDGRAD_CUDA=1 asks for
them: a library with them does not load where torch is without CUDA. Two more variables change how:

    TORCH_CUDA_ARCH_LIST=9.0         the architectures to compile for, as for torch's own extensions
    SHARDGRAD_CUDA_RUNTIME=shared    link the runtime that torch loads, not the static one

SHARDGRAD_SOURCE_URL is where the source is published, such as https://example.org/shardgrad. The
package's README and metadata then link there. Without it the README's links to other files are
plain words: an address that may be another's is not given.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.errors import BaseError, CCompilerError

STABLE_ABI = "0x020b000000000000ULL"  # torch 2.11, the oldest version served

# No contraction to fused multiply-add: results must equal torch's bit for bit, on every machine.
# No trapping math: lets the compiler evaluate both sides of a selection, and so vectorise it; same
# results. No errno: lets it vectorise square roots; same results.
CXX_FLAGS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra"]
CXX_FLAGS += ["-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"]
NVCC_FLAGS = ["-std=c++17", "-O3", "--fmad=false", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
CUDA_ARCHITECTURES = ("80", "90", "100")

CSRC = Path("csrc")
HEADERS = [str(path) for pattern in ("*.h", "*.cuh") for path in sorted(CSRC.rglob(pattern))]
CPU_SOURCES = [str(path) for path in sorted([*CSRC.glob("*.cpp"), *CSRC.glob("cpu/*.cpp")])]
CUDA_BINDINGS = [str(path) for path in sorted((CSRC / "cuda").glob("*.cpp"))]
CUDA_SOURCES = [str(path) for path in sorted((CSRC / "cuda").glob("*.cu"))]

# For who has no source tree; the same as in shardgrad/ops/library.py.
INSTALL_AGAIN = (
    "pip install --no-build-isolation --no-deps --force-reinstall --no-binary shardgrad shardgrad"
)
COMMIT_FILE = Path("shardgrad", "_commit.txt")  # read by shardgrad/version.py
BUILD_FAILURES = (BaseError, CCompilerError, ImportError, OSError, subprocess.SubprocessError)


def find_nvcc(cuda_version: str | None, *, is_isolated: bool) -> str | None:
    """Returns an nvcc that fits torch, or None, after saying why if torch has CUDA."""
    wanted = os.environ.get("SHARDGRAD_CUDA", "0" if is_isolated else "1")
    if cuda_version is None:
        return None
    if wanted == "0":
        print(
            "shardgrad: CUDA tensors will use the reference ops: to build kernels, "
            "SHARDGRAD_CUDA=1."
        )
        return None
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=str(Path(home, "bin")) if home else None)
    if nvcc is None:
        reason = "there is no nvcc"
    else:
        release = subprocess.run(
            [nvcc, "--version"], check=True, capture_output=True, text=True
        ).stdout
        if f"release {cuda_version.split('.')[0]}." in release:
            return nvcc
        reason = f"{nvcc} is of another major version"
    print(
        f"shardgrad: CUDA tensors will use the reference ops: torch has CUDA {cuda_version}, but "
        f"{reason}."
    )
    return None


def architecture_flags(nvcc: str) -> list[str]:
    """Returns machine code for each architecture this nvcc knows, and PTX of the newest for later
    ones.
    """
    listing = subprocess.run(
        [nvcc, "--list-gpu-arch"], check=True, capture_output=True, text=True
    ).stdout
    asked = re.findall(r"(\d+)\.(\d)", os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    wanted = ["".join(each) for each in asked] or CUDA_ARCHITECTURES
    known = [arch for arch in wanted if f"compute_{arch}" in listing.split()]
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in known]
    return [*flags, f"-gencode=arch=compute_{known[-1]},code=compute_{known[-1]}"]


def static_cuda_runtime(nvcc: str) -> str:
    """Returns the runtime archive of the toolkit as nvcc sees it: the one on PATH may be a wrapper
    script.
    """
    command = [nvcc, "--dryrun", "-c", CUDA_SOURCES[0]]
    dryrun = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    toolkit = Path(dryrun.split("TOP=", 1)[1].splitlines()[0].strip())
    for directory in ("lib64", "lib", "targets/*/lib"):
        for archive in toolkit.glob(f"{directory}/libcudart_static.a"):
            return str(archive)
    raise FileNotFoundError(f"there is no libcudart_static.a in {toolkit}")


def shared_cuda_runtime() -> Path:
    """Returns the runtime that this process's torch has loaded."""
    import torch  # noqa: F401

    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split()[-1])
        if path.name.startswith("libcudart.so"):
            return path
    raise FileNotFoundError("torch has loaded no libcudart.so")


class BuildOps(build_ext):
    """Compiles the C++ with setuptools' compiler and the CUDA with nvcc; never fails the
    install.
    """

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        try:
            self.add_torch(ext)
            super().build_extension(ext)
        except BUILD_FAILURES as error:
            # What an earlier build left there no longer matches the sources.
            for stale in (self.get_ext_fullpath(ext.name), self.get_ext_filename(ext.name)):
                Path(stale).unlink(missing_ok=True)
            print(
                f"shardgrad: the compiled ops were not built ({error}), so the slower Python "
                f"reference ops "
                "will be used; to build them, install torch and a C++17 compiler, then type: "
                f"{INSTALL_AGAIN} (in a clone: pip install --no-build-isolation -e .)"
            )

    def add_torch(self, ext: Extension) -> None:
        import torch

        root = Path(torch.__file__).parent
        # As system headers: their warnings are not ours.
        ext.extra_compile_args += ["-isystem", str(root / "include")]
        ext.library_dirs.append(str(root / "lib"))
        # Before glibc 2.34, what torch's headers and CUDA's runtime call is not all in libc.
        ext.libraries += ["torch_cpu", "rt", "pthread", "dl"]
        # pip's and build's temporary environments have this in their names.
        nvcc = find_nvcc(torch.version.cuda, is_isolated="build-env-" in torch.__file__)
        if nvcc is not None:
            self.add_cuda(ext, nvcc)
            ext.libraries.append("torch_cuda")

    def add_cuda(self, ext: Extension, nvcc: str) -> None:
        ext.sources += CUDA_BINDINGS
        ext.define_macros.append(("USE_CUDA", "1"))
        for source in CUDA_SOURCES:
            target = Path(self.build_temp, source).with_suffix(".o")
            target.parent.mkdir(parents=True, exist_ok=True)
            self.spawn(
                [nvcc, *NVCC_FLAGS, *architecture_flags(nvcc), "-c", source, "-o", str(target)]
            )
            ext.extra_objects.append(str(target))
        if os.environ.get("SHARDGRAD_CUDA_RUNTIME") == "shared":
            ext.extra_objects.append(str(shared_cuda_runtime()))
        else:
            # The library then depends on the driver alone, not on one runtime's file name.
            ext.extra_objects.append(static_cuda_runtime(nvcc))


class BuildPython(build_py):
    """Writes the commit into what is built, unless it is an editable install, which asks git."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_commit(Path(self.build_lib))


class SourceDistribution(sdist):
    """Writes the commit into the archive: there is no repository where it is unpacked."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir))


class Wheel(bdist_wheel):
    """Is for this platform and every Python if it has the compiled ops, else for every platform."""

    def run(self) -> None:
        self.run_command("build")
        if not Path(
            self.get_finalized_command("build_ext").get_ext_fullpath("shardgrad._C")
        ).exists():
            self.distribution.ext_modules = None
            self.root_is_pure = True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


def commit() -> str:
    """Returns the commit of an unpacked archive, or asks git; "" where there is neither."""
    if COMMIT_FILE.exists():
        return COMMIT_FILE.read_text(encoding="utf-8").strip()
    if not Path(".git").exists():
        return ""
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return ""
    return described.stdout.strip()


def write_commit(root: Path) -> None:
    """Writes the commit into a tree that is built, if it is known."""
    if commit():
        target = root / COMMIT_FILE
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(commit() + "\n", encoding="utf-8")


def version_tag() -> str:
    """Returns what names the commit between releases, as in 0.1.0.dev0+g0123456789ab."""
    base = re.search(r'^version = "(.*)"', Path("pyproject.toml").read_text(encoding="utf-8"), re.M)
    is_between = base is not None and ".dev" in base[1]
    return f"+g{commit().replace('-', '.')}" if is_between and commit() else ""


def source_url() -> str:
    """Returns where the source is published, or ""."""
    return os.environ.get("SHARDGRAD_SOURCE_URL", "").rstrip("/")


def project_urls() -> dict[str, str]:
    """Returns the links of the metadata."""
    pages = {
        "Source": "",
        "Documentation": "/blob/main/docs/README.md",
        "Changelog": "/blob/main/CHANGELOG.md",
    }
    return {name: source_url() + page for name, page in pages.items()} if source_url() else {}


def readme() -> str:
    """Returns the README for an index, which renders it where there are no other files."""
    text = Path("README.md").read_text(encoding="utf-8")
    return re.sub(
        r"\[([^\]]+)\]\((?!https?:|#)([^)]+)\)",
        rf"[\1]({source_url()}/blob/main/\2)" if source_url() else r"\1",
        text,
    )


setup(
    options={"egg_info": {"tag_build": version_tag()}},
    project_urls=project_urls(),
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[
        Extension(
            "shardgrad._C",
            sources=CPU_SOURCES,
            depends=[*HEADERS, *CUDA_BINDINGS, *CUDA_SOURCES],
            define_macros=[("TORCH_TARGET_VERSION", STABLE_ABI)],
            extra_compile_args=CXX_FLAGS,
            language="c++",
            optional=True,
        )
    ],
    cmdclass={
        "bdist_wheel": Wheel,
        "build_ext": BuildOps,
        "build_py": BuildPython,
        "sdist": SourceDistribution,
    },
)
