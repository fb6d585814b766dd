"""Other ways to shard the same model over the same ranks, for a plan to be compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from shardgrad.programs.plan.models import PlanModel, build_plan_model
from shardgrad.programs.plan.request import Request

__all__ = ["variants"]


def variants(request: Request) -> Iterator[tuple[str, Request]]:
    """Yields requests that send less, or the same in fewer or better hidden messages, each with the
    options that it adds. Not every model can be sharded in each way.
    """
    plan_model = build_plan_model(request)
    blocks = len(plan_model.alike())
    if request.stage == "3" and blocks:
        yield "--stage auto", request.but(stage="auto")
    # A forgotten embedding and head are in the root's unit: gathered before the first layer runs,
    # and unsharded from there to the end of backward. Of a single one the root may as well be made.
    outside = [name for name in _own_matrices(plan_model) if name not in request.units]
    if len(outside) > 1:
        flags = " ".join(f"--unit {name}" for name in outside)
        yield flags, request.but(units=(*request.units, *outside))
    # A message that is shorter than its latency costs as much as one of twice the size.
    together = 2 * request.blocks_per_unit
    if together <= blocks:
        yield f"--blocks-per-unit {together}", request.but(blocks_per_unit=together)


def _own_matrices(plan_model: PlanModel) -> list[str]:
    """Returns the modules outside of the blocks that have a matrix which no other module shares."""
    module = plan_model.module
    owners = Counter(id(param) for _, param in module.named_parameters(remove_duplicate=False))

    def has_its_own(name: str) -> bool:
        params = module.get_submodule(name).parameters(recurse=False)
        return any(param.dim() > 1 and owners[id(param)] == 1 for param in params)

    return [*filter(has_its_own, plan_model.outside())]
