"""`shardgrad doctor --audit`: a program against itself without its engine."""
