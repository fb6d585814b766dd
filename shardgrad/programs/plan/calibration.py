"""Measurements that replace assumptions of a plan. This module does not import PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from shardgrad.programs.train.settings import Number, setting


@dataclass(frozen=True)
class Calibration:
    """Measurements that replace the roofline model of compute. At most one is given.

    Attributes:
        mfu: MFU of forward and backward without communication, with PaLM's count of FLOPs.
        compute_s: seconds of forward and backward without communication.
        scale: factor on the roofline's durations of kernels in forward and backward
            (`measuring.py`).
    """

    mfu: float | None = setting(
        None,
        "Measured MFU of forward and backward without communication, to calibrate the predicted "
        "time.",
        Number(0, 1, min_open=True),
        section="Measurements",
    )
    compute_s: float | None = setting(
        None,
        "Measured seconds of forward and backward without communication, instead of --mfu.",
        Number(1e-9, 1e9),
    )
    scale: float | None = None

    def factor(self, flops: float, seconds: float, peak_flops: float) -> float | None:
        """Returns the factor on the roofline's durations; None without a measurement.

        Args:
            flops: of the model, as PaLM counts them.
            seconds: of forward and backward by the roofline.
            peak_flops: of the device, per second.
        """
        if self.mfu is not None:
            return flops / (peak_flops * self.mfu) / seconds
        return self.scale if self.compute_s is None else self.compute_s / seconds
