"""What the ranks of all engines have in common, imported once by the server that forks them."""

from __future__ import annotations

import contextlib

import torch.distributed.fsdp.wrap  # noqa: F401

from tests.support import preloaded  # noqa: F401

with contextlib.suppress(ImportError):
    # What its first optimizer would import, and torch._inductor with it.
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
