"""Optimizers of other projects on our parameters. Nothing here is imported by `import shardgrad`.

`shardgrad.integrations.transformer_engine.fused_adam` and `shardgrad.integrations.apex.fused_adam` bind what
these projects have; `availability` says which of them can be used here, and why not the others. A partner is
imported by the first call that needs it, never before: its native libraries may be large, or broken.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

__all__ = ["apex", "availability", "transformer_engine"]

_PARTNERS = ("apex", "transformer_engine")


def availability() -> dict[str, str]:
    """Imports each partner and says in a sentence whether it can be used.

    Returns:
        By partner's name: its version, or why it is not usable.
    """
    return {name: import_module(f"{__name__}.{name}").probe().words for name in _PARTNERS}


def __getattr__(name: str) -> ModuleType:
    if name in _PARTNERS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
