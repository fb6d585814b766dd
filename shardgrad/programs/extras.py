"""Optional packages: which extra installs each, and the error that names a missing one."""

from __future__ import annotations

from importlib.util import find_spec

from shardgrad.errors import PartnerUnavailableError

# The extra of `pip install shardgrad[...]` that installs a package. Agrees with pyproject.toml; a
# test compares.
EXTRAS = {
    "click": "cli",
    "rich": "cli",
    "numpy": "checkpoint",
    "matplotlib": "plots",
    "safetensors": "safetensors",
    "tensorboard": "tensorboard",
}


def require(*packages: str, feature: str) -> None:
    """Checks that optional packages are installed. Imports none of them.

    Call it before any work is done, so that a missing package costs the user no time.

    Args:
        packages: names as imported, keys of `EXTRAS`.
        feature: what needs them, as the subject of a sentence: "--tensorboard".

    Raises:
        PartnerUnavailableError: at least one is missing; `fix` is the pip command.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        extras = ",".join(dict.fromkeys(EXTRAS[package] for package in missing))
        *first, last = missing
        names = f"{', '.join(first)} and {last}" if first else last
        raise PartnerUnavailableError(
            f"{feature} needs {names}, which {'is' if len(missing) == 1 else 'are'} not installed",
            expected=", ".join(packages),
            got=f"no {' and no '.join(missing)}",
            fix=f"pip install 'shardgrad[{extras}]'",
        )
