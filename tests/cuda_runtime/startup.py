"""Imported at the start of every Python of the venv: lets operators on CUDA have the CPU's values.

Torch itself is imported as late as ever: the settings are made when its import is over.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path
from typing import Any

OPS = Path(sys.prefix, "hostcuda/shardgrad/_C.so")  # our kernels, linked to the shared runtime
KERNELS = Path(sys.prefix, "hostcuda/kernels/kernels.so")  # the same, compiled for the host

os.environ.setdefault("HOSTCUDA_DEVICES", "1")
# Cores are for ranks, and a blocked sum in another order has other bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ranks may share a device, as under NCCL here.
os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
# That every kernel is overridden is the point, and torch warns of it.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as others do, and calls `prepare` when it is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            prepare(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def prepare(torch: Any) -> None:
    """Takes over operators, unless HOSTCUDA_VALUES is 0."""
    if torch.version.cuda is None:
        return
    nvml = Path(torch.__file__).parents[1] / "nvidia/cu13/lib/libnvidia-ml.so.1"
    if nvml.exists():
        ctypes.CDLL(str(nvml))  # programs look for it by name
    torch.backends.cudnn.enabled = False  # there is none here
    torch.backends.cuda.enable_cudnn_sdp(False)
    set_values = _values(torch) if os.environ.get("HOSTCUDA_VALUES") != "0" else None
    load = torch.ops.load_library

    def load_library(path: Any) -> None:
        # The checkout may have been built for another torch.
        ours = OPS if Path(path).parts[-2:] == OPS.parts[-2:] and OPS.exists() else path
        load(ours)
        if ours == OPS and KERNELS.exists() and os.environ.get("HOSTCUDA_KERNELS") != "0":
            _add_kernels()
        if set_values is not None:
            set_values(b"shardgrad")

    torch.ops.load_library = load_library


def _add_kernels() -> None:
    """Has launches of our kernels run what was compiled for the host, with their arguments."""
    add = ctypes.CDLL("libcudart.so.13").hostcuda_add_kernel
    ctypes.CDLL(str(KERNELS)).on_host_name_kernels(add)


def _values(torch: Any) -> Any:
    """Gives torch's operators values; returns what does it for those of another namespace."""
    # Only the plain form of attention has a CPU kernel of the same name.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    values = ctypes.CDLL(
        str(Path(torch.__file__).parents[1] / "nvidia/cu13/lib/libhostcuda_values.so")
    )
    values.hostcuda_values.argtypes = [ctypes.c_char_p]
    _add_cpu_kernels(torch)
    values.hostcuda_values(b"aten")
    torch.cuda._lazy_call(values.hostcuda_watch_allocator)
    return values.hostcuda_values


def _add_cpu_kernels(torch: Any) -> None:
    """Gives operators that only devices have a kernel on the CPU: their decomposition."""
    library = torch.library.Library("aten", "IMPL")
    _kept.append(library)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = [
        "CPU",
        "CompositeExplicitAutograd",
        "CompositeImplicitAutograd",
        "CompositeExplicitAutogradNonFunctional",
    ]
    for op, by in torch._decomp.decomposition_table.items():
        if (
            not isinstance(op, torch._ops.OpOverload)
            or op.namespace != "aten"
            or not has(op.name(), "CUDA")
        ):
            continue
        if not any(has(op.name(), key) for key in keys):
            library.impl(op.name().removeprefix("aten::"), by, "CPU")


_kept: list[Any] = []
if not any(isinstance(finder, _AfterTorch) for finder in sys.meta_path):
    sys.meta_path.insert(0, _AfterTorch())
