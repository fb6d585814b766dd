"""Stand-ins for packages that need a GPU or a build: plain torch, the documented contract, nothing
else.
"""
