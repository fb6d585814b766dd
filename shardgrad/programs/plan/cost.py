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

from shardgrad.programs.plan.hardware import BANDWIDTH_SHARE, MATMUL_SHARE, START_S, Machine
from shardgrad.programs.plan.recording import Event, Kernel, Transfer

# Of the bandwidth, by NCCL's protocols: LL sends a flag with every word, LL128 one with every 120
# bytes.
_PROTOCOL_SHARES = (0.5, 0.92, 1.0)
# Between nodes the host's processor takes part in LL and limits it, and a step inside a node takes
# at least as long as posting one to the network (`llMaxBws`, `getNetOverhead`).
_LL_BETWEEN_NODES = 20e9
_POST_S = 1e-6
_TREE_SHARE = 0.92


def nodes_of(axis: str, ranks: int, shards: int, devices_per_node: int) -> int:
    """Returns on how many nodes the ranks of a mesh axis are: neighboring ranks share a node,
    replicas are `shards` ranks apart.
    """
    stride = shards if axis == "replicate" else 1
    return -(-ranks // max(1, min(ranks, devices_per_node // stride)))


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
        gpu = self.machine.gpu
        rate, bandwidth = gpu.flops[kernel.dtype] * MATMUL_SHARE, gpu.bandwidth * BANDWIDTH_SHARE
        seconds = max(kernel.flops / rate, kernel.nbytes / bandwidth)
        return seconds * (self.compute_scale if kernel.is_of_model else 1.0)

    def transfer_s(self, transfer: Transfer) -> float:
        """Returns the seconds of one collective without other traffic on its links."""
        if transfer.ranks == 1:
            return 0.0
        if transfer.kind == "exchange":
            return self._exchange_s(transfer)
        options = [self._ring_s(transfer, protocol) for protocol in range(3)]
        if transfer.kind == "all-reduce":
            options += [self._tree_s(transfer, protocol) for protocol in range(3)]
        return min(options)

    def links_of(self, transfer: Transfer) -> str:
        """Returns what a collective goes over."""
        return "NVLink" if self._layout_of(transfer)[0] == 1 else "network"

    def _layout_of(self, transfer: Transfer) -> tuple[int, int]:
        """Returns the number of nodes of a collective, and of its ranks in one of them."""
        nodes = nodes_of(transfer.axis, transfer.ranks, self.shards, self.machine.node)
        return nodes, -(-transfer.ranks // nodes)

    def _bandwidth(self, transfer: Transfer, protocol: int) -> float:
        (nodes, per_node), inside = self._layout_of(transfer), self.machine.gpu.link.bandwidth
        share = _PROTOCOL_SHARES[protocol]
        if nodes == 1:
            return inside * share
        outside = self.machine.network_bandwidth(per_node)
        whole = min(inside, outside) if per_node > 1 else outside
        return min(whole * share, _LL_BETWEEN_NODES) if protocol == 0 else whole * share

    def _ring_s(self, transfer: Transfer, protocol: int) -> float:
        (nodes, per_node), ranks = self._layout_of(transfer), transfer.ranks
        link, card = self.machine.gpu.link, self.machine.card
        # With one rank in each node nothing hides a step of the network; NCCL then uses the tree's
        # latency.
        far = (card.tree_hop_s if per_node == 1 else card.hop_s)[protocol]
        near = max(link.hop_s[protocol], _POST_S if nodes > 1 else 0.0)
        rounds = 2 if transfer.kind == "all-reduce" else 1
        steps = (ranks - nodes) * near + (nodes - 1) * far
        moved = transfer.nbytes * (ranks - 1) / ranks / self._bandwidth(transfer, protocol)
        return START_S[protocol] + rounds * (steps + moved)

    def _exchange_s(self, transfer: Transfer) -> float:
        simple, link = 2, self.machine.gpu.link  # NCCL sends between two ranks with this protocol
        _, per_node = self._layout_of(transfer)
        each, near = transfer.nbytes / transfer.ranks, per_node - 1
        far = transfer.ranks - 1 - near
        inside = link.hop_s[simple] + near * each / link.bandwidth
        outside = 0.0
        if far:
            of_rank = self.machine.network_bandwidth(per_node) / per_node
            outside = self.machine.card.hop_s[simple] + far * (_POST_S + each / of_rank)
        return START_S[simple] + max(inside, outside)

    def _tree_s(self, transfer: Transfer, protocol: int) -> float:
        nodes, per_node = self._layout_of(transfer)
        inside = (per_node - 1) * self.machine.gpu.link.tree_hop_s[protocol]
        outside = math.log2(nodes) * self.machine.card.tree_hop_s[protocol]
        moved = transfer.nbytes / (self._bandwidth(transfer, protocol) * _TREE_SHARE)
        return START_S[protocol] + 2 * (inside + outside + moved)


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
    own = (event for event in events if isinstance(event, Kernel) and event.is_of_model)
    return sum(map(cost.kernel_s, own))
