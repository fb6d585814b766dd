"""Optimizers of other projects that need help with sharded parameters. `import shardgrad` imports
none of them.
"""
