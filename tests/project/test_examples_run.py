"""The Python examples of all pages run on two ranks, in the order of the page."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
import textwrap
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import shardgrad
from shardgrad.programs.train.model import Transformer, materialise
from shardgrad.programs.train.presets import TransformerConfig
from tests.support.ranks import Ranks, on_ranks

DOCS = Path(__file__).parents[2] / "docs"
SIZES = TransformerConfig(width=32, layers=3, heads=2, kv_heads=2, hidden=32)
# What a page begins with: a model that it shards, a sharded one, or nothing.
UNSHARDED = ("another_dim", "compile", "tensor_parallelism")
SHARDED = (
    *("accumulate_gradients", "checkpoints", "migrate_to_graphed_step", "pipelines"),
    *("ranks_without_a_batch", "what_a_graph_holds"),
)
WHOLE = (
    *("audit_a_program", "differences", "multi_node", "plan_a_run", "reinforcement_learning"),
    *("transformers", "use_muon", "use_a_framework"),
)
PAGES = {*UNSHARDED, *SHARDED, *WHOLE}
TUTORIAL = "first_graphed_step"
# Sections that need other surroundings than the rest of their page.
SECTIONS = {
    "accumulate_gradients": ("optimize_and_clip", "Accumulate gradients"),
    "another_dim": ("other_parallelism", "Another dim, another mesh"),
    "audit_a_program": ("check_a_program", "Audit a program"),
    "compile": ("other_parallelism", "torch.compile"),
    "pipelines": ("other_parallelism", "Pipelines"),
    "tensor_parallelism": ("other_parallelism", "Tensor parallelism"),
    "transformers": ("migrate_to_graphed_step", "Transformers"),
    "use_muon": ("optimize_and_clip", "Muon"),
}


NEEDS_TRANSFORMERS = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)


def blocks(page: str) -> list[str]:
    """Returns the Python of a page, or of a section, which is left out of its page."""
    file, heading = SECTIONS.get(page, (page, ""))
    (path,) = DOCS.glob(f"*/{file}.md")
    text = path.read_text(encoding="utf-8")
    first, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    if heading:
        [text] = [each for each in sections if each.startswith(heading + "\n")]
    else:
        apart = tuple(title + "\n" for other, title in SECTIONS.values() if other == file)
        text = "".join([first, *(each for each in sections if not each.startswith(apart))])
    return python_of(text)


def python_of(text: str) -> list[str]:
    found = re.findall(r"^ *```python\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)
    return list(map(textwrap.dedent, found))


class Model(Transformer):
    """Has what pages call a model's parts."""

    @property
    def blocks(self) -> Any:
        return self.layers


def built(*, sharded: bool = False) -> Model:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Model(SIZES)
    materialise(model, model, device=torch.device("cpu"), seed=0)
    if sharded:
        for block in model.layers:
            shardgrad.fully_shard(block)
        shardgrad.fully_shard(model)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(256, (2, 8))


def surroundings(page: str, folder: str) -> dict[str, Any]:
    """Returns what a page takes for granted."""
    names: dict[str, Any] = {"folder": folder}
    if page in UNSHARDED:
        model = names["model"] = built()
        feed_forward = model.layers[0].feed_forward
        names |= {"block": model.layers[0], "experts": {*feed_forward.parameters()}}
        names["mesh"] = init_device_mesh("cpu", (2,), mesh_dim_names=("efsdp",))
        columns = {f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")}
        names["plan"] = columns | {"feed_forward.down": RowwiseParallel()}
    if page in SHARDED:
        model = built(sharded=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if page == "migrate_to_graphed_step":
            optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-3)  # type: ignore[assignment]

        def step() -> None:
            model.loss(tokens(), tokens()).backward()
            optimizer.step()
            optimizer.zero_grad()

        names |= {
            **{"model": model, "optimizer": optimizer, "step": step, "batch": tokens()},
            "micro_batches": [tokens() for _ in range(4)],
            "schedule": torch.optim.lr_scheduler.ConstantLR(optimizer),
            "loss": model.loss(tokens(), tokens()),
        }
        if page == "checkpoints":
            step()
            names["step"] = 3
    if page == "pipelines":
        names["loss"].backward()
        names["mesh"] = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        names |= {"params": list(model.parameters()), "max_norm": 1e-3}
    if page == "transformers":
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 32}
        layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
        names["model"] = LlamaForCausalLM(LlamaConfig(**sizes, **layers))
    if page == "multi_node":
        os.environ["LOCAL_WORLD_SIZE"] = "2"
    if page == "use_a_framework":
        names["main"] = lambda: shardgrad.fully_shard(torch.nn.Linear(4, 4))
    return names


def after(page: str, number: int, names: dict[str, Any]) -> None:
    """Does with a block's functions what the page says of them."""
    if page == "audit_a_program":
        names["main"]()
    elif page == "plan_a_run":
        names["MyModel"] = lambda width: torch.nn.Linear(width, 2)
        model, loss = names["build"]()
        loss(model, 1, 2).backward()
    elif page == "checkpoints" and number == 0:
        assert names["step"] == 3
        names["folder"] += "/weights"
    elif page == "pipelines":
        norm = torch.nn.utils.get_total_norm([param.grad for param in names["params"]])
        assert norm.full_tensor() <= names["max_norm"]
    elif page == "transformers":
        attention = functional.scaled_dot_product_attention
        captures = patch.object(torch.cuda, "is_current_stream_capturing", return_value=True)
        with captures, patch.object(functional, attention.__name__, side_effect=attention) as calls:
            names["model"](tokens(), use_cache=False)
        assert [call.kwargs["attn_mask"] for call in calls.call_args_list] == [None]
    elif page in UNSHARDED:
        if page == "another_dim":
            shardgrad.fully_shard(names["model"])
            assert names["block"].feed_forward.up.weight.placements == (names["Shard"](1),)
        names["model"](tokens()).mean().backward()
    elif page == "migrate_to_graphed_step" and number == 0:
        names["step"]()  # between steps, parameters are sharded
        names["Average"](names["model"]).update()
    elif page == "migrate_to_graphed_step" and number == 1:
        padded, targets = names["to_a_multiple_of_128"](tokens(), tokens())
        assert padded.shape == targets.shape == (2, 128)


def test_no_example_of_a_page_is_left_out() -> None:
    texts = [path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")]
    run = [block for page in (*PAGES, TUTORIAL) for block in blocks(page)]
    assert sorted(run) == sorted(block for text in texts for block in python_of(text))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param("compile", marks=pytest.mark.long),
        pytest.param("transformers", marks=NEEDS_TRANSFORMERS),
        *sorted(PAGES - {"compile", "transformers"}),
    ],
)
@on_ranks(2)
def test_the_examples_of_a_page_run(page: str) -> None:
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.chdir(own))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        folder = [own]
        dist.broadcast_object_list(folder)
        names = surroundings(page, folder[0])
        for number, block in enumerate(blocks(page)):
            # What a program has in these places is its own.
            code = re.sub(r"^(model = )?\.\.\..*$", "pass", block, flags=re.MULTILINE)
            code = code.replace('"cuda"', '"cpu"')
            exec(compile(code, f"{page}.md, block {number}", "exec"), names)
            after(page, number, names)
        dist.barrier()


def printed(code: str, names: dict[str, Any]) -> str:
    """Runs a whole program, but for its last line, which would leave no process group to the next
    one.
    """
    text = io.StringIO()
    code = code.replace("torch.distributed.destroy_process_group()", "")
    with contextlib.redirect_stdout(text):
        exec(compile(code, "tutorial", "exec"), names)
    return text.getvalue()


def calls_of(names: dict[str, Any]) -> list[Callable[[], Any]]:
    """Returns, for the blocks of the tutorial on graphs that define a step, the calls that it
    describes.
    """

    def batch() -> torch.Tensor:
        return torch.randn(16, 32)

    def plain() -> None:
        for _ in range(60):
            names["loss"], names["norm"] = names["step"](batch())

    def listed() -> None:
        assert set(names["step"]([batch() for _ in range(4)])) == {"loss", "norm"}

    return [plain, listed]


def run_the_tutorial() -> list[str]:
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    said = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, *parts = blocks(TUTORIAL)
        names: dict[str, Any] = {"__name__": "__main__"}
        said.append(printed(first, names))
        calls = calls_of(names)
        for part in parts:
            said.append(printed(part, names))
            if "def step" in part:
                calls.pop(0)()
    return said


def test_the_program_of_the_tutorial_runs_and_learns(two_ranks: Ranks) -> None:
    said = two_ranks.run(run_the_tutorial)[0]
    losses = [float(loss) for loss in re.findall(r"^\d+ ([\d.]+)", said[0], flags=re.MULTILINE)]
    assert len(losses) == 4, said
    assert losses[-1] < losses[0], said
    assert "60 eager, 0 captured, 0 replayed" in "".join(said)
