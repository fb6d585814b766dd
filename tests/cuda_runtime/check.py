"""Checks a training program on CUDA without a GPU: can it be captured, and does every wait have its
place?

    .venv-cuda/bin/python -m tests.cuda_runtime.check my_program:train --ranks 2

The function builds its model on "cuda", takes some steps, and returns losses: numbers, or tensors,
in a list. It is called once for each order of work, on every rank, with a process group of NCCL.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.cuda_runtime import inspection
from tests.support.ranks import RankError, Ranks

ORDERS = ("host", "late", "1", "2", "3")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def run(name: str, order: str) -> dict[str, Any]:
    """Calls the function on this rank; returns what it returned as text, and what was seen."""
    torch.manual_seed(0)
    inspection.findings(forget=True)
    graphs = inspection.graphs()
    before = inspection.calls()
    with inspection.order(order):
        inspection.trace(True)
        value = resolve_name(name)()
        torch.cuda.synchronize()
        conflicts = inspection.conflicts(inspection.log())
        inspection.trace(False)
        leaves = [
            leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(value)
        ]
    captured = [inspection.graph(index) for index in range(graphs, inspection.graphs())]
    return {
        "values": repr(leaves),
        "wrong": [*conflicts, *inspection.findings(forget=True)],
        "graphs": ", ".join(described(graph) for graph in captured if graph) or "none",
        "waits": sum(inspection.calls().get(each, 0) - before.get(each, 0) for each in WAITS),
    }


def described(graph: inspection.Work) -> str:
    edges = sum(len(node["before"]) for node in graph["nodes"])
    return f"{len(graph['nodes'])} nodes, {edges} edges, {graph['launches']} replays"


def check(name: str, world_size: int, orders: Sequence[str] = ORDERS) -> list[str]:
    """Prints what was seen; returns what is wrong, in words."""
    ranks = Ranks(world_size, backend="cpu:gloo,cuda:nccl")
    wrong: list[str] = []
    right: list[str] = []
    try:
        for order in orders:
            seen = ranks.run(run, name, order, timeout_s=600)
            right = right or [each["values"] for each in seen]
            for rank, each in enumerate(seen):
                where = f"order {order}, rank {rank}"
                if each["values"] != right[rank]:
                    wrong.append(f"{where}: other values, so a wait is missing")
                wrong += [f"{where}: {text}" for text in each["wrong"]]
            print(
                f"order {order}: graphs: {seen[0]['graphs']}; the host waited {seen[0]['waits']} "
                "times",
                flush=True,
            )
    except RankError as error:
        wrong.append(f"order {order}: {error}")
    finally:
        ranks.stop()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cuda_runtime.check", description=__doc__.splitlines()[0]
    )
    parser.add_argument("function", help="module:function")
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    if not inspection.installed():
        sys.exit(
            "torch.cuda does not run on the host here: make test-cuda sets up .venv-cuda, whose "
            "Python does"
        )
    wrong = check(options.function, options.ranks)
    for each in dict.fromkeys(wrong):
        print(each)
    print(
        f"{len(wrong)} things are wrong"
        if wrong
        else "the same bits in every order, and nothing to report"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
