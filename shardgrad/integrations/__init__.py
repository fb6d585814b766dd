"""Optimizers of other projects on sharded parameters. `import shardgrad` does not import this
package, and it imports the other project's when the optimizer is built.
"""
