"""Lets a CUDA build of torch be imported where NVIDIA's libraries are not installed, which are
several GB.

    PYTHON -m tests.support.nvidia_stubs

with the Python of an environment into which torch came by `pip install --no-deps`. It compiles
libraries with the names that torch's ask for, in which every function returns cudaErrorNoDevice. To
torch, that is a machine without a GPU. It does nothing if torch can be imported as it is.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

# The library -> what the names of its functions begin with.
PREFIXES = {
    "libcublas.so": r"cublas(?!Lt)",
    "libcublasLt.so": "cublasLt",
    "libcuda.so": r"cu[A-Z](?!File)",
    "libcudart.so": r"(__)?cuda[A-Z]",
    "libcudnn.so": "cudnn",
    "libcufft.so": "cufft",
    "libcufile.so": "cuFile",
    "libcupti.so": "cupti",
    "libcurand.so": "curand",
    "libcusolver.so": "cusolver",
    "libcusparse.so": r"cusparse(?!Lt)",
    "libcusparseLt.so": "cusparseLt",
    "libnccl.so": "nccl[A-Z]",
    "libnvrtc.so": "nvrtc",
    "libnvshmem_host.so": "nvshmem",
}
NO_DEVICE, NAMELESS = "(void*)100", '"no NVIDIA libraries are installed"'


def readelf(option: str, library: Path) -> list[list[str]]:
    command = ["readelf", "-W", option, str(library)]
    return [line.split() for line in subprocess.check_output(command, text=True).splitlines()]


def needed(libraries: list[Path]) -> set[str]:
    """Returns the names of the libraries that torch's ask for."""
    lines = [
        words for library in libraries for words in readelf("-d", library) if "(NEEDED)" in words
    ]
    return {words[-1].strip("[]") for words in lines}


def imported(libraries: list[Path]) -> dict[str, str]:
    """Returns the functions that torch's libraries import, each with its version, or an empty
    one.
    """
    found: dict[str, str] = {}
    for words in (words for library in libraries for words in readelf("--dyn-syms", library)):
        if len(words) >= 8 and words[6] == "UND":
            name, _, version = words[7].partition("@")
            found[name] = version.lstrip("@") or found.get(name, "")
    return found


def make(soname: str, functions: dict[str, str], folder: Path) -> None:
    """Compiles a library in which each of the functions says that there is no device."""
    source, versions = folder / "stub.c", folder / "stub.map"
    lines = ["const void* shardgrad_stub(void) { return 0; }"]
    for name in functions:
        answer = (
            '"no NVIDIA libraries are installed"'
            if "String" in name or "ErrorName" in name
            else NO_DEVICE
        )
        lines.append(f"const void* {name}(void) {{ return {answer}; }}")
    source.write_text("\n".join(lines))
    version = next((version for version in functions.values() if version), "")
    versions.write_text(f"{version} {{ global: *; }};")
    options = [
        "-w",
        "-fno-builtin",
        "-fPIC",
        "-shared",
        f"-Wl,-soname,{soname}",
        f"-Wl,--version-script,{versions}",
    ]
    subprocess.run(["gcc", *options, str(source), "-o", str(folder / soname)], check=True)
    source.unlink()
    versions.unlink()


def main() -> None:
    if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode == 0:
        return
    site = Path(sysconfig.get_paths()["purelib"])
    libraries = sorted(site.glob("torch/lib/*.so"))
    functions = imported(libraries)
    folder = site / "nvidia/cu13/lib"  # among those that torch looks in
    folder.mkdir(parents=True, exist_ok=True)
    for soname in sorted(needed(libraries)):
        prefix = PREFIXES.get(re.sub(r"\.so\..*", ".so", soname))
        if prefix is not None:
            make(
                soname,
                {name: at for name, at in functions.items() if re.match(prefix, name)},
                folder,
            )
    subprocess.run(
        [sys.executable, "-c", "import torch; assert not torch.cuda.is_available()"], check=True
    )


if __name__ == "__main__":
    main()
