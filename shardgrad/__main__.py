"""`python -m shardgrad`, which is also what the `shardgrad` script runs."""

from __future__ import annotations

import io
import os
import sys

from shardgrad.errors import PartnerUnavailableError
from shardgrad.programs.extras import require


def main() -> None:
    """Runs the command line, or names the extra that it needs and exits with status 2."""
    try:
        require("click", "rich", "numpy", feature="the command line")
    except PartnerUnavailableError as error:
        print(f"shardgrad: {error.what}: {error.fix}", file=sys.stderr)
        sys.exit(2)
    _write_what_can_be_written()
    try:
        from shardgrad.programs.cli import main as command_line
    except KeyboardInterrupt:
        print("shardgrad: interrupted.", file=sys.stderr)
        sys.exit(130)
    command_line(prog_name="shardgrad")


def _write_what_can_be_written() -> None:
    """Escapes characters that the terminal's encoding lacks, here and in ranks started from here.

    A model may write any character, and a run must not fail for it in its last second.
    """
    encoding = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    os.environ["PYTHONIOENCODING"] = f"{encoding}:backslashreplace"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
