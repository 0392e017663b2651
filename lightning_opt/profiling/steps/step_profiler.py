"""StepProfiler, which measures the phases of a run, and the measurements of one run."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_opt.core.arguments import check_at_least, check_positive
from lightning_opt.core.modules.batches import check_tokens
from lightning_opt.core.output.report import Report, Verdict
from lightning_opt.profiling.durations import Work
from lightning_opt.profiling.flops import Flops, peak_flops
from lightning_opt.profiling.steps import phase_clock as phases
from lightning_opt.profiling.steps.phase_clock import DeviceClock, PhaseClock, Phases
from lightning_opt.profiling.steps.step_run import StepRun
from lightning_opt.trainer.lightning import BaseProfiler

DATA_BOUND, COMMUNICATION_BOUND = 0.2, 0.3
"""Largest acceptable shares of the step time for data and for gradient communication."""


@dataclass
class Measures:
    """All measurements of one run, in bounded memory.

    Attributes:
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        clock: Durations by phase, and the timed training steps.
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
            flops = self.flops.model / self.flops_units * (work.tokens or work.samples)
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
        left_out = {phases.NAMES[phase] for phase in phases.NOT_OF_A_STEP}
        return {
            name: seconds
            for name, seconds in self.seconds.items()
            if name not in left_out and not name.startswith(phases.CALLBACK)
        }

    def report(self) -> Report:
        names, wall = self.clock.phases.names, self.wall or sum(self.seconds.values())
        device = self.clock.device.durations if self.clock.device is not None else None
        ordered = sorted(self.clock.durations.items(), key=lambda item: -item[1].total)
        rows: list[dict[str, Any]] = []
        for phase, durations in ordered:
            row = {
                "phase": names[phase],
                "total s": float(f"{durations.total:.5g}"),
                "share": f"{100 * durations.total / wall:.1f}%" if wall else None,
                "count": durations.count,
                "mean ms": _milliseconds(durations.mean),
                "median ms": _milliseconds(durations.quantile(0.5)),
                "p95 ms": _milliseconds(durations.quantile(0.95)),
            }
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
            region = clock.durations.get(self.clock.phases.number(name))
            if region is not None and region.total:
                notes.append(f"{name.capitalize()}: {moved / region.total / 1e9:.4g} GB/s.")
        if self.ranks:
            busy = max(self.ranks)
            lag = busy - (sum(self.ranks) - busy) / (len(self.ranks) - 1)
            notes.append(
                f"Slowest rank: {self.ranks.index(busy)}, busy {1e3 * busy:.3g} ms per batch, "
                f"{1e3 * lag:.3g} ms ({100 * lag / busy:.1f}%) more than the mean of the others."
            )
        if self.clock.device is not None:
            notes.append(
                "Times are host times; the host runs ahead of the device. 'device ms' is the mean "
                "per step, from CUDA events."
            )
        return [*notes, *self.notes]

    def _throughput(self) -> list[str]:
        place, rates = " on each rank" if self.world_size > 1 else "", self.rates
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
        return [*([f"While training{place}: {', '.join(parts)}."] if parts else []), *notes]


def _milliseconds(seconds: float) -> float:
    return float(f"{1e3 * seconds:.4g}")


class StepProfiler(BaseProfiler):
    """Shows where the time of a run goes, in phases that add up to the wall time.

    The phases are data wait, transfer, forward, loss, backward, gradient communication, clipping,
    each callback by name, optimizer step, logging, validation, checkpoint, and Lightning's own
    loop. Time counts only for the innermost phase. On CUDA, each phase's device time is measured
    too, by events that are read some steps later, so no step waits for the device. Memory does not
    grow with the run.

    At the end of a run, rank 0 prints the table. :meth:`report` returns it, and compares the ranks
    if every rank has a profiler.

    Logged every ``log_every_n_steps`` batches and at the end of a fit:

    ============================== =============================================================
    ``time/<phase>_ms``            milliseconds per batch of each phase since the last report
    ``time/step_ms``               their sum, without validation and checkpoints
    ``time/samples_per_second``    throughput of this rank
    ``time/tokens_per_second``     throughput of this rank, with ``tokens``
    ``time/flops_per_second``      FLOPs of the model, without recomputation
    ``time/mfu``                   ``time/flops_per_second`` as a share of the device's peak
    ============================== =============================================================

    Args:
        log_every_n_steps: Batches between two reports to the logger; 0 for none.
        tokens: Count tokens too. Either the key of the token tensor in batches that are dicts, or
            the number of tokens per sample.
        flops: Count the FLOPs of the first batch. This slows down the first batch, which is then
            excluded from the phases.
        peak_flops: The device's peak FLOPs per second in the run's precision. By default the
            manufacturer's figure is used, if known.
        print_table: Print the table at the end of a run.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> profiler = lo.StepProfiler()
        >>> trainer = L.Trainer(profiler=profiler, logger=False)
    """

    def __init__(
        self,
        log_every_n_steps: int = 100,
        tokens: int | str | None = None,
        flops: bool = True,
        peak_flops: float | None = None,
        print_table: bool = True,
    ) -> None:
        # Set before the checks below, which may raise: `Profiler.__del__` reads these three.
        self._run: StepRun | None = None
        self._stage: str | None = None
        self._output_file = None
        self.log_every_n_steps = check_at_least("log_every_n_steps", log_every_n_steps, 0)
        self.tokens = check_tokens(tokens)
        self.flops = flops
        self.peak_flops = None if peak_flops is None else check_positive("peak_flops", peak_flops)
        self.print_table = print_table
        super().__init__()
        self._runs: dict[str, Measures] = {}

    # --- called by the Trainer ------------------------------------------------------------------

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Start measuring. The Trainer calls this at the start of a run."""
        self._end_run()
        super().setup(stage, local_rank, log_dir)
        trainer = self._lightning_module.trainer  # type: ignore[attr-defined] # the Trainer sets it
        stage = str(getattr(stage, "value", stage))
        root = trainer.strategy.root_device
        device = DeviceClock(root) if root.type == "cuda" else None
        clock = PhaseClock(Phases(), phases.SETUP, device)
        measures = Measures(stage, clock, peak=self.peak_flops, world_size=trainer.world_size)
        self._run = StepRun(trainer, measures, self)
        self._runs.pop(stage, None)  # the newest run comes last
        self._runs[stage] = measures
        if measures.peak is None and root.type == "cuda":
            measures.peak = peak_flops(torch.cuda.get_device_name(root), str(trainer.precision))

    def start(self, action_name: str) -> None:
        """Start one of the Trainer's actions."""
        if self._run is not None:
            self._run.start(action_name)

    def stop(self, action_name: str) -> None:
        """End one of the Trainer's actions."""
        if self._run is not None:
            self._run.stop(action_name)

    def describe(self) -> None:
        """End the run; rank 0 prints the table."""
        if self._run is None:
            return
        trainer, measures = self._run.trainer, self._run.finish()
        if trainer.is_global_zero and self.print_table:
            measures.report().print()
        self.teardown(stage=self._stage)

    def teardown(self, stage: str | None) -> None:
        """Remove all hooks from the model and the Trainer."""
        self._end_run()
        super().teardown(stage)

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.end_epoch()

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the run's state, so that the profiler can be sent to a new process."""
        state = {**self.__dict__, "_run": None, "_runs": {}}
        state.pop("_lightning_module", None)
        return state

    # --- called by the user ---------------------------------------------------------------------

    def region(
        self,
        name: str,
        bytes: float | None = None,  # noqa: A002 - the plain name
    ) -> AbstractContextManager[None]:
        """Measure a part of a step as its own phase, excluded from the enclosing phase.

        This has no effect outside a run, or in a thread other than the Trainer's.

        Args:
            name: The phase is named ``region <name>``.
            bytes: Bytes moved by one call; the report then includes GB/s.

        Example:
            >>> import lightning_opt as lo
            >>> profiler = lo.StepProfiler()
            >>> with profiler.region("softmax", bytes=2 * 4096 * 4096 * 4):
            ...     pass  # in `training_step`
        """
        if self._run is None:
            return contextlib.nullcontext()
        return self._run.region(name, bytes)

    def measures(self, stage: str | None = None) -> Measures:
        """Return the measurements behind the table.

        Args:
            stage: Selects the last run of this stage: ``"fit"``, ``"validate"``, ``"test"`` or
                ``"predict"``. By default the last fit, or the last run if there was no fit.

        Raises:
            RuntimeError: If there was no such run.
        """
        stage = stage or ("fit" if "fit" in self._runs else next(reversed(self._runs), ""))
        if stage not in self._runs:
            raise RuntimeError(
                f"StepProfiler has not measured this run (measured: {sorted(self._runs)}). "
                "Pass it to a Trainer as profiler=."
            )
        return self._runs[stage]

    def report(self, stage: str | None = None) -> Report:
        """Return a table with one row per phase, the longest first.

        For ``stage`` see :meth:`measures`.
        """
        return self.measures(stage).report()

    def diagnose(self) -> list[Verdict]:
        """Return verdicts on the longest phase, communication and waiting for data."""
        seconds = self._runs["fit"].seconds_of_steps() if "fit" in self._runs else {}
        total = sum(seconds.values())
        if not total:
            finding = "StepProfiler has measured no training step."
            return [Verdict("profile", "unknown", finding, "Train longer.")]
        longest = max(seconds, key=seconds.__getitem__)
        share = seconds[longest] / total
        finding = f"{longest!r} takes longest, {share:.0%} of the step time without callbacks."
        waiting = seconds.get(phases.NAMES[phases.DATA], 0.0) / total
        sending = seconds.get(phases.NAMES[phases.COMMUNICATION], 0.0) / total
        verdicts = [Verdict("profile", "ok", finding)]
        if sending > COMMUNICATION_BOUND:
            advice = "Trainer(strategy='ddp_compressed') sends fewer bytes if that saves time."
            verdicts = [Verdict("profile", "look", finding, advice, gain=sending)]
        finding = f"StepProfiler: {waiting:.0%} of a step is waiting for data."
        if waiting > DATA_BOUND:
            advice = "Add DataPipelineTuner(), which measures how many workers the loader needs."
            return [*verdicts, Verdict("data", "look", finding, advice, gain=waiting)]
        return [*verdicts, Verdict("data", "ok", finding)]
