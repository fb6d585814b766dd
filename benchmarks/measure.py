"""How costs are measured here: the way of `shardgrad bench`."""

from shardgrad.bench.measure import (
    Cost,
    cost_of,
    cost_on,
    loopback_nbytes,
    over_ranks,
    peak_rss_nbytes,
    ratios,
    settle,
    spread,
)

__all__ = [
    "Cost",
    "cost_of",
    "cost_on",
    "loopback_nbytes",
    "over_ranks",
    "peak_rss_nbytes",
    "ratios",
    "settle",
    "spread",
]
