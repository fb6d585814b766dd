"""`tests.clients.torchtitan` with this engine."""

from __future__ import annotations

import shardgrad
from tests.clients.torchtitan import main

if __name__ == "__main__":
    with shardgrad.patch():
        main()
