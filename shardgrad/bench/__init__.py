"""`shardgrad bench`: engines side by side, interleaved, each in processes of its own.

What the parent process imports (everything but `rank`, `contestants`, `floors`, `foreign`, `models`,
`profiling` and `traffic`) does not import torch.
"""
