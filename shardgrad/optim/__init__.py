"""Optimizers over flat segments: fused, capturable, and without a look-up of each `param.grad`."""

from shardgrad.optim.adam import Adam, AdamW
from shardgrad.optim.muon import Muon
from shardgrad.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Muon"]
