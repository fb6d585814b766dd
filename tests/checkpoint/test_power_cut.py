"""After a power failure at any moment, what is left is loadable: complete, or older."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardgrad import checkpoint
from shardgrad.programs.checkpoint import Series
from shardgrad.programs.checkpoint.files import replace_synced
from shardgrad.programs.train.config import TrainConfig, read_settings
from shardgrad.programs.train.record import RunRecord
from tests.checkpoint.test_checkpoint import number_in, small
from tests.support.power_cut import PowerCut

Scenario = Callable[[Path, "Promises"], None]


class Promises:
    """What has to be there after a failure: at least this state, at most that one."""

    def __init__(self) -> None:
        self.least = self.most = self.events = 0


def required(promises: Promises, path: Path | None) -> None:
    number = 0 if path is None else number_in(path)
    assert promises.least <= number <= promises.most, (
        f"{number} is there, of {promises.least} to {promises.most}"
    )


# -- scenarios, and what is checked after each


def one_name(root: Path, promises: Promises) -> None:
    """A name in folders that are made for it."""
    promises.most = 1
    checkpoint.save(small(1), root / "new" / "folders" / "c")
    promises.least = 1


def check_one_name(folder: Path, promises: Promises) -> None:
    path = folder / "new" / "folders" / "c"
    required(promises, path if path.exists() else None)


def series_of(root: Path, keep: int = 1) -> Series:
    return Series(root / "run" / "checkpoints", keep=keep)


def save(series: Series, step: int, number: int, promises: Promises) -> None:
    path = series.path_of(step)
    promises.most = number
    checkpoint.save(small(number), path, then=lambda: series.publish(path))
    promises.least = number


def steps(root: Path, promises: Promises) -> None:
    """A run that goes on."""
    for number, step in enumerate((10, 20, 30), start=1):
        save(series_of(root), step, number, promises)


def back(root: Path, promises: Promises) -> None:
    """A run that goes back to an older step."""
    for number, step in enumerate((10, 20), start=1):
        save(series_of(root, 3), step, number, promises)
    promises.least = promises.most = 0
    replace_synced(root / "run" / "checkpoints" / "latest", "step_000010\n")
    promises.least = promises.most = 1
    series_of(root).recover()
    for number, step in ((11, 20), (12, 30)):
        save(series_of(root), step, number, promises)


def check_series(folder: Path, promises: Promises) -> None:
    checkpoints = folder / "run" / "checkpoints"
    series = Series(checkpoints)
    found = series.latest()
    if promises.most == 0 and found is not None:
        number_in(found)  # `latest` is being edited: any of those before, but whole
    else:
        required(promises, found)
    for path in series.complete():
        number_in(path)
    if checkpoints.is_dir():
        series.recover()
        series.release()
        assert found is None or number_in(found) >= 0


def exported(root: Path, promises: Promises) -> None:
    promises.most = 1
    checkpoint.save(small(1), root.parent / "source")
    checkpoint.export_checkpoint(root.parent / "source", root / "c")
    promises.least = 1


def check_exported(folder: Path, promises: Promises) -> None:
    made = folder / "c"
    if (made / "model.safetensors").exists():
        from safetensors.torch import load_file

        assert torch.equal(load_file(made / "model.safetensors")["x"], small(1)["x"])
    else:
        assert promises.least == 0, "what was reported as written is not there"


def recorded(root: Path, promises: Promises) -> None:
    """A run folder that is begun and resumed; its steps are the settings' number."""
    for number in (1, 2):
        promises.most = number
        record = RunRecord(root / "runs" / "one")
        record.begin(TrainConfig(steps=number, ranks=1), step=number)
        promises.least = number
        # Those that were kept; not yet the start of this time.
        promises.events = len(record.events()) - 1
        for step in range(3):
            record.write("step", step=step, loss=1.0)


def check_recorded(folder: Path, promises: Promises) -> None:
    run = folder / "runs" / "one"
    number = (
        TrainConfig(**read_settings(run / "config.json")).steps
        if (run / "config.json").exists()
        else 0
    )
    assert promises.least <= number <= promises.most
    record = RunRecord(run)
    assert len(record.events()) >= promises.events
    if number:
        record.begin(TrainConfig(ranks=1), step=5)
        assert record.events()[-1]["event"] == "start"


SCENARIOS: dict[str, tuple[Scenario, Callable[[Path, Promises], None]]] = {
    "one name": (one_name, check_one_name),
    "steps": (steps, check_series),
    "back": (back, check_series),
    "exported to safetensors": (exported, check_exported),
    "a run's record": (recorded, check_recorded),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_power_failure_at_any_moment_leaves_what_was_promised(name: str, tmp_path: Path) -> None:
    """Plays a scenario with power failures at every moment, and checks what each could leave."""
    if name == "exported to safetensors":
        pytest.importorskip("safetensors")
    scenario, check = SCENARIOS[name]
    promises = Promises()
    root, scratch = tmp_path / "root", tmp_path / "scratch"
    for folder in (root, scratch):
        folder.mkdir()
    model = PowerCut(root, lambda folder: check(folder, promises), scratch)
    with model.watching():
        scenario(root, promises)
    assert model.moments > 5
    assert model.folders > 5 * model.moments
