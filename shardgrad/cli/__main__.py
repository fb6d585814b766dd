"""`python -m shardgrad.cli`, which is what torchrun can start."""

from shardgrad.cli import main

if __name__ == "__main__":
    main(prog_name="shardgrad")
