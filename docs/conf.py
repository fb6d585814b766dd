"""Settings of the documentation site: `make docs` builds it into `build/docs`.

The source folder is the repository's root, so that README.md, CONTRIBUTING.md and
benchmarks/README.md are pages of the site and links to them are checked.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardgrad

project = "shardgrad"
copyright = "shardgrad contributors"
release = shardgrad.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
extensions += ["sphinx.ext.viewcode", "sphinx_click"]  # a link to the source of each entry

root_doc = "README"
include_patterns = ["*.md", "benchmarks/README.md", "docs/**.md"]
exclude_patterns = [".*", "build", "runs", "shardgrad", "tests"]  # not walked
html_theme = "furo"
html_title = f"shardgrad {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_extra_path = ["index.html"]  # leads to README.html

default_role = "code"  # docstrings write `name` for code, as Markdown does
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_type_aliases = {"_ModulesT": "Module | list[Module]", "_State": "Mapping"}
napoleon_custom_sections = ["Streams", "Capture"]
napoleon_use_ivar = True

myst_heading_anchors = 3

# A help text's `--flag` is no dash.
smartquotes = False

TORCH = "https://docs.pytorch.org/docs/stable/"
TORCH_PAGES = {
    "torch.Tensor": "tensors.html#torch.Tensor",
    "torch.dtype": "tensor_attributes.html#torch.dtype",
    "torch.device": "tensor_attributes.html#torch.device",
    "torch.Stream": "generated/torch.Stream.html",
    "torch.Event": "generated/torch.Event.html",
    "torch.nn.modules.module.Module": "generated/torch.nn.Module.html",
    "torch.nn.parameter.Parameter": "generated/torch.nn.parameter.Parameter.html",
    "torch.optim.optimizer.Optimizer": "optim.html#torch.optim.Optimizer",
    "torch.distributed.device_mesh.DeviceMesh": "distributed.html#device-mesh",
    "torch.distributed.distributed_c10d.ProcessGroup": "distributed.html#groups",
}
for name in ("MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle"):
    path = f"torch.distributed.fsdp.{name}"
    TORCH_PAGES[path] = f"distributed.fsdp.fully_shard.html#{path}"


def chapters() -> dict[str, list[str]]:
    """The pages of the sidebar: by chapter, or group of a chapter, in the order in which the index
    first names them.
    """
    index = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    found, chapter = {"Start": ["docs/README"]}, "Start"
    named = r"^(?:## (.*)|([A-Z][a-z, ]+):)$|\]\((\w+/\w+)\.md"
    for heading, group, page in re.findall(named, index, flags=re.MULTILINE):
        chapter = heading or group or chapter
        if page and not any(f"docs/{page}" in pages for pages in found.values()):
            found.setdefault(chapter, []).append(f"docs/{page}")
    found["Project"] = ["CONTRIBUTING", "benchmarks/README", "CHANGELOG", "SECURITY"]
    return found


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Adds the table of contents to the first page: a code host would show it there as a block of
    code.
    """
    if name == root_doc:
        for chapter, pages in chapters().items():
            source[0] += "\n".join(
                [
                    "",
                    "```{toctree}",
                    ":hidden:",
                    f":caption: {chapter}",
                    "",
                    *pages,
                    "```",
                    "",
                ]
            )


def to_torch(
    app: Sphinx, env: Any, node: pending_xref, words: nodes.Element
) -> nodes.reference | None:
    """Links a class of torch to its page. Sphinx would have to download an index for that."""
    page = TORCH_PAGES.get(node["reftarget"])
    return nodes.reference("", "", words, refuri=TORCH + page) if page else None


def for_napoleon(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Moves `Streams: text` and `Capture: text` to the end, as sections; marks indented examples as
    code.
    """
    text = "\n".join(lines)
    section = re.compile(r"^(Streams|Capture): *(.*(?:\n    .*)*)\n?", flags=re.MULTILINE)
    found = section.findall(text)
    text = section.sub("", text).rstrip()
    text = re.sub(r"^(\S.*):\n\n(?=    )", r"\1::\n\n", text, flags=re.MULTILINE)
    text += "".join(f"\n\n{title}:\n    {words}" for title, words in found)
    lines[:] = [*text.split("\n"), ""]


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects the hooks."""
    app.connect("source-read", add_contents)
    app.connect("missing-reference", to_torch)
    app.connect("autodoc-process-docstring", for_napoleon, priority=400)  # before Napoleon, at 500
    return {"parallel_read_safe": True}
