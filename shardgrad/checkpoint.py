"""Another name of `shardgrad.programs.checkpoint`, for `import shardgrad.checkpoint`."""

import sys

from shardgrad.programs import checkpoint
from shardgrad.programs.checkpoint import *  # noqa: F403  # for type checkers

sys.modules[__name__] = checkpoint
