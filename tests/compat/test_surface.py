"""Every name of the installed torch's FSDP2 surface is answered here, none inherited by
accident.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import fsdp

import shardgrad
from shardgrad.errors import UnsupportedError
from tests.support.surface import common_of, rows_of, surface

PAGE = Path(__file__).parents[2] / "docs/reference/fsdp2.md"

# What torch has under a leading underscore and other programs call: pipelines, frameworks,
# nn.Module itself.
PRIVATE_BUT_USED = {"_apply", "_get_fsdp_state", "_set_unshard_async_op"}

METHODS = sorted(
    name
    for name, value in vars(fsdp.FSDPModule).items()
    if inspect.isfunction(value) and (not name.startswith("_") or name in PRIVATE_BUT_USED)
)


def names_by_version() -> str:
    """Returns the table of the page, which ends before its next section."""
    page = PAGE.read_text(encoding="utf-8")
    return page[page.index("In every version") : page.index("\n## Behaviors")]


def parameters(function: Any) -> dict[str, tuple[Any, Any]]:
    """Returns kind and default by name, defaults compared by their text."""
    return {
        p.name: (p.kind, repr(p.default)) for p in inspect.signature(function).parameters.values()
    }


@pytest.mark.parametrize("name", METHODS)
def test_each_method_of_torchs_module_is_overridden_and_takes_as_much(name: str) -> None:
    ours, theirs = vars(shardgrad.FSDPModule).get(name), vars(fsdp.FSDPModule)[name]
    assert ours not in (None, theirs), f"torch's {name} would run on our module"
    if inspect.signature(ours).return_annotation == "NoReturn":
        # Refused by name: it must accept the call in order to refuse it.
        names = [p for p in inspect.signature(theirs).parameters if p != "self"]
        inspect.signature(ours).bind(
            None, **{name: None for name in names if name not in ("args", "kwargs")}
        )
    elif name != "_apply":
        assert parameters(ours) == parameters(theirs)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("fully_shard", {"gradient_policy", "zero_stage", "comm"}),
        ("register_fsdp_forward_method", set()),
    ],
)
def test_a_function_takes_what_torchs_takes_and_some_things_more(name: str, more: set[str]) -> None:
    ours, theirs = parameters(getattr(shardgrad, name)), parameters(getattr(fsdp, name))
    assert list(ours.items())[: len(theirs)] == list(theirs.items())
    assert ours.keys() - theirs.keys() == more


def test_a_name_that_is_not_there_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        shardgrad.nothing  # noqa: B018


@pytest.mark.parametrize(
    "name",
    [
        *("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "UnshardHandle"),
        "DataParallelMeshDims",
    ],
)
def test_classes_that_programs_import_are_torchs(name: str) -> None:
    assert getattr(shardgrad, name) is getattr(fsdp, name, None)


def test_the_page_says_what_the_installed_torch_has() -> None:
    version = ".".join(torch.__version__.split(".")[:2])
    table = names_by_version()
    rows, found = rows_of(table, version), surface(Path(torch.__file__).parent)
    assert rows <= found
    assert common_of(table) == {name for name, _ in found - rows}


def test_every_method_of_every_version_is_here() -> None:
    table = names_by_version()
    methods = {
        name.removeprefix("FSDPModule."): parameters
        for version in ("2.11", "2.12", "2.13", "2.14", "2.15")
        for name, parameters in rows_of(table, version)
        if name.startswith("FSDPModule.")
    }
    assert "finalize_backward" in methods
    for name, parameters in methods.items():
        signature = inspect.signature(getattr(shardgrad.FSDPModule, name))
        bare = [p.replace(annotation=p.empty) for p in list(signature.parameters.values())[1:]]
        assert str(inspect.Signature(bare)) == f"({parameters})", name


class _Layout:
    """As torch 2.16 has it: `DefaultAllGatherLayout(output_fn)`."""

    comm = None

    def __init__(self, output_fn: Any) -> None:
        self.output_fn = output_fn


def _copy(*_: Any) -> None:
    """Torch's own, or the program's, by its module."""


def test_torchs_own_layouts_of_2_16_are_taken_and_a_programs_own_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    methods: Any = shardgrad.FSDPModule
    for function in (_copy, _Layout):
        monkeypatch.setattr(function, "__module__", f"{fsdp.__name__}.experimental")
    methods.set_all_gather_layout(None, _Layout(_copy))
    methods.set_reduce_scatter_input_fn(None, _copy)
    own = type("Own", (_Layout,), {"__module__": __name__})(_copy)
    with pytest.raises(UnsupportedError, match=r"FSDPModule\.set_all_gather_layout\(Own\)"):
        methods.set_all_gather_layout(None, own)
    monkeypatch.setattr(_copy, "__module__", __name__)
    with pytest.raises(UnsupportedError, match=r"set_all_gather_layout\(_copy\)"):
        methods.set_all_gather_layout(None, _Layout(_copy))
    with pytest.raises(UnsupportedError, match=r"set_reduce_scatter_input_fn\(_copy\)"):
        methods.set_reduce_scatter_input_fn(None, _copy)
