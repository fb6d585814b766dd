"""The version of this package, and the commit it was made from."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

__version__ = "0.1.0.dev0"  # of a release: without .dev0, as in pyproject.toml

_PACKAGE = Path(__file__).parent


@cache
def commit() -> str | None:
    """Returns the commit, with `-dirty` if files were changed; None if it is not known.

    An installed package has it in a file, which the build wrote; in a clone git is asked.
    """
    import subprocess  # which `import shardgrad` does not need

    file, root = _PACKAGE / "_commit.txt", _PACKAGE.parent
    if file.is_file():
        return file.read_text(encoding="utf-8").strip()
    if not (root / ".git").exists():
        return None
    command = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--abbrev=12",
        "--exclude=*",
        "--dirty",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def described() -> str:
    """Returns the version and the commit, as in "0.1.0.dev0 (commit 0123456789ab)"."""
    return f"{__version__} (commit {commit() or 'unknown'})"


@cache
def digest_of_sources() -> str:
    """Returns a digest of the package's Python files.

    Unlike the commit it tells changed files apart, and is the same however the package was
    installed.
    """
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
