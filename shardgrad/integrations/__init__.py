"""Optimizers of other projects on sharded parameters. `import shardgrad` does not import this
package.

`shardgrad.integrations.transformer_engine.FusedAdam` and `shardgrad.integrations.apex.FusedAdam`
wrap the optimizers of these projects. A project's package is imported when its optimizer is built,
since its native libraries may be large or broken; if it cannot be used, the error says why.
"""
