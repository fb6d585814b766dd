"""Checkpoints that are complete or absent, contain only data, and load on any number of ranks.

Needs `pip install 'shardgrad[checkpoint]'`.
"""

from __future__ import annotations

from shardgrad.checkpoint.convert import convert
from shardgrad.checkpoint.loading import load, open_checkpoint
from shardgrad.checkpoint.safetensors import export_safetensors
from shardgrad.checkpoint.saving import Saving, save, save_async
from shardgrad.checkpoint.series import Series

__all__ = [
    "Saving",
    "Series",
    "convert",
    "export_safetensors",
    "load",
    "open_checkpoint",
    "save",
    "save_async",
]
