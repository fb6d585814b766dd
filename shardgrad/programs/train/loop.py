"""A training run from its first to its last step."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.programs.checkpoint import Series
from shardgrad.programs.checkpoint.peers import Peers
from shardgrad.programs.train.checkpoint import TrainState, load_state, lock, save_state
from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.corpus import Sampler
from shardgrad.programs.train.display import Display
from shardgrad.programs.train.failure import Interrupted, TrainingError, UsageError
from shardgrad.programs.train.generate import continued
from shardgrad.programs.train.model import count_parameters
from shardgrad.programs.train.parallel import World, name_of_device
from shardgrad.programs.train.record import RunRecord
from shardgrad.programs.train.sharding import build_model
from shardgrad.programs.train.step import TrainStep, build_optimizer
from shardgrad.programs.train.stop import StopRequest
from shardgrad.programs.train.texts import name_of, read_text

_PROMPT_BYTES = 40  # of the sample at the end


class Run:
    """A run on this rank: its steps, and the reports, checks and checkpoints between them.

    Args:
        config: resolved settings, the same on every rank. The folder is on a disk visible to all
            ranks.
        world: this rank.
        resume: start from the newest checkpoint in the folder.

    Raises:
        TrainingError: the run cannot begin.
    """

    def __init__(self, config: TrainConfig, world: World, *, resume: bool) -> None:
        self.config, self.world = config, world
        content = read_text(config.data, seq_len=config.seq_len)
        self._text = torch.frombuffer(content, dtype=torch.uint8)
        self._series = Series(config.folder / "checkpoints", keep=config.keep)
        lock(self._series)
        model = build_model(
            config, init_device_mesh(world.device.type, (world.world_size,)), world.device
        )
        self.state = state = TrainState(model, build_optimizer(model, config))
        if resume:
            load_state(self._series, state)
        if state.step >= config.steps:
            raise UsageError(
                f"The run has already taken {state.step} steps: give a larger --steps to continue."
            )
        # Not before it is known that this run goes on.
        Peers().broadcast("recovery", self._series.recover)
        # Loss and gradient norm of each step since the last report, on the device: steps do not
        # wait for it.
        self._results: list[Tensor] = []
        sampler = Sampler(self._text, config.seq_len, config.seed)
        self._step = TrainStep(state, sampler, config, world)
        leads = world.rank == 0
        where = f"{world.world_size} x {world.device.type}"
        self._display = Display(config.steps, f"{config.preset} on {where}", leads=leads)
        self._display.note(
            f"{count_parameters(model):,} parameters on {where}; {len(self._text):,} bytes of "
            f"{name_of(config.data)}; run folder {config.folder}"
        )
        if state.step:
            self._display.note(f"Resumed after step {state.step}.")
        self._began_s = self._reported_s = time.perf_counter()
        self._record = RunRecord(config.folder, leads=leads, tensorboard=config.tensorboard)
        self._record.begin(
            config,
            step=state.step,
            world_size=world.world_size,
            device=name_of_device(world.device),
        )

    def until_done(self, stop: StopRequest) -> None:
        """Trains, reports, checks and saves until the last step or a request to stop.

        Raises:
            Interrupted: `stop` was requested; the state is saved.
            TrainingError: the run cannot continue.
        """
        config, state = self.config, self.state
        with self._display:
            while state.step < config.steps:
                self._results.append(torch.stack(self._step()))
                self._display.stepped(state.step)
                if self._is_due(config.log_every):
                    self._report()
                recorder.enter("vote on stopping")
                votes = self.world.gather(torch.tensor(stop.requested))
                is_stopping = bool(votes.any()) and state.step < config.steps
                if is_stopping or self._is_due(config.checkpoint_every):
                    self._save()
                if is_stopping:
                    raise Interrupted(f"Stopped after step {state.step}, which is saved.")
            self._close()

    def _is_due(self, every: int) -> bool:
        return self.state.step % every == 0 or self.state.step == self.config.steps

    def _report(self) -> None:
        """Writes and displays what all ranks have done since the last report."""
        recorder.enter("metrics")
        state, config, world = self.state, self.config, self.world
        results, now_s = self._gather_results(), time.perf_counter()
        step_s = (now_s - self._reported_s) / len(self._results)
        self._results.clear()
        self._reported_s = now_s
        metrics: dict[str, Any] = {
            "step": state.step,
            "loss": float(results[..., 0].mean()),  # since the last report
            "lr": state.optimizer.param_groups[0]["lr"],
            "grad_norm": float(results[0, -1, 1]),
            "tokens_per_s": config.global_batch(world.world_size) * config.seq_len / step_s,
        }
        left = timedelta(seconds=round(step_s * (config.steps - state.step)))
        self._display.note(
            "step {step}/{steps}  loss {loss:.4f}  lr {lr:.2e}  grad norm {grad_norm:.3f}  "
            "tokens/s {tokens_per_s:,.0f}  ETA {left}".format(
                steps=config.steps, left=left, **metrics
            )
        )
        self._record.write("step", **metrics)

    def _gather_results(self) -> Tensor:
        """Returns the loss and the gradient norm of each step since the last report, on the host,
        `[rank, step, 2]`. A collective, and the only place that waits for the device.

        Raises:
            TrainingError: one of them is not finite, so that no such step is saved.
        """
        own = torch.stack(self._results).cpu().double()
        results = self.world.gather(own)
        bad = (~results.isfinite()).nonzero().tolist()
        if not bad:
            return results
        first = min(step for _, step, _ in bad)
        ranks = [str(rank) for rank, step, which in bad if (step, which) == (first, 0)]
        what = f"the loss of rank {', '.join(ranks)}" if ranks else "the norm of the gradients"
        raise TrainingError(
            "The loss or the gradients became non-finite at step "
            f"{self.state.step - len(own) + 1 + first}: {what}. Lower --lr, or use --precision "
            "fp32."
        )

    def _save(self) -> None:
        recorder.enter("checkpoint")
        if self._results:
            self._gather_results()
        path = save_state(self._series, self.state)
        self._record.write("checkpoint", step=self.state.step, path=str(path))

    def _close(self) -> None:
        """Prints a sample and the result of the run, and draws the loss curve."""
        config, note = self.config, self._display.note
        if config.sample_bytes:
            recorder.enter("sample")
            sample = continued(
                self.state.model,
                bytes(self._text[:_PROMPT_BYTES].tolist()),
                count=config.sample_bytes,
                window=config.seq_len,
                seed=config.seed,
                device=self.world.device,
            )
            note("The model writes:")
            for line in sample.decode(errors="backslashreplace").expandtabs(4).split("\n"):
                note(f"  {line}")
        elapsed = timedelta(seconds=round(time.perf_counter() - self._began_s))
        self._record.draw()
        note(f"Done in {elapsed}. Everything is in {config.folder}")
