"""What FSDP2 cannot do, and how far apart two right results may be. Every rule is documented
behavior.
"""

from __future__ import annotations

from tests.fuzz.programs.contract import blocks_of
from tests.fuzz.programs.program import Program

# Operations that FSDP2 does not have, or gets wrong, each with the reason.
_NOT_IN_FSDP2 = {
    "participate": "it has no participation",
    "nan": "it does not skip a step",
    "graphed": "it has no graphed step",
    "freeze": "what is changed about requires_grad after the first forward is lost",
    "fail_forward": "an exception in forward leaves its state as it was",
    "fail_backward": "an exception in backward leaves its state as it was",
}


def why_not_fsdp2(program: Program) -> str:
    """Returns why FSDP2 is not compared, or ""."""
    if program.is_simulated:
        return "simulated devices"
    for op in program.ops:
        if op.how == "inference":
            return "parameters unsharded in inference mode cannot be trained"
        if op.do in _NOT_IN_FSDP2:
            return _NOT_IN_FSDP2[op.do]
    if program.model.ties:
        return "a weight that units share has to be in one unit"
    if any(block.kind == "experts" for block in blocks_of(program)):
        return "sizes of its messages depend on which parameters a rank used"
    if program.model.guess or any(block.kind == "again" for block in blocks_of(program)):
        return "a module that calls itself is resharded by the inner call"
    runs_twice = len(set(program.model.order)) < len(program.model.order)
    if program.model.several and any(block.recompute for block in blocks_of(program)):
        return "checkpointed modules of a list are resharded before they run again"
    if runs_twice and any(block.recompute == "reentrant" for block in blocks_of(program)):
        return "a reentrant checkpoint that runs twice leaves gradients out"
    in_order = tuple(range(len(program.model.blocks)))
    does_partial = any(op.do == "partial" for op in program.ops)
    uses_other_weights = does_partial or any(op.how == "side" for op in program.ops)
    holds_sums = program.sharding.mesh == "hsdp" and any(
        op.do == "all_reduce" for op in program.ops
    )
    if program.sharding.prefetch in ("forward", "both") and (
        program.model.order != in_order or does_partial
    ):
        return "what is prefetched and not used stays as it was when parameters are written"
    if _writes_under_an_all_gather(program):
        return "an all-gather started by hand is not dropped when parameters are written"
    if program.model.several and any(op.how == "side" for op in program.ops):
        return "a list of modules is not gathered when backward comes to the first of them only"
    if program.sharding.columns and program.sharding.reshard == 2 and program.ranks == 4:
        return "it hangs where Shard(1) and resharding to fewer ranks meet"
    if does_partial and any(op.do == "resume" for op in program.ops):
        return "a unit that runs before the root makes itself a root"
    if uses_other_weights and holds_sums:
        return "a sum that waits for its all-reduce has the sizes of one backward's gradients"
    if (
        program.sharding.stage == 1
        and _does(program, "hook")
        and _does(program, "last", is_on=False)
    ):
        return "without stage 1 each micro-batch is reduced, which a hook sees"
    stays = _does(program, "sync", is_on=False) or _does(program, "sync_unit", is_on=False)
    if stays and program.sharding.reduce_dtype and program.model.order != in_order:
        return "without synchronization it looks for gradients of units that never ran"
    if program.sharding.divide:
        return "its divide factor needs a sum that gloo does not have"
    if program.sharding.stage == "hfsdp":
        return "it has no HFSDP"
    if program.sharding.wire_dtype:
        return "its gradients travel in the dtype that they are reduced in"
    return ""


def _does(program: Program, do: str, *, is_on: bool | None = None) -> bool:
    """Returns whether a program has an operation, or one that switches something on or off."""
    return any(op.do == do and (is_on is None or bool(op.n % 2) is is_on) for op in program.ops)


def _writes_under_an_all_gather(program: Program) -> bool:
    """Returns whether `unshard(async_op=True)` comes before an update, with no forward between."""
    in_flight = False
    for op in program.ops:
        if op.do == "unshard" and op.how == "async":
            in_flight = True
        elif op.do in ("train", "evaluate", "forward", "input_grad", "hand"):
            in_flight = False
        elif in_flight and op.do in ("step", "poke", "load"):
            return True
    return False


def tolerance(program: Program) -> float:
    """Returns by how much results may differ, relative to the largest element."""
    sharding = program.sharding
    if "bfloat16" in (sharding.param_dtype, sharding.wire_dtype):
        # A rounding is 2**-9. Gradients of what is used several times are sums of rounded ones, and
        # momentum is a sum of gradients, which may cancel out while their roundings do not.
        return 2**-5
    if (
        sharding.param_dtype
        or sharding.reduce_dtype
        or any(op.do == "clip" and op.how != "torch" for op in program.ops)
    ):
        # A norm is a float32 scalar by contract, and so are low-precision sums: some ten roundings
        # of 6e-8 in each of some ten steps.
        return 1e-5
    return 1e-9  # float64: some thousand roundings of 1e-16, and a margin
