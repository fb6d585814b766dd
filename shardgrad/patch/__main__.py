"""Running a program that was written for FSDP2, unchanged: `python -m shardgrad.patch
script.py`.
"""

from __future__ import annotations

import os
import runpy
import sys

import click

from shardgrad.patch import patch

_TRANSPARENT = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": ["-h", "--help"],
}


@click.command(context_settings=_TRANSPARENT)
@click.option(
    "-m", "as_module", is_flag=True, help="SCRIPT is the name of a module, as in `python -m`."
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(as_module: bool, script: str, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT with its ARGUMENTS as `python` would, with shardgrad instead of FSDP2.

    On several ranks: torchrun --nproc-per-node 2 -m shardgrad.patch SCRIPT. Processes that SCRIPT
    starts are not patched; use `with shardgrad.patch():` in what they run.
    """
    sys.argv = [script, *arguments]
    with patch():
        if as_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            if not sys.flags.safe_path:
                sys.path[0] = os.path.dirname(os.path.abspath(script))
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(prog_name="python -m shardgrad.patch")
