"""Private names of FSDP2 that torch's own tools use."""
