"""Specifications of devices, links and networks, with the source of each number beside it.

Peaks are the manufacturers', dense, without sparsity. `MATMUL_SHARE` and `BANDWIDTH_SHARE` are the
fractions that a well-tuned transformer reaches; `--mfu` replaces them by a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import click

from shardgrad.programs.plan.request import MOST_RANKS
from shardgrad.programs.train.settings import Number, setting, whole

GB, GIB = 1e9, 2**30
# Of the peak, what cuBLAS reaches on transformer shapes at full power, and of the memory's
# bandwidth, what elementwise kernels reach.
MATMUL_SHARE, BANDWIDTH_SHARE = 0.70, 0.80
# Memory taken by the driver's context, NCCL's buffers and libraries' workspaces.
TAKEN_NBYTES = 2 * GIB
_MARGIN = 0.12


@dataclass(frozen=True)
class Link:
    """A link between devices or nodes, used by one collective at a time.

    Attributes:
        bandwidth: bytes per second; per device inside a node, per network card between nodes (see
            `Machine.network_bandwidth`).
        hop_s: seconds for a step of a ring, by NCCL's protocol (LL, LL128, Simple).
        tree_hop_s: seconds for a step of a tree, by NCCL's protocol.
    """

    bandwidth: float
    hop_s: tuple[float, float, float]
    tree_hop_s: tuple[float, float, float]


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        memory_nbytes: memory of the device in bytes.
        flops: dense peak FLOP/s in "fp32", and in "bf16" or another dtype of 16 bits.
        bandwidth: memory bandwidth in bytes per second.
        slowdowns: factors on the durations of forward and backward without a measurement, for the
            fastest, the likely and the slowest program: quantiles of published runs
            (docs/explanation/scaling.md).
        link: the link inside a node.
    """

    memory_nbytes: int
    flops: Mapping[str, float]
    bandwidth: float
    slowdowns: tuple[float, float, float]
    link: Link


def _us(*values: float) -> tuple[float, float, float]:
    first, second, third = (value * 1e-6 for value in values)
    return first, second, third


# NCCL 2.30, src/graph/tuning.cc (commit 5067397).
START_S = _us(6.6, 14.0, 8.4)  # until a collective sends its first byte, by NCCL's protocol
_NVLINK_HOPS = _us(0.6, 1.9, 3.4), _us(0.6, 1.25, 4.0)
_NET_HOPS = _us(2.7, 4.0, 14.0), _us(5.0, 8.5, 14.0)

_NVLINK3 = Link(240 * GB, *_NVLINK_HOPS)  # 12 links x 20 GB/s: nccl src/graph/topo.h
_NVLINK4 = Link(370 * GB, *_NVLINK_HOPS)  # 18 links x 20.6 GB/s, as measured: nccl-tests#212
_NVLINK5 = Link(722 * GB, *_NVLINK_HOPS)  # 18 links x 40.1 GB/s: nccl src/graph/topo.h

# Of 8 cards of 400 Gbit/s, 400 GB/s, collectives over 2 to 4 nodes reach 320 to 330 (nccl#1221):
# 0.8. NCCL itself counts 12 GB/s for 100 Gbit/s (src/graph/topo.h), 0.96, before contention.
_LINE_SHARE = 0.8


def _card(gbit: float) -> Link:
    return Link(gbit / 8 * GB * _LINE_SHARE, *_NET_HOPS)


NETWORKS: Mapping[str, Link] = {
    "ib800": _card(800),  # InfiniBand XDR
    "ib400": _card(400),  # InfiniBand NDR
    "ib200": _card(200),  # InfiniBand HDR
    "eth400": _card(400),  # Ethernet with RoCE
    "eth100": _card(100),
}

# Fastest, median and slowest of published runs: `python docs/scaling.py --slowdowns`. H100 stand
# for what came after them, of which too little is published.
_AMPERE, _HOPPER = (0.86, 0.99, 1.25), (0.97, 1.22, 1.50)

# NVIDIA's datasheets: A100 SXM of 80 GB, H100 SXM, H200 SXM, DGX B200.
DEVICES: Mapping[str, Device] = {
    "a100": Device(80 * GIB, {"fp32": 19.5e12, "bf16": 312e12}, 2039 * GB, _AMPERE, _NVLINK3),
    "h100": Device(80 * GIB, {"fp32": 67e12, "bf16": 989e12}, 3350 * GB, _HOPPER, _NVLINK4),
    "h200": Device(141 * 10**9, {"fp32": 67e12, "bf16": 989e12}, 4800 * GB, _HOPPER, _NVLINK4),
    "b200": Device(180 * 10**9, {"fp32": 75e12, "bf16": 2250e12}, 7700 * GB, _HOPPER, _NVLINK5),
}


@dataclass(frozen=True)
class Machine:
    """A cluster, as the command line describes it."""

    device: str = setting("h100", "Device type.", click.Choice(tuple(DEVICES)))
    node: int = setting(8, "Number of devices in a node.", whole(1, MOST_RANKS))
    network: str = setting(
        "ib400", "Type of the network cards that connect nodes.", click.Choice(tuple(NETWORKS))
    )
    cards: int | None = setting(
        None,
        "Number of network cards in a node.  [default: one per device]",
        whole(1, MOST_RANKS),
    )
    graph: bool = setting(
        False,
        "Assume that the step is one CUDA graph, without per-operation launches.",
    )
    mfu: float | None = setting(
        None,
        "Measured MFU of forward and backward without communication, to calibrate the predicted "
        "time.",
        Number(0, 1, min_open=True),
    )

    @property
    def gpu(self) -> Device:
        """What is known of its device type."""
        return DEVICES[self.device]

    @property
    def card(self) -> Link:
        """One of its network cards."""
        return NETWORKS[self.network]

    @property
    def margin_nbytes(self) -> int:
        """Memory to leave free: fragmentation of the allocator, and what NCCL and libraries take
        later.
        """
        return int(_MARGIN * self.gpu.memory_nbytes)

    @property
    def launch_s(self) -> float:
        """Host seconds per launched operation: eager PyTorch takes 5 to 10 microseconds in Python,
        dispatcher and driver.
        """
        return 0.0 if self.graph else 7e-6

    def network_bandwidth(self, ranks_per_node: int) -> float:
        """Returns the bandwidth into a node, in bytes per second, for a collective with these ranks
        per node.

        A collective that all devices of a node join uses all network cards, and its data enters
        each node once. A collective with fewer ranks in a node runs at the same time as those of
        the other devices, which use the other cards.
        """
        return (self.cards or self.node) * self.card.bandwidth * ranks_per_node / self.node
