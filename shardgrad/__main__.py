"""`python -m shardgrad`, which is also what the `shardgrad` script runs."""

from __future__ import annotations

import io
import os
import signal
import sys
from types import FrameType

from shardgrad.errors import PartnerUnavailableError
from shardgrad.programs.extras import require


def main() -> None:
    """Runs the command line, or names the extra that it needs and exits with status 2."""
    # Until a command has something to clean up: `import torch` may lose a KeyboardInterrupt, or
    # abort.
    signal.signal(signal.SIGINT, _end)
    try:
        require("click", "rich", "numpy", feature="the command line")
    except PartnerUnavailableError as error:
        print(f"shardgrad: {error.what}: {error.fix}", file=sys.stderr)
        sys.exit(2)
    _write_what_can_be_written()
    from shardgrad.programs.cli import main as command_line

    command_line(prog_name="shardgrad")


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"shardgrad: interrupted.\n")
    os._exit(130)


def _write_what_can_be_written() -> None:
    """Escapes characters that the terminal's encoding lacks, and drops what goes to a closed
    output, here and in ranks started from here.

    A model may write any character, and a run must not fail for it in its last second.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: the next file to be opened would have its number
            nowhere = open(os.devnull, "w")  # noqa: SIM115  # until the end
            os.set_inheritable(nowhere.fileno(), True)
            setattr(sys, name, nowhere)
    encoding = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    os.environ["PYTHONIOENCODING"] = f"{encoding}:backslashreplace"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
