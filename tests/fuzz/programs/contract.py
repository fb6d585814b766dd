"""Which operation may follow which: what a training script may rely on, of any engine.

`State` follows a program without running it. The generator asks it before it adds an operation, and
shrinking before it tries a shorter program.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace

from tests.fuzz.programs.program import Block, Op, Program

# Ends the state in which a failed backward is not cleared yet.
_FORWARDS = ("train", "evaluate", "forward", "participate")
_SETTINGS = ("sync", "sync_unit", "all_reduce", "last", "keep", "whole", "divide")
_GRAPHED = (
    *("train", "evaluate", "sync", "all_reduce", "last", "clip", "scaled", "step", "zero"),
    "freeze",
)
MOST_GRAPHS = 2


def blocks_of(program: Program) -> list[Block]:
    """Returns all blocks, also those inside others."""

    def walk(blocks: tuple[Block, ...]) -> Iterator[Block]:
        for block in blocks:
            yield block
            yield from walk(block.inner)

    return list(walk(program.model.blocks))


class State:
    """What is known about a program after some of its operations."""

    def __init__(self, program: Program) -> None:
        self.program = program
        blocks = blocks_of(program)
        self._reenters = any(block.recompute == "reentrant" for block in blocks)
        self._recomputes = any(block.recompute for block in blocks)
        self._graphs = 0
        self._ran = False
        self._failed = False
        self._failed_forward = False
        self._in_flight = False  # a backward that is not the last has left reductions in flight
        self._waiting = False  # gradients wait on each rank
        self._all_sync = True
        self._all_reduce = True
        self._is_last = True
        self._saved = False
        self._assigned = False
        self._shrinks = any(block.kind == "shrinks" for block in blocks)
        # The next forward gathers again, whether torch has counted a write or not.
        self._gathers = (
            program.sharding.stage == 3
            and program.sharding.reshard in (None, True)
            and not {"keep", "whole", "unshard"} & {op.do for op in program.ops}
        )
        self._froze = False
        self._library = program.optimizer.library
        self._has_new_optimizer()
        self._has_hooks = False
        self._keeps_root = program.sharding.reshard in (None, False)  # unsharded after forward

    def _has_new_optimizer(self) -> None:
        optimizer = self.program.optimizer
        self._groups = 1 + (optimizer.groups == 2 and not optimizer.partial)
        self._left_out = optimizer.partial
        self._edited = False
        self._removed = False  # a group; no optimizer can save its state

    @property
    def _is_quiet(self) -> bool:
        """Between two steps, with nothing open."""
        return not (self._graphs or self._in_flight)

    @property
    def _settles(self) -> bool:
        """A backward leaves nothing for later ones."""
        return self._all_sync and self._all_reduce and self._is_last

    @property
    def _is_reduced(self) -> bool:
        return self._is_quiet and self._settles and not self._waiting

    def allows(self, op: Op) -> bool:
        """Returns whether an operation may come next."""
        model, do = self.program.model, op.do
        # On a device, hooks warn of lost gradients on a thread that belongs to no rank.
        cleared_by = (*_FORWARDS, "zero", "" if self.program.on_device else "backward")
        if self._failed and do not in cleared_by:
            return False
        if self._failed and op.how == "zeros" and self.program.on_device:
            return False  # a hazard that harms no one: the next forward drops what is zeroed
        if do == "poke" and self._failed_forward and self.program.on_device:
            return False  # another one: the next forward drops what is being gathered
        if do in ("poke", "load", "resume") and self.program.optimizer.event:
            return False  # the next forward waits for the update alone
        if self._shrinks and do in ("forward", "fail_forward", "fail_backward", "participate"):
            return False  # another forward before the backward, or on some ranks
        if self.program.sharding.gradients == "decoupled" and (
            do == "hook" or op.how in ("torch", "other") or op.how.startswith("torch ")
        ):
            return False  # they read `param.grad`
        if do == "poke" and op.how in ("data", "at once") and not self._gathers:
            return False
        if do == "forward":
            return self._graphs < MOST_GRAPHS and not self._failed
        if do == "backward":
            return op.n < self._graphs
        if do == "partial":
            if not (self._is_quiet and op.n < len(model.blocks)):
                return False
            # Before the root has run, a block is a root of its own, and reduces nothing of others.
            if self._waiting and not self._ran:
                return False
            # What it shares with others belongs to the root.
            is_shared = any(op.n in tie for tie in model.ties)
            if is_shared or op.n in model.several or not model.blocks[op.n].unit:
                return False
            # A rank whose expert is frozen would have no backward, in which the others gather.
            is_frozen = self._froze or model.blocks[op.n].frozen
            return not (is_frozen and model.blocks[op.n].kind == "experts")
        if do in ("input_grad", "hand"):
            if do == "hand" and not self._keeps_root:
                return False
            return self._is_quiet and self._is_last and not self._reenters
        if do == "fail_forward":
            return bool(model.order)
        if do == "fail_backward":
            is_at_rest = self._settles and not (self._in_flight or self._waiting)
            return is_at_rest and op.n < len(model.order) and not self._has_hooks
        if do == "look":
            return not self._in_flight
        if do == "clip" and op.how == "torch" and self.program.sharding.offload:
            # It reduces on the CPU, which a backend for devices cannot.
            return not self._in_flight and not self.program.on_device
        if do in ("zero", "clip", "write"):
            is_joined = (do == "zero" and op.how == "model") or (do == "clip" and op.how != "torch")
            return is_joined or not self._in_flight
        if do == "save" and self._removed:
            return False
        if do in ("step", "divide") and self._waiting:
            return False  # refused, or what is summed was divided
        if do in ("step", "poke", "save", *_SETTINGS):
            return (do in ("step", *_SETTINGS) and not self._graphs) or self._is_quiet
        if do in ("load", "resume"):
            return (
                self._saved
                and self._is_quiet
                and ((do == "load" and op.how == "model") or not self._edited)
            )
        if do in ("assign", "renew", "cast"):
            is_there = {"saved": self._saved, "former": self._assigned}.get(op.how, True)
            return self._is_reduced and is_there
        if do == "nan":
            return self._is_reduced and self._library == "shardgrad" and not self._reenters
        if do == "scaled":
            is_there = not (self.program.on_device and "torch" in op.how)
            # torch's scaler looks at the gradients of its optimizer, ours at all that were clipped.
            is_seen = not (self._left_out and "inf" in op.how)
            return self._is_reduced and not self._reenters and is_there and is_seen
        if do == "participate":
            return self._is_reduced and not model.guess
        if do == "freeze" and self._graphs:
            # A checkpoint that runs again would save other tensors than it did, which torch
            # refuses.
            return not self._recomputes
        if do == "graphed":
            is_capturable = (
                self._library == "shardgrad"
                and not self._left_out
                and not self.program.sharding.offload
            )
            return (
                self.program.on_device
                and self._is_reduced
                and is_capturable
                and not self._reenters
                and not self._has_hooks
                and self._has_inside(op.inside)
            )
        if do == "edit":
            if op.how == "add":
                return self._is_quiet and self._left_out
            if op.how == "remove":
                return self._is_quiet and self._groups > 1
            return self._is_quiet
        if do == "hook":
            # A hook runs for each reduction: more often where reentrant checkpoints bring gradients
            # late.
            return not self._reenters and not self._in_flight
        if do in ("unshard", "reshard"):
            return self._ran
        if do == "move":
            return not self._graphs and self.program.on_device
        if do == "skip":
            return not self._graphs and op.n < len(model.blocks)
        return True

    def _has_inside(self, inside: tuple[Op, ...]) -> bool:
        """Returns whether operations may be in a graph, one call after another."""
        state = copy(self)
        for op in (*inside, *inside):
            if op.do not in _GRAPHED or "torch" in op.how or not state.allows(op):
                return False
            state.after(op)
        return state._is_reduced

    def after(self, op: Op) -> None:
        """Takes note that an operation was done."""
        do = op.do
        for inner in op.inside if do == "graphed" else ():
            self.after(inner)
        if do in (
            *_FORWARDS,
            "fail_backward",
            "fail_forward",
            "input_grad",
            "hand",
            "nan",
            "scaled",
            "participate",
        ):
            self._ran = True
        self._failed &= do not in (*_FORWARDS, "backward")
        if do in _FORWARDS:
            self._failed_forward = False
        if do == "forward":
            self._graphs += 1
        elif do == "backward" and op.how != "retain":
            self._graphs -= 1
        elif do == "fail_backward":
            self._failed = True
        elif do == "fail_forward":
            self._failed_forward = True
        elif do in ("sync", "sync_unit"):
            self._all_sync = bool(op.n % 2) if do == "sync" else self._all_sync and bool(op.n % 2)
            self._all_reduce = self._all_sync
        elif do == "all_reduce":
            self._all_reduce = bool(op.n)
        elif do == "last":
            self._is_last = bool(op.n)
        elif do == "step" or (do == "zero" and op.how == "model"):
            self._in_flight = False
        elif do == "save":
            self._saved = True
        elif do == "freeze":
            self._froze = True
        elif do == "edit":
            self._edited |= op.how in ("add", "remove")
            self._removed = op.how == "remove" or (self._removed and op.how != "add")
            if op.how == "add":
                self._groups, self._left_out = self._groups + 1, False
            elif op.how == "remove":
                self._groups, self._left_out = self._groups - 1, True
        elif do in ("assign", "renew"):
            self._assigned |= do == "assign" and op.how != "own"
            self._has_new_optimizer()
            self._has_hooks &= do == "renew"
            if op.how == "other":
                self._library = "torch" if self._library == "shardgrad" else "shardgrad"
        elif do == "hook":
            self._has_hooks = True
        elif do == "whole":
            self._keeps_root = bool(op.n)
        elif do == "resume":
            self._keeps_root = self.program.sharding.reshard in (None, False)
            self._all_sync = self._all_reduce = self._is_last = True
            self._waiting = self._has_hooks = False
        if do in ("train", "backward", "partial", "input_grad", "hand") and op.how != "no_grad":
            self._in_flight = not self._is_last and self.program.on_device
            is_kept = not self._is_last and self.program.sharding.stage == 1
            stays = is_kept or not (self._all_sync and self._all_reduce)
            self._waiting = stays or do == "hand"


def is_valid(program: Program) -> bool:
    """Returns whether all of a program is within the contract."""
    if not fits(program):
        return False
    state = State(program)
    for op in program.ops:
        if not state.allows(op):
            return False
        state.after(op)
    return True


def fits(program: Program) -> bool:
    """Returns whether model, sharding and optimizer go together."""
    model, sharding, optimizer = program.model, program.sharding, program.optimizer
    blocks = blocks_of(program)
    count = len(model.blocks)
    if not count or any(index >= count for index in model.order):
        return False
    for first, second in model.ties:
        has_lin = all(
            model.blocks[i].kind not in ("mlp", "experts") for i in (first, second) if i < count
        )
        if max(first, second) >= count or first == second or not has_lin:
            return False
    if model.several and (
        max(model.several) >= count or not all(model.blocks[i].unit for i in model.several)
    ):
        return False
    for block in blocks:
        # What runs again in backward has to do what it did in forward.
        outer_and_inner = (block, *block.inner) if block.recompute else ()
        if any(each.kind in ("experts", "buffer", "again", "shrinks") for each in outer_and_inner):
            return False
        if block.kind in ("buffer", "shrinks") and sharding.param_dtype:
            return False
        # Torch recomputes in the stream of whichever saved tensor is needed first.
        if block.recompute and (
            block.apart
            or set(block.sides) - {0}
            or any(inner.stream or inner.sides or inner.hooks >= 0 for inner in block.inner)
        ):
            return False
        if block.kind == "again" and any(
            inner.recompute == "reentrant" or inner.kind == "shrinks" for inner in block.inner
        ):
            return False  # it runs twice
    if any(block.kind == "shrinks" for block in blocks) and (
        model.guess or model.ties or len(set(model.order)) < len(model.order)
    ):
        return False  # nor may autograd have saved the weight that forward writes once more
    if sharding.gradients == "decoupled" and optimizer.library == "torch":
        return False
    if sharding.stage in (1, 2) and sharding.reshard not in (None, False):
        return False
    if sharding.stage == "hfsdp" and (sharding.mesh == "flat" or sharding.columns):
        return False
    if sharding.stage == "hfsdp" and not isinstance(sharding.reshard, bool | None):
        return False
    is_int = isinstance(sharding.reshard, int) and not isinstance(sharding.reshard, bool)
    if is_int and (sharding.mesh != "flat" or program.ranks != 4):
        return False
    return not (optimizer.partial and count < 2) and not (optimizer.groups == 2 and count < 2)


def shortened(program: Program, ops: tuple[Op, ...]) -> Program | None:
    """Returns the program with other operations, or None if that is not within the contract."""
    made = replace(program, ops=ops)
    return made if is_valid(made) else None
