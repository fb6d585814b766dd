"""Durations of kernels, by a roofline, and of collectives, by latency and bandwidth.

Kernels. `max(flops / rate, bytes / bandwidth)`, with rate and bandwidth as fractions of the
manufacturer's peak. A measured MFU scales the kernels of forward and backward by one factor.

Collectives. The model by which NCCL selects its algorithms (`ncclTopoTuneModel` in
src/graph/tuning.cc): a start-up time, a latency for each step of a ring or tree, and bytes over a
bus bandwidth; the fastest of three protocols is taken:

    ring, all-gather or reduce-scatter of S bytes over n ranks on m nodes:
        start + (n - m) near + (m - 1) far + S (n - 1) / n / B
    ring, all-reduce: twice the steps, twice the bytes
    tree, all-reduce: start + 2 ((n / m - 1) near + log2(m) far) + 2 S / (0.92 B)
    exchange (all-to-all), which is not a ring: each rank sends S / n to each other rank. Those to
        other nodes pass the rank's own share of the network cards, once for every pair of ranks.

where B is the smaller of the link's bandwidth and the network bandwidth into a node for these
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from shardgrad.programs.plan.hardware import BANDWIDTH_SHARE, MATMUL_SHARE, Machine
from shardgrad.programs.plan.recording import Event, Kernel, Transfer

# Of the bandwidth, by NCCL's protocols: LL sends a flag with every word, LL128 one with every 120
# bytes.
_PROTOCOL_SHARES = (0.5, 0.92, 1.0)
# Between nodes the host's processor takes part in LL and limits it, and a step inside a node takes
# at least as long as posting one to the network (`llMaxBws`, `getNetOverhead`).
_LL_BETWEEN_NODES = 20e9
_POST_S = 1e-6
_TREE_SHARE = 0.92


@dataclass(frozen=True)
class AxisLayout:
    """The distribution of the ranks of one mesh axis over nodes.

    Attributes:
        ranks: number of ranks.
        nodes: number of nodes.
    """

    ranks: int
    nodes: int

    @classmethod
    def of(cls, axis: str, ranks: int, shards: int, devices_per_node: int) -> AxisLayout:
        """Places an axis: neighbouring ranks share a node, replicas are `shards` ranks apart."""
        stride = shards if axis == "replicate" else 1
        per_node = max(
            1, min(ranks, devices_per_node // stride if stride < devices_per_node else 1)
        )
        return cls(ranks, -(-ranks // per_node))

    @property
    def ranks_per_node(self) -> int:
        """Ranks of this axis in one node."""
        return -(-self.ranks // self.nodes)


@dataclass(frozen=True)
class CostModel:
    """Durations on a machine.

    Attributes:
        machine: the machine.
        shards: size of the shard axis, which determines the distance between replicas.
        compute_scale: factor on the roofline's duration of kernels in forward and backward.
    """

    machine: Machine
    shards: int
    compute_scale: float = 1.0

    def kernel_s(self, kernel: Kernel) -> float:
        """Returns the seconds of one kernel, without its launch."""
        device = self.machine.device
        rate = device.flops[kernel.dtype] * MATMUL_SHARE
        bandwidth = device.bandwidth * BANDWIDTH_SHARE
        seconds = max(kernel.flops / rate, kernel.nbytes / bandwidth)
        return (
            seconds
            if kernel.is_engine or kernel.phase == "optimizer"
            else seconds * self.compute_scale
        )

    def transfer_s(self, transfer: Transfer) -> float:
        """Returns the seconds of one collective without other traffic on its links."""
        if transfer.ranks == 1:
            return 0.0
        layout = self._layout_of(transfer)
        if transfer.kind == "exchange":
            return self._exchange_s(transfer, layout)
        options = [self._ring_s(transfer, layout, protocol) for protocol in range(3)]
        if transfer.kind == "all-reduce":
            options += [self._tree_s(transfer, layout, protocol) for protocol in range(3)]
        return min(options)

    def links_of(self, transfer: Transfer) -> str:
        """Returns "network" if a collective leaves the node, else the name of the link inside."""
        return self.machine.link.name if self._layout_of(transfer).nodes == 1 else "network"

    def _layout_of(self, transfer: Transfer) -> AxisLayout:
        return AxisLayout.of(
            transfer.axis, transfer.ranks, self.shards, self.machine.devices_per_node
        )

    def _bandwidth(self, layout: AxisLayout, protocol: int) -> float:
        inside, share = self.machine.link.bandwidth, _PROTOCOL_SHARES[protocol]
        if layout.nodes == 1:
            return inside * share
        outside = self.machine.network_bandwidth(layout.ranks_per_node)
        whole = min(inside, outside) if layout.ranks_per_node > 1 else outside
        return min(whole * share, _LL_BETWEEN_NODES) if protocol == 0 else whole * share

    def _ring_s(self, transfer: Transfer, layout: AxisLayout, protocol: int) -> float:
        machine = self.machine
        # With one rank in each node nothing hides a step of the network; NCCL then uses the tree's
        # latency.
        far = machine.network.tree_hop_s if layout.ranks_per_node == 1 else machine.network.hop_s
        rounds = 2 if transfer.kind == "all-reduce" else 1
        near = machine.link.hop_s[protocol]
        if layout.nodes > 1:
            near = max(near, _POST_S)
        steps = (layout.ranks - layout.nodes) * near + (layout.nodes - 1) * far[protocol]
        bandwidth = self._bandwidth(layout, protocol)
        moved = rounds * transfer.nbytes * (layout.ranks - 1) / layout.ranks
        return machine.start_s[protocol] + rounds * steps + moved / bandwidth

    def _exchange_s(self, transfer: Transfer, layout: AxisLayout) -> float:
        machine, simple = self.machine, 2  # NCCL sends between two ranks with this protocol
        each, near = transfer.nbytes / layout.ranks, layout.ranks_per_node - 1
        far = layout.ranks - 1 - near
        inside = machine.link.hop_s[simple] + near * each / machine.link.bandwidth
        outside = 0.0
        if far:
            of_rank = machine.network_bandwidth(layout.ranks_per_node) / layout.ranks_per_node
            outside = machine.network.hop_s[simple] + far * (_POST_S + each / of_rank)
        return machine.start_s[simple] + max(inside, outside)

    def _tree_s(self, transfer: Transfer, layout: AxisLayout, protocol: int) -> float:
        machine = self.machine
        inside = (layout.ranks_per_node - 1) * machine.link.tree_hop_s[protocol]
        outside = math.log2(layout.nodes) * machine.network.tree_hop_s[protocol]
        bandwidth = self._bandwidth(layout, protocol) * _TREE_SHARE
        return machine.start_s[protocol] + 2 * (inside + outside) + 2 * transfer.nbytes / bandwidth


def model_flops(events: Iterable[Event]) -> float:
    """Returns PaLM's count of FLOPs of a step (arXiv 2204.02311, appendix B): three times those of
    forward.

    Recomputation is not counted. Attention counts as if it were not causal.
    """
    return 3 * sum(e.palm_flops for e in events if isinstance(e, Kernel) and e.phase == "forward")


def compute_s(events: Iterable[Event], cost: CostModel) -> float:
    """Returns the sum of the durations of the model's kernels in forward and backward, in
    seconds.
    """
    own = (
        e for e in events if isinstance(e, Kernel) and not e.is_engine and e.phase != "optimizer"
    )
    return sum(cost.kernel_s(kernel) for kernel in own)
