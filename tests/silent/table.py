"""The page of the table: made of a record, and of what the programs say about themselves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import RESULTS, ROOT, read
from tests.silent.engines import ENGINES

PAGE = ROOT / "docs" / "explanation" / "right_where_others_are_wrong.md"
RECORDS, AUDITS = RESULTS / "silent.jsonl", RESULTS / "audit.jsonl"
OURS = "shardgrad"
_FOLDER = Path(__file__).parent / "cases"
CASES = sorted(path.stem for path in _FOLDER.glob("*.py") if path.stem != "control")

_TOPICS = {
    "What the loss goes through": (
        "loss_through_the_inner_module",
        "loss_in_another_method",
        "a_functional_call",
        "a_weight_used_outside_of_forward",
        "attention_that_uses_a_childs_weight",
        "an_output_of_a_class_of_its_own",
        "an_output_changed_in_place",
        "noise_drawn_in_the_step",
    ),
    "Which parameters are trained together": (
        "adapter_attached_after_wrapping",
        "only_blocks_wrapped",
        "a_part_whose_shard_size_is_one",
        "optimizer_before_wrapping",
        "optimizer_after_a_forward",
        "unfrozen_after_wrapping",
        "frozen_after_wrapping",
        "a_discriminator_frozen_in_turns",
        "a_tied_weight_that_does_not_divide",
        "tied_after_wrapping",
        "an_unused_layer_decays",
        "a_copy_as_target",
    ),
    "What ranks begin with": (
        "other_weights_on_each_rank",
        "layers_in_another_order",
        "resumed_from_the_file_of_rank_0",
        "an_optimizer_resumed_from_the_file_of_rank_0",
        "saved_and_loaded_into_a_plain_model",
    ),
    "Ranks that do not do the same": (
        "equal_experts",
        "a_tower_unused_on_one_rank",
        "a_skipped_layer",
        "fewer_batches_on_one_rank",
        "a_loss_skipped_on_one_rank",
        "a_bad_sample_on_one_rank",
        "evaluation_on_rank_0",
        "saving_on_rank_0",
        "texts_of_different_length",
        "a_metric_reduced_on_rank_0",
    ),
    "When gradients are averaged": (
        "a_last_window_that_is_not_full",
        "sync_on_the_wrong_micro_batch",
        "forward_without_sync_backward_with",
        "two_backwards_through_one_forward",
        "two_forwards_and_batch_norm",
        "gradients_from_autograd_grad",
        "a_backward_that_writes_the_gradient",
        "gradients_in_memory_that_is_written_again",
        "a_gradient_penalty",
        "forces",
        "reentrant_checkpoints",
        "a_shard_group_of_one",
        "micro_batches_before_replicas_are_averaged",
        "a_forward_that_fails_and_is_repeated",
    ),
    "What happens to gradients before the step": (
        "clipping_with_torch",
        "clipping_after_an_evaluation",
        "the_norm_that_is_logged",
        "gradients_scaled_by_hand",
        "gradients_kept_per_task",
        "a_hook_on_a_parameter",
        "optimizers_in_backward",
        "a_scaler_that_decides_alone",
    ),
    "Optimizers and weights": (
        "an_optimizer_that_takes_norms",
        "adafactor",
        "muon_with_replicas",
        "a_trainer_that_resets_its_optimizer",
        "optimizer_state_moved_away_and_back",
        "sharpness_aware",
        "kept_whole_over_a_step",
        "weights_edited_while_whole",
        "weights_written_in_forward",
        "a_low_precision_copy_of_a_weight",
        "to_another_dtype_and_back",
    ),
    "Unusual parameters": (
        "a_scalar_parameter",
        "a_sparse_embedding",
        "channels_last",
    ),
}

_WORDS = {
    "right": "right",
    "refused": "refused",
    "wrong": "**wrong**",
    "wrong, warned": "wrong, warns",
    "hangs": "**hangs**",
    "hangs, warned": "hangs, warns",
    "backend error": "**backend fails**",
    "crashes": "**crashes**",
    "not offered": "-",
}


@dataclass(frozen=True)
class Case:
    """What a program says about itself.

    Attributes:
        source: its text.
        title: what the user did.
        reports: addresses.
        right: what it has to come to.
    """

    source: str
    title: str
    reports: tuple[str, ...]
    right: str


def case(name: str) -> Case:
    """Reads a program."""
    source = (_FOLDER / f"{name}.py").read_text(encoding="utf-8")
    doc = ast.get_docstring(ast.parse(source)) or ""
    title, _, rest = doc.partition("\n\n")
    reports = tuple(re.findall(r"^Report: (\S+)$", rest, flags=re.MULTILINE))
    right = re.search(r"^Right: (.*)", rest, flags=re.MULTILINE | re.DOTALL)
    return Case(
        source, " ".join(title.split()), reports, " ".join(right[1].split()) if right else ""
    )


def newest_records(path: Path = RECORDS) -> dict[str, dict[str, Any]]:
    """Returns the last record of each engine in a file."""
    newest = {record["config"]["engine"]: record for record in read(path)}
    return {engine: newest[engine] for engine in ENGINES if engine in newest}


def written(
    records: Mapping[str, Mapping[str, Any]], audits: Mapping[str, Mapping[str, Any]]
) -> str:
    """Returns the page of records by engine, and of audits by engine."""
    columns = {engine: record["summary"] for engine, record in records.items()}
    ours = records[OURS]
    lines = [
        _INTRODUCTION.format(
            count=len(columns[OURS]),
            torch=ours["config"]["versions"]["torch"],
            deepspeed=records["ZeRO-3"]["config"]["versions"]["deepspeed"],
            commits=", ".join(_commits(records)),
            cpu=ours["environment"]["cpu"],
            counts=_counted(columns),
        )
    ]
    lines += [
        _row(["what a program does", "reported", *columns]),
        _row(["---"] * (len(columns) + 2)),
    ]
    for topic, cases in _TOPICS.items():
        lines.append(_row([f"**{topic}**", *[""] * (len(columns) + 1)]))
        lines += [_line(name, columns) for name in cases]
    lines.append("")
    lines += [_WHAT_AUDITS_FIND, *_audits(audits)]
    return "\n".join(lines).rstrip() + "\n"


def _commits(records: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields each commit of the records, and the engines that were run there."""
    commits = {engine: (each["environment"]["git"] or "")[:12] for engine, each in records.items()}
    for commit in dict.fromkeys(commits.values()):
        yield f"{commit} ({', '.join(engine for engine, at in commits.items() if at == commit)})"


def _line(name: str, columns: Mapping[str, Mapping[str, Any]]) -> str:
    about = case(name)
    link = f"[{about.title.rstrip('.').replace('|', '/')}](../../tests/silent/cases/{name}.py)"
    reports = ", ".join(f"[{_short(url)}]({url})" for url in about.reports)
    return _row(
        [link, reports, *(_cell(engine, column[name]) for engine, column in columns.items())]
    )


def _cell(engine: str, found: Mapping[str, Any]) -> str:
    """Returns the verdict; of a refusal here, the error too."""
    words = _WORDS[found["verdict"]]
    return (
        f"{words}: `{found['error']}`"
        if engine == OURS and found["verdict"] == "refused"
        else words
    )


def _counted(columns: Mapping[str, Mapping[str, Any]]) -> str:
    kinds = ("right", "refused", "warns", "wrong", "hangs or crashes", "not offered")
    rows = [_row(["", *kinds]), _row(["---"] * (len(kinds) + 1))]
    for engine, column in columns.items():
        counts = dict.fromkeys(kinds, 0)
        for found in column.values():
            counts[_kind(found["verdict"])] += 1
        rows.append(_row([engine, *map(str, counts.values())]))
    return "\n".join(rows)


def _audits(audits: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield _row(["", "wrong", "of them found", "right", "of them passed"])
    yield _row(["---"] * 5)
    for engine, record in audits.items():
        right = [found["passed"] for found in record["summary"].values() if found["is_right"]]
        wrong = [found["passed"] for found in record["summary"].values() if not found["is_right"]]
        counts = (len(wrong), wrong.count(False), len(right), right.count(True))
        yield _row([engine, *map(str, counts)])


def _kind(found: str) -> str:
    if found.endswith("warned"):
        return "warns"
    if found in ("hangs", "crashes", "backend error"):
        return "hangs or crashes"
    return found


def _short(url: str) -> str:
    *_, project, _, number = url.split("/")
    return f"{project}#{number}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


_INTRODUCTION = """\
# Right where others are wrong

The table has {count} programs from bug reports. With at least one engine, each trained other values than its author
expected, hung, or wrote a file that was not the model. Each has at most 40 lines, in `tests/silent/cases/`. Each runs
with every engine on two CPU ranks over gloo, and is compared with plain torch, where every rank has the unsharded
model and the test averages gradients. `python -m tests.silent` runs them again, and writes this page from its record,
`benchmarks/results/silent.jsonl`. CI tests that shardgrad is *never silently wrong* in them. To look for such mistakes
in your own program, with any engine, [audit it](../how_to/check_a_program.md).

| result | meaning |
| --- | --- |
| wrong | other values, without an error or warning |
| wrong, warns | other values, with a warning that a correct program does not get |
| hangs | no end and no message within 13 seconds |
| hangs, warns | waits, and [a warning names what for](../how_to/read_an_error.md#one-rank-does-what-the-others-do-not) |
| backend fails | an error of gloo's, such as a lost connection; over NCCL, this is a hang |
| refused | any other exception; a `RuntimeError` is torch's own |

{counts}

torch {torch}, DeepSpeed {deepspeed}, {cpu}. Recorded at commits
{commits}.
FSDP1 uses `use_orig_params=True`, DDP `find_unused_parameters=True`, and DeepSpeed ZeRO stage 3 in float32 without
clipping. If a case is right with an engine, the reported bug may have been fixed since. `tests/gpu` tests that a
graph draws random numbers as its step does.

## The programs
"""

_WHAT_AUDITS_FIND = """\
## What an audit finds

`shardgrad doctor --audit` [runs a program with and without its engine](../how_to/check_a_program.md). Its findings for
these programs, if they end (`python -m tests.silent --audit`, record `benchmarks/results/audit.jsonl`):
"""
