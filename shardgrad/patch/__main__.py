"""Runs an unmodified FSDP2 program with this engine: `python -m shardgrad.patch script.py`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence

from shardgrad.patch import patch


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shardgrad.patch",
        description="Run SCRIPT with its ARGUMENTS as `python` would, with shardgrad instead of "
        "FSDP2.",
        epilog="On several ranks: torchrun --nproc-per-node 2 -m shardgrad.patch SCRIPT. Processes "
        "that SCRIPT starts are not patched; use `with shardgrad.patch():` in what they run.",
        usage="%(prog)s [-h] [-m] SCRIPT [ARGUMENTS]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-m",
        dest="as_module",
        action="store_true",
        help="SCRIPT is the name of a module, as in `python -m`",
    )
    # All arguments after SCRIPT belong to it, including options.
    parser.add_argument("script", metavar="SCRIPT", nargs=argparse.REMAINDER)
    return parser


def main(command: Sequence[str] | None = None) -> None:
    """Runs a script or a module as `__main__`, patched."""
    parser = _parser()
    given = parser.parse_args(command)
    if not given.script:
        parser.error("the name of a SCRIPT is missing")
    script, *_ = sys.argv = given.script
    if given.as_module:
        exists = importlib.util.find_spec(script.partition(".")[0]) is not None
    else:
        exists = os.path.exists(script)
    if not exists:
        parser.error(f"there is no {'module' if given.as_module else 'file'} {script}")
    with patch():
        if given.as_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            if not sys.flags.safe_path:
                sys.path[0] = os.path.dirname(os.path.realpath(script))
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
