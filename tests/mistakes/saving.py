"""Mistakes in saving, loading and copying."""

from __future__ import annotations

import copy
import io
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state_dict

from shardgrad import checkpoint, fully_shard
from tests.mistakes.models import Net, backward, net, sharded
from tests.mistakes.table import mistake


@mistake(
    typed="`copy.deepcopy(model)`",
    says="DeepcopyError: FSDP does not support deepcopy",
    cure="build a second model, shard it the same way, and "
    "second.load_state_dict(model.state_dict())",
)
def a_deep_copy() -> None:
    copy.deepcopy(sharded())


@mistake(
    typed="`torch.save(model, path)`",
    says="PickleError: a sharded module cannot be pickled: FSDPNet",
    cure="torch.save(model.state_dict(), a path per rank), or shardgrad.checkpoint.save",
)
def saved_as_a_whole() -> None:
    torch.save(sharded(), io.BytesIO())


@mistake(
    typed="`model.load_state_dict(torch.load(path))` of an unsharded model",
    says="ForeignParameterError: an unsharded state dict was loaded into a sharded model",
    cure="set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True))",
)
def a_full_state_dict() -> None:
    sharded().load_state_dict(net().state_dict())


@mistake(
    typed="`load_state_dict(full, assign=True)`",
    says="ForeignParameterError: an unsharded state dict was loaded into a sharded model",
    cure="set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True))",
)
def a_full_state_dict_assigned() -> None:
    sharded().load_state_dict(net().state_dict(), assign=True)


@mistake(
    typed="`set_model_state_dict(model, full)` without options",
    says="ForeignParameterError: an unsharded state dict was loaded into a sharded model",
    cure="set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True))",
)
def a_full_state_dict_without_options() -> None:
    dcp_state_dict.set_model_state_dict(sharded(), net().state_dict())


@mistake(
    typed="`checkpoint.load` of a folder that is not there",
    says="CheckpointError: the checkpoint's file .metadata is missing or damaged",
    cure="correct the path, or use an older checkpoint",
)
def no_checkpoint() -> None:
    checkpoint.load({"model": sharded().state_dict()}, "/tmp/there/is/none")


@mistake(
    typed="`checkpoint.load` of another model's checkpoint",
    says="CheckpointError: the checkpoint does not fit, and nothing was loaded",
    cure="build the model and the optimizer that were saved",
)
def a_checkpoint_of_another_model() -> None:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    checkpoint.save({"model": fully_shard(nn.Linear(4, 4)).state_dict()}, Path(folder[0]) / "c")
    checkpoint.load({"model": sharded().state_dict()}, Path(folder[0]) / "c")


@mistake(
    typed='`checkpoint.save({"step": lambda: 1}, ...)`',
    says="CheckpointError: a state that is not plain data cannot be saved",
    cure="remove it from the state, or represent it by tensors and numbers",
)
def a_function_in_a_checkpoint() -> None:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    checkpoint.save({"model": sharded().state_dict(), "f": print}, Path(folder[0]) / "c")


@mistake(
    typed="`model.load_state_dict(..., assign=True)` in part",
    says="MetaParameterError: FSDP parameters should be materialized from meta device before "
    "training",
    cure="model.to_empty(device=...) and initialize, or load_state_dict(..., assign=True)",
)
def half_loaded() -> None:
    with torch.device("meta"):
        model = Net()
    sharded(model)
    state = {k: v for k, v in sharded().state_dict().items() if k != "head.bias"}
    model.load_state_dict(state, strict=False, assign=True)
    backward(model)
