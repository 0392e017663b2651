"""The measurements of a profiled run: phases, throughput, FLOPs, bandwidth, ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_opt.core.output.report import Report
from lightning_opt.profiling.durations import Durations, Work
from lightning_opt.profiling.flops import Flops
from lightning_opt.profiling.steps.phase_clock import CALLBACK, NOT_OF_A_STEP, PhaseClock


@dataclass
class Measures:
    """All measurements of one run, in bounded memory.

    Attributes:
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        clock: Durations by phase, and the steps that count.
        wall: Seconds of the run; None during the run.
        batches: Number of training batches.
        flops: FLOPs of the first batch; None if not counted.
        flops_units: Tokens in the first batch, or samples if tokens are not counted.
        peak: The device's peak FLOPs per second; None if unknown.
        world_size: The number of ranks.
        bytes: Bytes moved in each region, by the region's name.
        ranks: Busy seconds per step of each rank, without waits for other ranks; empty with one.
        notes: Further notes for the report.
    """

    stage: str
    clock: PhaseClock
    wall: float | None = None
    batches: int = 0
    flops: Flops | None = None
    flops_units: int = 0
    peak: float | None = None
    world_size: int = 1
    bytes: dict[str, float] = field(default_factory=dict)
    ranks: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def rates_of(self, work: Work) -> dict[str, float]:
        """Return this rank's rates over the steps in ``work``, with the keys of :attr:`rates`."""
        flops = None
        if self.flops is not None and self.flops_units:
            amount = work.tokens or work.samples
            flops = self.flops.model / self.flops_units * amount
        return work.rates(flops, self.peak)

    @property
    def rates(self) -> dict[str, float]:
        """Rates of this rank during training, without validation, checkpoints and setup.

        Keys are ``samples_per_second``, ``tokens_per_second``, ``flops_per_second`` (without
        recomputation) and ``mfu`` (model FLOPs utilisation). Unknown rates are omitted.
        """
        return self.rates_of(self.clock.work)

    @property
    def seconds(self) -> dict[str, float]:
        names = self.clock.phases.names
        return {names[phase]: d.total for phase, d in self.clock.durations.items()}

    def seconds_of_steps(self) -> dict[str, float]:
        """Return the total seconds of each phase of a step, without callbacks."""
        names = self.clock.phases.names
        return {
            names[phase]: durations.total
            for phase, durations in self.clock.durations.items()
            if phase not in NOT_OF_A_STEP and not names[phase].startswith(CALLBACK)
        }

    def report(self) -> Report:
        names, wall = self.clock.phases.names, self.wall or sum(self.seconds.values())
        device = self.clock.device.durations if self.clock.device is not None else None
        ordered = sorted(self.clock.durations.items(), key=lambda item: -item[1].total)
        rows: list[dict[str, Any]] = []
        for phase, durations in ordered:
            row = _row(names[phase], durations, wall)
            if device is not None:
                row["device ms"] = _milliseconds(device[phase].mean) if phase in device else None
            rows.append(row)
        steps = self.clock.work.steps
        title = f"StepProfiler: {self.stage}, {wall:.2f} s"
        if steps.count:
            title += f", {self.batches} batches, {1e3 * steps.quantile(0.5):.3g} ms each (median)"
        return Report(title, rows, self._notes())

    def _notes(self) -> list[str]:
        notes = self._throughput()
        clock = self.clock if self.clock.device is None else self.clock.device
        for name, moved in self.bytes.items():
            spent = clock.durations.get(self.clock.phases.number(name, on_device=True))
            if spent is not None and spent.total:
                notes.append(f"{name.capitalize()}: {moved / spent.total / 1e9:.4g} GB/s.")
        if self.ranks:
            most = max(self.ranks)
            lag = most - (sum(self.ranks) - most) / (len(self.ranks) - 1)
            notes.append(
                f"Slowest rank: {self.ranks.index(most)}, busy {1e3 * most:.3g} ms per batch, "
                f"{1e3 * lag:.3g} ms ({100 * lag / most:.1f}%) more than the mean of the others."
            )
        if self.clock.device is not None:
            notes.append(
                "Times are host times; the host runs ahead of the device. 'device ms' is the mean "
                "per step, from CUDA events."
            )
        return [*notes, *self.notes]

    def _throughput(self) -> list[str]:
        each, rates = " on each rank" if self.world_size > 1 else "", self.rates
        parts = [
            f"{rates[f'{unit}_per_second']:.4g} {unit}/s"
            for unit in ("samples", "tokens")
            if f"{unit}_per_second" in rates
        ]
        notes = []
        if "flops_per_second" in rates and self.flops is not None:
            parts.append(f"{rates['flops_per_second'] / 1e9:.4g} GFLOP/s")
            notes.append(
                f"FLOPs of a batch: {self.flops.forward:.4g} forward, {self.flops.backward:.4g} "
                f"backward, {self.flops.recomputed:.4g} recomputed."
            )
        if self.peak and "mfu" in rates:
            parts.append(f"MFU {100 * rates['mfu']:.1f}% of {self.peak / 1e12:.4g} TFLOP/s")
        return [*([f"While training{each}: {', '.join(parts)}."] if parts else []), *notes]


def _row(name: str, durations: Durations, wall: float) -> dict[str, Any]:
    return {
        "phase": name,
        "total s": float(f"{durations.total:.5g}"),
        "share": f"{100 * durations.total / wall:.1f}%" if wall else None,
        "count": durations.count,
        "mean ms": _milliseconds(durations.mean),
        "median ms": _milliseconds(durations.quantile(0.5)),
        "p95 ms": _milliseconds(durations.quantile(0.95)),
    }


def _milliseconds(seconds: float) -> float:
    return float(f"{1e3 * seconds:.4g}")
