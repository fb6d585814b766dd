"""All doors through which files and words come in, and what is fed to them."""

from __future__ import annotations

from tests.fuzz import checkpoints, commands, runs
from tests.fuzz.inputs import Target

TARGETS: dict[str, Target] = {**checkpoints.TARGETS, **runs.TARGETS, **commands.TARGETS}
