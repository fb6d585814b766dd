"""Lets a CUDA build of torch be imported where NVIDIA's libraries are not installed, which are
several GB.

    PYTHON -m tests.support.nvidia_stubs

with the Python of an environment into which torch came by `pip install --no-deps`. It compiles
libraries with the names that torch's ask for, in which every function returns cudaErrorNoDevice. To
torch, that is a machine without a GPU. It does nothing if torch can be imported as it is.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from tests.cuda_runtime.build import LIBRARIES, compile_stubs, functions_of, imported

NO_DEVICE, NAMELESS = "(void*)100", '"no NVIDIA libraries are installed"'


def stub(name: str) -> str:
    """Returns a function that says that there is no device."""
    answer = NAMELESS if "String" in name or "ErrorName" in name else NO_DEVICE
    return f'extern "C" const void* {name}() {{ return {answer}; }}'


def main() -> None:
    if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode == 0:
        return
    site = Path(sysconfig.get_paths()["purelib"])
    functions = imported(site / "torch/lib")
    with tempfile.TemporaryDirectory() as scratch:
        for library in LIBRARIES:
            text = "\n".join(map(stub, functions_of(library, functions)))
            compile_stubs(library, text, functions, site, Path(scratch), ["-fno-builtin"])
    subprocess.run(
        [sys.executable, "-c", "import torch; assert not torch.cuda.is_available()"], check=True
    )


if __name__ == "__main__":
    main()
