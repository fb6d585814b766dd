"""What processes of tests have in common: imported once, by the server that forks them.

Importing all this takes seconds of a core; forking takes milliseconds. Nothing here may start a
thread, a process group or a device. Frameworks with global state (transformers, lightning) stay
out.
"""

from __future__ import annotations

import gc

import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.testing  # noqa: F401

import shardgrad.fully_shard  # noqa: F401

gc.collect()
gc.freeze()  # a collection in a child neither walks nor copies what all share
