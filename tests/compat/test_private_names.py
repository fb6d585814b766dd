"""The engine and what is around it use few private names of torch, each for a reason, and a torch
that has lost one is named.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import shardgrad
from benchmarks.reading import private_names

FOLDERS = (
    *("checks", "compat", "diagnosis", "engine", "features", "integrations", "ops", "optim"),
    *("patch", "sharding"),
)

# What torch has no public name for, and what it is used for.
WHY = {
    "torch._C.DisableTorchFunction": "a DTensor's version is read three times as fast",
    "torch._C._autograd._get_current_graph_task_keep_graph": "a kept graph reads parameters again",
    "torch._C._current_graph_task_id": "tells a forward from one that backward recomputes",
    "torch._C._dynamo.eval_frame._FrameAction": "hooks run as plain Python, without an import of "
    "Dynamo in programs that compile nothing",
    "torch._C._dynamo.eval_frame._FrameExecStrategy": "the same",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": "the same",
    "torch._C._construct_storage_from_data_pointer": "a tensor over memory of our own",
    "torch._C._functorch.get_unwrapped": "what a transform of torch.func has wrapped",
    "torch._C._functorch.is_functorch_wrapped_tensor": "the same",
    "torch._C._functorch.peek_interpreter_stack": "whether a transform of torch.func runs",
    "torch._C._storage_Use_Count": "whether a program keeps memory of gradients",
    "torch.Tensor._backward_hooks": "a hook that would never run is refused",
    "torch.UntypedStorage._cdata": "whether two tensors share memory, also where it has no address",
    "torch._amp_update_scale_": "the loss scale changes as under torch's GradScaler, in one launch",
    "torch._foreach_copy_": "the copies of a unit are one launch",
    "torch._foreach_mul_": "gradients that are clipped one by one are one launch",
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack": "a transform of torch.func "
    "does not transform what the engine does",
    "torch.autograd.Variable._execution_engine": "a callback at the end of a backward, as FSDP2's",
    "torch.autograd.profiler._is_profiler_enabled": "spans cost nothing without a profiler",
    "torch.Tensor._base": "backward may come to a unit by the base of a view that it returned",
    "torch.Tensor._post_accumulate_grad_hooks": "a program's hooks run on reduced gradients",
    "torch.distributed._composable.contract.REGISTRY_KEY": "torch's composable DDP refuses modules "
    "that are registered there",
    "torch.distributed._composable.contract.RegistryItem": "the same",
    "torch.distributed._composable.contract.STATE_KEY": "where pipeline stages look for the state",
    "torch.distributed.device_mesh.DeviceMesh._concatenate": "one mesh for the axes of a parameter "
    "that tensor parallelism has sharded",
    "torch.distributed.device_mesh.DeviceMesh._flatten": "several data-parallel axes are one",
    "torch.distributed.ProcessGroup._get_backend": "a backend may allocate what it registers",
    "torch.distributed.distributed_c10d._get_default_store": "ranks ask through it while a "
    "collective hangs",
    "torch.distributed.distributed_c10d._get_object_coll_device": "where ranks compare texts",
    "torch.distributed.fsdp._fully_shard._fsdp_common.FSDPMeshInfo": "what torch's tools expect of "
    "a mesh",
    "torch.distributed.fsdp._fully_shard._fsdp_common.HSDPMeshInfo": "the same",
    "torch.distributed.tensor.DTensor._spec": "a DTensor over a piece of flat memory has the "
    "parameter's",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec": "the same",
    "torch.distributed.tensor._dtensor_spec.TensorMeta": "the same",
    "torch.distributed.tensor.placement_types._StridedShard": "rows that tensor parallelism has "
    "cut before, in checkpoints as FSDP2 writes them",
    "torch.distributed.utils._apply_to_tensors": "tensors in inputs and outputs of any structure, "
    "as FSDP2 finds them",
    "torch.distributed.utils._to_kwargs": "inputs are moved to the device as FSDP2 does it",
    "torch.nn.Module._call_impl": "modules around a unit are looked at before their parameters "
    "drift apart",
    "torch.nn.Module._buffers": "buffers are moved, and one in the place of another is seen",
    "torch.nn.Module._parameters": "modules register sharded or unsharded parameters in turn",
    "torch.optim.Optimizer._optimizer_load_state_dict_post_hooks": "a program's hooks run where "
    "state is copied into buffers that a graph knows",
    "torch.optim.Optimizer._optimizer_load_state_dict_pre_hooks": "the same",
    "torch.utils._pytree.tree_flatten": "inputs of any structure are watched",
    "torch.utils._pytree.tree_leaves": "the same",
    "torch.utils._pytree.tree_map": "a loss may be any structure of tensors",
    "torch.utils._pytree.tree_unflatten": "the same",
}


def _resolved(path: str) -> Any:
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            # An attribute that instances have is announced by its class.
            announced = vars(found).get("__annotations__", {})
            found = announced[part] if part in announced else getattr(found, part)
        return found
    raise ImportError(path)


@pytest.mark.parametrize("path", WHY)
def test_torch_has_every_private_name_that_is_used(path: str) -> None:
    try:
        _resolved(path)
    except (AttributeError, ImportError, KeyError) as error:
        pytest.fail(f"torch has no {path} any more, which is used since {WHY[path]} ({error})")


def _text() -> str:
    package = Path(shardgrad.__file__).parent
    folders = [file for part in FOLDERS for file in (package / part).rglob("*.py")]
    files = [*folders, package / "module.py", package / "fully_shard.py"]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def test_every_private_name_has_a_reason() -> None:
    text = _text()
    known = {part for path in WHY for part in (path, *path.split("."))}
    used = {
        name
        for name in private_names(Path(shardgrad.__file__).parent)
        if re.search(rf"\b{name.rpartition('.')[2]}\b", text)
    }
    # The first is there from torch 2.15 on, and read where it is; the second is there where torch
    # was built for CUDA, and makes the allocator of a pool of graphs; the others are Python's.
    assert used - known <= {
        *("_has_grad_dtype_override", "_cuda_customAllocator"),
        *("_current_frames", "_replace"),
    }


def test_no_reason_is_left_for_a_name_that_is_gone() -> None:
    text = _text()
    assert not [path for path in WHY if path.rpartition(".")[2] not in text]
