"""`shardgrad train`: a complete, resumable training program on top of the engine."""
