"""The store of ranks that are started one by one."""

from __future__ import annotations

import signal
from typing import Any

from torch.distributed import TCPStore

from tests.support.processes import CONTEXT


class Store:
    """The store of ranks that are launched, in a process of its own, as torchrun's agent has it."""

    def __init__(self) -> None:
        ours, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_keep_store, args=(theirs,), daemon=True)
        self.process.start()
        self.port = ours.recv()

    def variables(self, rank: int, ranks: int) -> dict[str, str]:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        numbers |= {"MASTER_PORT": self.port, "DRILL_STORE_PID": self.process.pid}
        agent = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return agent | {name: str(number) for name, number in numbers.items()}


def _keep_store(pipe: Any) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()
