"""Optimizers of other projects on sharded parameters. `import shardgrad` does not import this
package.

`shardgrad.integrations.transformer_engine.fused_adam` and `shardgrad.integrations.apex.fused_adam`
wrap the optimizers of these projects; `availability` returns which of them are usable, and why the
others are not. A partner, one of these packages, is imported by the first call that needs it, since
its native libraries may be large or broken.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

__all__ = ["apex", "availability", "transformer_engine"]

_PARTNERS = ("apex", "transformer_engine")


def availability() -> dict[str, str]:
    """Imports each partner and returns whether it is usable.

    Returns:
        By name of the partner: its version, or one sentence that says why it is not usable.
    """
    return {name: import_module(f"{__name__}.{name}").probe().words for name in _PARTNERS}


def __getattr__(name: str) -> ModuleType:
    if name in _PARTNERS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
