"""What a layer of Llama-8B launches in a step beside FSDP2, counted by
`tests.cuda_runtime.launches`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


@cache
def of_a_layer(engine: str, ranks: int) -> Counter[str]:
    command = [sys.executable, "-m", "tests.cuda_runtime.launches", engine, str(ranks)]
    environment = os.environ | {"HOSTCUDA_VALUES": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return Counter(json.loads(done.stdout.splitlines()[-1]))


def ours_alone(ranks: int) -> float:
    return of_a_layer("shardgrad", ranks)["kernel"] - of_a_layer("none", 1)["kernel"]


def test_a_layer_of_nine_parameters_of_which_five_travel_alone_is_three_nccl_launches() -> None:
    assert of_a_layer("fsdp2", 8)["nccl"] == 3
    # The process group of 2.15 launches what is coalesced one by one (docs/design/collectives.md).
    assert of_a_layer("shardgrad", 8)["nccl"] == (13 if torch.__version__ >= "2.15" else 3)


def test_a_layer_adds_no_more_kernels_than_fsdp2_and_at_most_eleven() -> None:
    fsdp2 = of_a_layer("fsdp2", 8)
    theirs = fsdp2["kernel"] + fsdp2["memcpy"] - of_a_layer("none", 1)["kernel"]
    # An all-gather: a cast for each message's kind, and a copy-out; both twice. Then pack, sum,
    # norm, the clip factor, update.
    assert ours_alone(8) == 2 * (1 + 1 + 1) + 5 <= theirs
    assert "memcpy" not in of_a_layer("shardgrad", 8)


def test_gradients_in_bfloat16_and_the_flags_behind_them_are_packed_in_one_launch() -> None:
    assert of_a_layer("shardgrad", 8)["shardgrad::cuda::pack_kernel"] == 1


def test_a_layer_on_one_rank_is_unpacked_twice_and_packed_once_and_sent_nowhere() -> None:
    alone = of_a_layer("shardgrad", 1)
    assert "nccl" not in alone
    assert "shardgrad::cuda::sum_kernel" not in alone
    assert ours_alone(1) == 2 + 1 + 3  # the last three are norm, clip factor and update
