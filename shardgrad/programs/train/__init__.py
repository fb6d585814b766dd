"""The training program of `shardgrad train`: complete and resumable, on the engine's public
interface.
"""
