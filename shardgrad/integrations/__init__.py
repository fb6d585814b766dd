"""Optimizers of other projects on sharded parameters. `import shardgrad` does not import this
package.

`shardgrad.integrations.transformer_engine.FusedAdam` and `shardgrad.integrations.apex.FusedAdam`
wrap the optimizers of these projects; `availability` returns which of them are usable, and why the
others are not. A project's package is imported by the first call that needs it, since its native
libraries may be large or broken.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from shardgrad.errors import PartnerUnavailableError

__all__ = ["apex", "availability", "transformer_engine"]

_PARTNERS = ("apex", "transformer_engine")


def availability() -> dict[str, str]:
    """Imports each package and returns whether it is usable.

    Returns:
        By name of the package: its optimizer and version, or one sentence that says why it is not
        usable.
    """
    found = {}
    for name in _PARTNERS:
        optimizer = import_module(f"{__name__}.{name}").FusedAdam
        try:
            found[name] = f"{optimizer.title} {optimizer.find()[1]}".removesuffix(" 0")
        except PartnerUnavailableError as error:
            found[name] = str(error.got)
    return found


def __getattr__(name: str) -> ModuleType:
    if name in _PARTNERS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
