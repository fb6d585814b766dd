"""What to tell a program whose ranks wait for each other, and what to type instead.

Pure: nothing here communicates. `rank_watch.py` collects what the ranks say.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Finding", "Post", "explain"]

_FEW = 4  # ranks that are named one by one


@dataclass(frozen=True)
class Post:
    """What a rank says of itself that waits, has refused to go on, or has ended.

    Attributes:
        rank: global rank.
        call: what the program has called, and where: "full_tensor() at train.py:12".
        collective: of the engine, that it waits for: "all-gather of layers.0"; empty in one of
            torch's.
        members: ranks that have to join that; empty where it is not known.
        error: what it has refused, or ended with; empty if nothing.
        fix: what to type instead of that.
        has_ended: its program has come to its end.
        started: the last collective of the engine that it has started, where hosts wait for the
            device and not in a collective: "all-gather of layers.0, number 12".
    """

    rank: int
    call: str
    collective: str = ""
    members: tuple[int, ...] = ()
    error: str = ""
    fix: str = ""
    has_ended: bool = False
    started: str = ""

    def to_json(self) -> str:
        """Returns it as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Post:
        """Returns what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "members": tuple(fields["members"])})

    @property
    def place(self) -> str:
        """Returns what tells it from ranks that wait elsewhere."""
        return self.collective or f"{self.call} {self.started}"

    @property
    def sentence(self) -> str:
        """Returns "rank 0 in full_tensor() at train.py:12"."""
        what = f"the {self.collective}, {self.call}" if self.collective else self.call
        what += f", after the {self.started}" if self.started else ""
        return f"rank {self.rank} in {what}"


@dataclass(frozen=True)
class Finding:
    """Why a rank waits.

    Attributes:
        what: names ranks, calls and lines.
        fix: what to type next.
        is_final: the collective cannot end any more: a rank that has to join it has failed, or has
            ended.
    """

    what: str
    fix: str
    is_final: bool = False


# By the function that a program calls.
_CURES = {
    "full_tensor": "full_tensor() is a collective: call it on every rank, and use the result on "
    "one",
    "get_model_state_dict": "get_model_state_dict is a collective: call it on every rank; with "
    "StateDictOptions(full_state_dict=True, cpu_offload=True) only rank 0 keeps the tensors",
    "get_optimizer_state_dict": "get_optimizer_state_dict is a collective: call it on every rank",
    "get_state_dict": "get_state_dict is a collective: call it on every rank",
    "set_model_state_dict": "set_model_state_dict is a collective: call it on every rank",
    "save": "save is a collective, in which every rank writes its part: call it on every rank",
    "load": "load is a collective: call it on every rank",
    "redistribute": "redistribute is a collective: call it on every rank",
    "distribute_tensor": "distribute_tensor is a collective: call it on every rank",
    "clip_grad_norm_": "the norm is over all ranks: call clip_grad_norm_ on every rank",
    "item": "item() of a DTensor is a collective: call it on every rank",
    "backward": "backward reduces gradients over all ranks: call it on every rank, also for a "
    "batch that is "
    "to be left out, or with shardgrad.participate(model): for ranks that have none",
    "forward": "a forward gathers parameters from all ranks: call the model on every rank, also to "
    "evaluate; "
    "with shardgrad.participate(model): for ranks that have no batch",
    "barrier": "every rank has to come to the barrier: take it out of `if rank == 0:`",
}
_ENDED = (
    "every rank has to take as many steps: end the loop on all of them at once, or "
    "with shardgrad.participate(model): for ranks that have no batch"
)
_OTHERWISE = (
    "every rank has to call the same collectives in the same order: look for `if rank == 0:`"
)


def explain(posts: Mapping[int, Post], world_size: int, rank: int) -> Finding | None:
    """Returns why `rank` waits; None if nothing speaks against that its collective will still end.

    Args:
        posts: of the ranks that do not go on, by rank.
        world_size: number of ranks.
        rank: the one that waits.
    """
    own = posts[rank]
    others = [post for _, post in sorted(posts.items()) if post.rank != rank]
    for other in others:
        if (other.error or other.has_ended) and (not own.members or other.rank in own.members):
            how = f"has failed ({other.error})" if other.error else "has ended its program"
            what = f"rank {other.rank} {how}, and {own.sentence} waits for it"
            otherwise = _OTHERWISE if other.error else _ENDED
            return Finding(what, other.fix or _cure([own], otherwise), is_final=True)
    places: dict[str, Post] = {}
    for post in (own, *others):
        places.setdefault(post.place, post)
    if len(posts) < world_size or len(places) == 1:
        return None
    named = sorted(places.values(), key=lambda post: post.rank)
    what = "; ".join(post.sentence for post in named[:_FEW])
    return Finding(f"ranks wait for each other in different collectives: {what}", _cure(named))


def _cure(posts: Sequence[Post], otherwise: str = _OTHERWISE) -> str:
    called = dict.fromkeys(post.call.partition("(")[0] for post in posts)
    return "; ".join(_CURES[name] for name in called if name in _CURES) or otherwise
