"""A training run from its first to its last step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.errors import PartnerUnavailableError
from shardgrad.extras import require
from shardgrad.graphs import GraphPool
from shardgrad.programs.checkpoint import Series
from shardgrad.programs.checkpoint.peers import Peers
from shardgrad.programs.train.checkpoint import TrainState, load_state, one_writer, save_state
from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.corpus import Corpus, Sampler
from shardgrad.programs.train.display import Display, nice_seconds
from shardgrad.programs.train.failure import Interrupted, TrainingError, UsageError
from shardgrad.programs.train.generate import continued, shown
from shardgrad.programs.train.model import count_parameters
from shardgrad.programs.train.optimizer import build_optimizer, build_schedule
from shardgrad.programs.train.parallel import World
from shardgrad.programs.train.record import RunRecord
from shardgrad.programs.train.sharding import build_model
from shardgrad.programs.train.step import StepResult, TrainStep
from shardgrad.programs.train.stop import StopRequest

_NEVER = 2**62
_PROMPT_BYTES = 40  # of the sample at the end


def train(
    config: TrainConfig,
    world: World,
    folder: Path,
    corpus: Corpus,
    stop: StopRequest,
    *,
    resume: bool,
) -> None:
    """Trains as one of the ranks, until the last step or a request to stop.

    Args:
        config: settings, the same on every rank.
        world: this rank.
        folder: folder of the run, on a disk visible to all ranks.
        corpus: training data, the same on every rank.
        stop: checked after every step.
        resume: start from the newest checkpoint in `folder`.

    Raises:
        Interrupted: `stop` was requested; the state is saved.
        TrainingError: the run cannot continue.
    """
    if config.graph == "on" and not GraphPool(world.device).can_capture:
        raise UsageError(
            f"--graph on needs a device with graphs, and {world.device.type} has none: leave it "
            "out."
        )
    series = Series(folder / "checkpoints", keep=config.keep)
    with one_writer(series, world):
        mesh = init_device_mesh(world.device.type, (world.world_size,))
        model = build_model(config, mesh, world.device)
        optimizer = build_optimizer(model, config)
        state = TrainState(model, optimizer, build_schedule(optimizer, config))
        # The initial weights are the same on every rank. Numbers drawn later (dropout) must differ
        # between ranks.
        torch.manual_seed(config.seed + world.rank)
        if resume:
            load_state(series, state, world)
        if state.step >= config.steps:
            raise UsageError(
                f"The run has already made {state.step} steps: give a larger --steps to continue."
            )
        # Not before it is known that this run goes on.
        Peers(world.control).broadcast("recovery", series.recover)
        title = f"{config.preset} on {world.world_size} x {world.device.type}"
        with Display(config.steps, title, leads=world.leads) as display:
            run = Run(config, world, folder, state, corpus, series, display)
            run.open()
            run.until_done(stop)


@dataclass
class Run:
    """A run on this rank: its steps, and the reports, checks and checkpoints between them.

    Args:
        config: resolved settings.
        world: this rank.
        folder: folder of the run.
        state: the state that steps change.
        corpus: training data.
        series: the checkpoints of the run.
        display: progress display.
    """

    config: TrainConfig
    world: World
    folder: Path
    state: TrainState
    corpus: Corpus
    series: Series
    display: Display

    def __post_init__(self) -> None:
        config, state, device = self.config, self.state, self.world.device
        self._record = (
            RunRecord(self.folder, tensorboard=config.tensorboard) if self.world.leads else None
        )
        self._loss_sum = torch.zeros((), device=device)  # since the last report
        # The first steps of this rank whose loss, and whose gradient norm, is not finite. Reading
        # a loss waits for the device, so steps do not read it: `_require_finite` does.
        self._bad_steps = torch.full((2,), _NEVER, device=device)
        self._step = TrainStep(
            state, Sampler(self.corpus.text, config.seq_len, config.seed), config, self.world
        )
        self._first_step = state.step
        self._loss = float("nan")  # as reported last
        self._began_s = self._reported_s = time.perf_counter()
        self._unreported_steps = 0

    def open(self) -> None:
        """Writes and prints what is known before the first step."""
        config, corpus, parameters = self.config, self.corpus, count_parameters(self.state.model)
        if self._record is None:
            return
        self._record.begin(
            config,
            self.world,
            step=self.state.step,
            facts={"parameters": parameters, "corpus": corpus.source},
        )
        ranks = "1 rank" if self.world.world_size == 1 else f"{self.world.world_size} ranks"
        self.display.note(
            f"{parameters:,} parameters, {ranks} on {self.world.device.type}; "
            f"{len(corpus.text):,} bytes from {corpus.file_count} files of {corpus.source}; "
            f"run folder {self.folder}"
        )
        if self.state.step:
            self.display.note(f"Resumed after step {self.state.step}.")
        if config.plot:
            # Before the first step, not after the last: the run may take days.
            try:
                require(
                    "matplotlib", feature="The picture of the loss curve (left out with --no-plot)"
                )
            except PartnerUnavailableError as error:
                self.display.note(f"{error.what}: {error.fix}")

    def until_done(self, stop: StopRequest) -> None:
        """Trains, reports, checks and saves until the last step or a request to stop."""
        config, state = self.config, self.state
        while state.step < config.steps:
            result = self._step()
            self._watch(result)
            self.display.stepped(state.step)
            if self._is_due(config.log_every):
                self._report(result)
            recorder.enter("vote whether to go on")
            is_stopping = self.world.any(stop.requested) and state.step < config.steps
            if is_stopping or self._is_due(config.checkpoint_every):
                self._save()
            if is_stopping:
                raise Interrupted(f"Stopped as asked after step {state.step}, which is saved.")
        self._close()

    def _is_due(self, every: int) -> bool:
        return self.state.step % every == 0 or self.state.step == self.config.steps

    def _report(self, result: StepResult) -> None:
        """Gathers, writes and displays every rank's metrics; the only place where a step waits for
        the device.
        """
        recorder.enter("metrics")
        self._require_finite()
        mean = float(self._loss_sum) / self._unreported_steps
        self._loss_sum.zero_()
        means = self.world.gather(mean)
        now_s = time.perf_counter()
        state, config = self.state, self.config
        tokens = (
            self._unreported_steps * config.global_batch(self.world.world_size) * config.seq_len
        )
        elapsed_s = now_s - self._began_s
        a_step_s = elapsed_s / (state.step - self._first_step)
        self._loss = sum(means) / len(means)
        metrics: dict[str, Any] = {
            "step": state.step,
            "loss": self._loss,  # since the last report
            "lr": result.lr,
            "grad_norm": float(result.grad_norm),
            "tokens_per_s": tokens / (now_s - self._reported_s),
            "remaining_s": a_step_s * (config.steps - state.step),
        }
        self._reported_s, self._unreported_steps = now_s, 0
        self.display.progress(**metrics)
        self._write("step", elapsed_s=elapsed_s, **metrics)

    def _write(self, event: str, **values: Any) -> None:
        """Writes an event on the rank that has the record."""
        if self._record is not None:
            self._record.write(event, **values)

    def _watch(self, result: StepResult) -> None:
        """Adds up a step's loss and notes whether it is finite, without waiting for the device."""
        is_finite = torch.stack((result.loss, result.grad_norm)).isfinite()
        first = self._bad_steps.clamp(max=self.state.step)
        self._bad_steps = torch.where(is_finite, self._bad_steps, first)
        self._loss_sum += result.loss
        self._unreported_steps += 1

    def _require_finite(self) -> None:
        """Ends the run if a loss or a gradient was not finite, so that none is saved. A
        collective.
        """
        rows = self.world.gather(self._bad_steps.tolist())
        first = min(map(min, rows))
        if first > self.state.step:
            return
        ranks = [str(rank) for rank, (loss, _) in enumerate(rows) if loss == first]
        what = f"the loss of rank {', '.join(ranks)}" if ranks else "the norm of the gradients"
        raise TrainingError(
            f"The loss or the gradients stopped being finite at step {first:.0f}: {what}. Lower "
            "--lr or --clip, or use --precision fp32."
        )

    def _save(self) -> None:
        recorder.enter("checkpoint")
        began_s = time.perf_counter()
        self._require_finite()
        path = save_state(self.series, self.state, self.world)
        seconds = time.perf_counter() - began_s
        self._write("checkpoint", step=self.state.step, path=str(path), seconds=seconds)
        self._reported_s += seconds

    def _close(self) -> None:
        """Prints a sample and the result of the run, and draws the loss curve."""
        sample = self._sample()
        if self._record is None:
            return
        if sample is not None:
            self.display.note("The model writes:")
            for line in sample.split("\n"):
                self.display.note(f"  {line}")
        elapsed_s = time.perf_counter() - self._began_s
        entropy = self.corpus.unigram_entropy()
        if self.config.plot:
            self._record.draw(unigram_entropy=entropy)
        self.display.note(
            f"Done: {self.config.steps} steps, the last {self.config.steps - self._first_step} "
            f"in {nice_seconds(elapsed_s)}. Loss {self._loss:.4f} nats per byte; byte-unigram "
            f"entropy {entropy:.4f}. Everything is in {self.folder}"
        )

    def _sample(self) -> str | None:
        """Returns what the model makes of the beginning of the text. A collective."""
        config = self.config
        if not config.sample_bytes:
            return None
        recorder.enter("sample")
        prompt = bytes(self.corpus.text[: min(_PROMPT_BYTES, config.seq_len)].tolist())
        text = continued(
            self.state.model,
            prompt,
            count=config.sample_bytes,
            window=config.seq_len,
            seed=config.seed,
            device=self.world.device,
        )
        return shown(text)
