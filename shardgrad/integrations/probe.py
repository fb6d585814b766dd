"""Imports a partner's package and checks its version and the options it accepts.

That a package can be found proves little: a native library may be missing or built for another
torch, and the name may belong to another project (`apex` on PyPI is a web framework of 2013). So
the package is imported and checked.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch.optim.optimizer import Optimizer

from shardgrad.errors import OptionError, PartnerUnavailableError

__all__ = ["Probe", "Release", "load"]

# What broken or foreign packages raise when imported: missing libraries, version checks, Python 2
# sources.
_BROKEN = (ImportError, OSError, RuntimeError, AssertionError, AttributeError, SyntaxError)


@dataclass(frozen=True)
class Release:
    """The version of a partner.

    Attributes:
        text: the package's version; empty if it has none.
    """

    text: str

    def has(self, major: int, minor: int) -> bool:
        """Returns whether this is release `major.minor` or a later one.

        A development or release-candidate build of `major.minor`, and an unknown version, count as
        older.
        """
        found = re.match(r"(\d+)\.(\d+)(.*)", self.text)
        if found is None:
            return False
        mine = int(found[1]), int(found[2])
        is_early = re.search(r"(dev|rc|a|b)\d*", found[3].split("+")[0]) is not None
        return mine > (major, minor) or (mine == (major, minor) and not is_early)

    def __str__(self) -> str:
        return self.text or "of unknown version"


@dataclass(frozen=True)
class Probe:
    """The result of importing a partner.

    Attributes:
        name: name of the optimizer, for error messages.
        release: version of the package.
        factory: class of the optimizer; None if it is not usable.
        why_not: why it is not usable, one sentence; else empty.
        install: command that installs the package.
    """

    name: str
    release: Release
    factory: Callable[..., Optimizer] | None
    why_not: str
    install: str

    @property
    def words(self) -> str:
        """Name and version if the partner is usable, else the reason why it is not."""
        return self.why_not or f"{self.name} {self.release}"

    def require(self) -> Callable[..., Optimizer]:
        """Returns the optimizer's class.

        Raises:
            PartnerUnavailableError: the partner is not usable.
        """
        if self.factory is None:
            raise PartnerUnavailableError(
                f"{self.name} cannot be used: {self.why_not}",
                expected=f"{self.name}, built for this torch",
                got=self.why_not,
                fix=f"{self.install}; or shardgrad.optim.AdamW, which needs no other package",
            )
        return self.factory

    def require_options(self, options: Mapping[str, Any]) -> None:
        """Checks that this version accepts keyword arguments.

        Raises:
            OptionError: it does not accept some; names them.
        """
        known = _keywords(self.require())
        unknown = sorted(set(options) - known)
        if unknown:
            raise OptionError(
                f"{self.name} {self.release} does not take {', '.join(unknown)}",
                expected=f"some of {', '.join(sorted(known - {'self', 'params'}))}",
                got=", ".join(unknown),
                fix="leave it out, or install a version that has it",
            )


def load(
    name: str, *, modules: Iterable[str], where: str, keywords: Iterable[str], install: str
) -> tuple[Probe, Mapping[str, Any]]:
    """Imports a partner's modules and looks up `FusedAdam`.

    Args:
        name: name of the optimizer, for error messages.
        modules: modules that must be importable; the first one is the package, which has the
            version.
        where: the module that defines `FusedAdam`.
        keywords: arguments that `FusedAdam` must accept.
        install: command that installs the package.

    Returns:
        The probe, whose version is not checked yet, and the imported modules by name.
    """
    found: dict[str, Any] = {}
    why = ""
    for module in modules:
        try:
            found[module] = import_module(module)
        except _BROKEN as error:
            reason = " ".join(str(error).split()) or "no message"
            why = f"importing {module} raised {type(error).__name__}: {reason[:200]}"
            break
    factory = None
    if not why:
        factory = getattr(found[where], "FusedAdam", None)
        why = _mismatch(where, factory, keywords)
    package = found.get(next(iter(modules)))
    release = Release(str(getattr(package, "__version__", "")))
    return Probe(name, release, None if why else factory, why, install), found


def _mismatch(where: str, factory: Any, keywords: Iterable[str]) -> str:
    """Returns why an object is not the expected optimizer class; empty if it is."""
    if not (isinstance(factory, type) and issubclass(factory, Optimizer)):
        return f"{where} has no optimizer called FusedAdam"
    missing = sorted(set(keywords) - _keywords(factory))
    if missing:
        return f"{where}.FusedAdam does not take {', '.join(missing)}"
    return ""


def _keywords(factory: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(factory).parameters)
