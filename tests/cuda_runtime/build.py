"""Compiles the libraries that stand for NVIDIA's, and puts them where a CUDA build of torch looks
for them.

What torch imports and no source in `csrc/` defines becomes a function that logs its name and says
"not supported".
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE / "csrc"
FLAGS = ["-std=c++20", "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Wno-unused-function"]
RUNTIME = "libcudart.so.13"


@dataclass(frozen=True)
class Library:
    """One of NVIDIA's libraries.

    Attributes:
        folder: under site-packages/nvidia.
        prefix: pattern of its functions' names.
        refusal: what a function without a source returns; None for cuBLAS, whose functions are
            launches.
        sources: in csrc/.
    """

    name: str
    folder: str
    prefix: str
    refusal: int | None
    sources: tuple[str, ...] = ()


LIBRARIES = (
    Library(
        RUNTIME,
        "cu13",
        r"(__)?cuda[A-Z]",
        801,
        tuple(
            f"{name}.cpp"
            for name in (
                "state",
                "executor",
                "device",
                "memory",
                "streams",
                "capture",
                "graphs",
                "kernels",
                "inspect",
                "symmetric",
            )
        ),
    ),
    Library("libcuda.so.1", "cu13", r"cu[A-Z](?!File)", 801, ("driver.cpp",)),
    Library("libnvidia-ml.so.1", "cu13", r"nvml[A-Z]", 3, ("nvml.cpp",)),
    Library("libcublas.so.13", "cu13", r"cublas(?!Lt)", None, ("cublas.cpp",)),
    Library("libcublasLt.so.13", "cu13", r"cublasLt", 15, ("cublas.cpp",)),
    Library("libcudnn.so.9", "cudnn", r"cudnn", 3000),
    Library("libcusparse.so.12", "cu13", r"cusparse(?!Lt)", 10),
    Library("libcusparseLt.so.0", "cusparselt", r"cusparseLt", 10),
    Library("libcufft.so.12", "cu13", r"cufft", 5),
    Library("libcurand.so.10", "cu13", r"curand", 201),
    Library("libcusolver.so.12", "cu13", r"cusolver", 9),
    Library("libnccl.so.2", "nccl", r"nccl[A-Z]", 5, ("nccl.cpp",)),
    Library("libnvshmem_host.so.3", "nvshmem", r"nvshmem", 1),
    Library("libcufile.so.0", "cu13", r"cuFile", 1),
    Library("libcupti.so.13", "cu13", r"cupti", 1),
    Library("libnvrtc.so.13", "cu13", r"nvrtc", 1),
)

# Functions that only have to answer.
ANSWERS = {
    "cudnnGetVersion": "size_t cudnnGetVersion() { return 92000; }",
    "cudnnGetCudartVersion": "size_t cudnnGetCudartVersion() { return 13000; }",
    "cudnnCreate": "int cudnnCreate(void** h) { *h = new int(0); return 0; }",
    "cudnnDestroy": "int cudnnDestroy(void*) { return 0; }",
    "cudnnSetStream": "int cudnnSetStream(void*, void*) { return 0; }",
    "cusparseLtGetVersion": "int cusparseLtGetVersion(void*, int* v) { *v = 800; return 0; }",
    "nvrtcVersion": "int nvrtcVersion(int* a, int* b) { *a = 13; *b = 0; return 0; }",
    **{
        name: f'const char* {name}(int) {{ return "not there on the host"; }}'
        for name in ("nvrtcGetErrorString", "cudnnGetErrorString", "cusparseGetErrorString")
    },
}


def build(site_packages: Path, scratch: Path, headers: Path) -> None:
    """Compiles everything for the torch in `site_packages`.

    Args:
        site_packages: of the venv.
        scratch: for generated sources.
        headers: of CUDA 13: the folder with cuda_runtime_api.h.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    functions = imported(site_packages / "torch/lib")
    runtime, *others = LIBRARIES
    _compile(runtime, functions, site_packages, scratch, headers)  # the others link it
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(_compile, each, functions, site_packages, scratch, headers)
            for each in others
        ]
        jobs.append(pool.submit(_compile_values, site_packages, headers))
        for job in jobs:
            job.result()


def _compile(
    library: Library, functions: dict[str, str], site_packages: Path, scratch: Path, headers: Path
) -> None:
    sources = [CSRC / name for name in library.sources]
    missing = functions_of(library, functions).keys() - set().union(*map(_defined, sources))
    text = _stubs(library, sorted(missing))
    options = [f"-I{CSRC}", f"-isystem{headers}", *map(str, sources)]
    if library.name != RUNTIME:
        options += [f"-L{site_packages}/nvidia/cu13/lib", f"-l:{RUNTIME}"]
    compile_stubs(library, text, functions, site_packages, scratch, options)


def functions_of(library: Library, functions: dict[str, str]) -> dict[str, str]:
    """Returns those of a library, with their versions."""
    return {name: version for name, version in functions.items() if re.match(library.prefix, name)}


def compile_stubs(
    library: Library,
    text: str,
    functions: dict[str, str],
    site_packages: Path,
    scratch: Path,
    options: Sequence[str] = (),
) -> None:
    """Compiles a library of C++ in `text`, and puts it where torch looks for it.

    Args:
        library: which one.
        text: C++.
        functions: of `imported`.
        site_packages: of torch.
        scratch: a folder for generated sources.
        options: more of them, for g++.
    """
    target = site_packages / "nvidia" / library.folder / "lib" / library.name
    target.parent.mkdir(parents=True, exist_ok=True)
    stubs, versions = scratch / f"{library.name}.cpp", scratch / f"{library.name}.map"
    stubs.write_text(text)
    versioned = filter(None, functions_of(library, functions).values())
    version = "" if library.name == "libcuda.so.1" else next(versioned, "")
    versions.write_text(f"{version} {{ global: *; }};")
    command = ["g++", *FLAGS, str(stubs), *options, "-o", str(target)]
    command += [f"-Wl,-soname,{library.name}", f"-Wl,--version-script,{versions}"]
    command += ["-ldl", "-lpthread", "-Wl,-rpath,$ORIGIN/../../cu13/lib"]
    subprocess.run(command, check=True)


def _compile_values(site_packages: Path, headers: Path) -> None:
    torch, cuda = site_packages / "torch", site_packages / "nvidia/cu13/lib"
    target = cuda / "libhostcuda_values.so"
    command = ["g++", *FLAGS, "-w", f"-I{CSRC}", f"-isystem{torch}/include", f"-isystem{headers}"]
    command += [str(CSRC / "values.cpp"), "-o", str(target), f"-L{torch}/lib", f"-L{cuda}"]
    command += [
        "-ltorch_cpu",
        "-ltorch_cuda",
        "-lc10",
        "-lc10_cuda",
        f"-l:{RUNTIME}",
        f"-Wl,-rpath,{torch}/lib:{cuda}",
    ]
    subprocess.run(command, check=True)


def imported(folder: Path) -> dict[str, str]:
    """Returns the functions that torch's libraries import, each with its version or ''."""
    # Torch asks for the driver's by name, and for all of them when it needs one.
    asked_for = (folder.parent / "include/c10/cuda/driver_api.h").read_text()
    found = dict.fromkeys(re.findall(r"\b_\((cu\w+), \d+\)", asked_for), "")
    for library in folder.glob("*.so"):
        table = subprocess.run(
            ["readelf", "--dyn-syms", "-W", library], check=True, capture_output=True, text=True
        ).stdout
        for words in map(str.split, table.splitlines()):
            if len(words) >= 8 and words[6] == "UND":
                name, _, version = words[7].partition("@")
                found[name] = version.lstrip("@") or found.get(name, "")
    return found


def _defined(source: Path) -> set[str]:
    text = source.read_text()
    names = re.findall(r"\b((?:__)?(?:cu|nccl|nvml)\w+) ?\(", text)
    return {*names, *re.findall(r"REFUSED\((\w+)", text)}


def _stubs(library: Library, names: list[str]) -> str:
    lines = [
        "#include <cstddef>",
        "namespace hostcuda { void unsupported(const char*); }",
        'extern "C" {',
    ]
    if library.refusal is None:
        lines.append("struct Handle; int hostcuda_cublas_launch(const char*, struct Handle*);")
    for name in names:
        if name in ANSWERS:
            lines.append(ANSWERS[name])
        elif library.refusal is None:  # the handle comes first, and knows its stream
            lines.append(
                f'int {name}(struct Handle* h) {{ return hostcuda_cublas_launch("{name}", h); }}'
            )
        else:
            lines.append(
                f'int {name}() {{ hostcuda::unsupported("{name}"); return {library.refusal}; }}'
            )
    return "\n".join([*lines, "}\n"])


def cuda_headers() -> Path | None:
    """Returns the folder of CUDA 13's headers: that of the nvcc on PATH, or of /usr/local/cuda."""
    nvcc = shutil.which("nvcc")
    roots = [Path("/usr/local/cuda")]
    if nvcc is not None:
        roots.insert(0, Path(nvcc).resolve().parents[1])
    return next(
        (root / "include" for root in roots if (root / "include/cuda_runtime_api.h").exists()), None
    )
