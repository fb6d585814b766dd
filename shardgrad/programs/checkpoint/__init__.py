"""Checkpoints in the format of `torch.distributed.checkpoint` that appear whole and have checksums.

Needs `pip install 'shardgrad[checkpoint]'`. For example:

    state = {"model": model.state_dict(), "step": step}
    checkpoint.save(state, "runs/mine/step_000100")
    state = checkpoint.load(state, "runs/mine/step_000100")
"""

from __future__ import annotations

from shardgrad.programs.checkpoint.contents import read_metadata, verify
from shardgrad.programs.checkpoint.folder import Series
from shardgrad.programs.checkpoint.loading import load
from shardgrad.programs.checkpoint.safetensors import export_checkpoint
from shardgrad.programs.checkpoint.saving import save

__all__ = [
    "Series",
    "export_checkpoint",
    "load",
    "read_metadata",
    "save",
    "verify",
]
