"""torch.compile for any Lightning Trainer, with a fallback to uncompiled code."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lightning_opt.core.arguments import check_one_of
from lightning_opt.core.modules.compiling import CLOCK
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report, Verdict
from lightning_opt.kernels.compiling.regions import EAGER, CompileOptions, Region
from lightning_opt.kernels.compiling.setup import (
    compile_settings,
    find_regions,
    modes_for,
    remove_marks,
)
from lightning_opt.trainer.lightning import DeepSpeedStrategy
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

MODES = ("auto", "max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead", "default")
SCOPES = ("model", "regions")


class CompileModel(RunCallback):
    """Compiles the model with torch.compile, and falls back to eager if that fails.

    While a stage runs, compiled code replaces the ``forward`` of the model or of its parts, the
    *regions*. Classes, parameter names, ``state_dict`` keys and hooks stay the same, so checkpoints
    load with and without it. Metrics, logging and everything else that ``training_step`` does
    around its modules run as before.

    If compiling a call or its backward graph fails, the call is rolled back (random numbers,
    buffers, attributes) and repeated uncompiled, and the region moves on to the next mode of the
    list below. One warning gives the reason; no batch is lost or trained twice. If the uncompiled
    run raises as well, the error is the model's own and is raised unchanged, as are out-of-memory
    errors. An error that compiled code raises in a backward pass ends the run, because that step
    cannot be rolled back. torch compiles no second derivatives: decorate the ``forward`` that a
    gradient penalty differentiates twice with ``torch.compiler.disable``.

    ================================ ============================================================
    ``mode``                         modes that are tried, in this order
    ================================ ============================================================
    ``"auto"``                       ``default``, because the other modes may compile for minutes
                                     or overwrite earlier outputs
    ``"max-autotune"``               ``max-autotune``, ``reduce-overhead`` (on CUDA), ``default``
    ``"max-autotune-no-cudagraphs"`` ``max-autotune-no-cudagraphs``, ``default``
    ``"reduce-overhead"``            ``reduce-overhead``, ``default``
    ``"default"``                    ``default``
    ================================ ============================================================

    After the last mode a region runs uncompiled. Each region changes its mode independently.

    Logged when something was compiled, and when something failed:

    ========================== =================================================================
    ``compile/seconds``        seconds of compilation so far
    ``compile/graphs``         graphs compiled so far; backward graphs are not counted
    ``compile/graph_breaks``   places at which a graph ended and Python continued
    ``compile/recompilations`` calls that compiled a region again
    ``compile/uncompiled``     regions that run uncompiled because compilation failed
    ========================== =================================================================

    Args:
        mode: The first mode to try, see above.
        scope: ``"model"`` compiles the module's ``forward`` and each of its outermost submodules,
            each as one region. ``"regions"`` compiles the repeated blocks only; blocks of the same
            structure are one region and share their compiled code. A model without repeated blocks
            is compiled as with ``"model"``.
        dynamic: As in ``torch.compile``: ``None`` compiles for the first shapes, and for any shapes
            once they change; ``True`` compiles for any shapes from the start; ``False`` compiles
            again for each new shape.
        fullgraph: Whether a region that cannot be traced into one graph counts as a failure.
        backend: As in ``torch.compile``, such as ``"inductor"`` or ``"aot_eager"``.

    Raises:
        ValueError: In ``__init__`` for an unknown mode or scope, or a mode for another backend than
            inductor; in ``setup`` for an unknown backend, with DeepSpeed, for a second
            ``CompileModel``, for a compiled model, and with callbacks that need individual
            operators.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.CompileModel(scope="regions")], logger=False)

    References:
        Ansel et al. (2024). *PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode
        Transformation and Graph Compilation*.
    """

    only_one = True
    not_pickled = ("regions",)

    def __init__(
        self,
        mode: str = "auto",
        scope: str = "model",
        dynamic: bool | None = None,
        fullgraph: bool = False,
        backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        if check_one_of("mode", mode, MODES) != "auto" and backend != "inductor":
            raise ValueError(
                f"mode={mode!r} is for backend='inductor', got backend={backend!r}. Leave mode "
                "at 'auto'."
            )
        self.mode = mode
        self.scope = check_one_of("scope", scope, SCOPES)
        self.dynamic, self.fullgraph, self.backend = dynamic, fullgraph, backend
        self.regions: list[Region] = []
        self._reset()

    def _reset(self) -> None:
        self._warned: set[str] = set()
        self._report = Report(f"CompileModel({self.mode!r}, scope={self.scope!r})", [])

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the strategy, the backend, the model and the other callbacks."""
        super().setup(trainer, pl_module, stage)
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                "CompileModel does not work with the DeepSpeed strategy, whose engine compiles by "
                "itself: see 'compile' in DeepSpeed's config."
            )
        if isinstance(self.backend, str):
            check_one_of("backend", self.backend, torch.compiler.list_backends(exclude_tags=()))
        if getattr(pl_module, "_compiler_ctx", None) is not None:
            raise ValueError(
                "The model was passed through torch.compile already, and CompileModel would "
                "compile it twice. Pass the original model to the Trainer, or remove CompileModel."
            )
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(other, RunCallback) and other.needs_operators:
                raise ValueError(
                    f"{type(other).__name__}({other.needs_operators}) needs to see individual "
                    "operators, but CompileModel fuses them. Use policy 'every_layer', 'sqrt', "
                    "'block', 'every_nth' or 'custom' with CompileModel, and no offload."
                )

    def reset_for_model(self, pl_module: pl.LightningModule) -> None:
        """Discard the report and the warnings about another model."""
        self._reset()

    # Not in `on_fit_start`: there other callbacks set a `forward`, which must be compiled as well.

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace ``forward`` of the regions."""
        if not self.regions:
            self._apply(trainer, pl_module)

    on_train_start = on_validation_start = on_test_start = on_predict_start = on_sanity_check_start

    def _apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        device = trainer.strategy.root_device
        modes = modes_for(self.mode, device.type)
        options = CompileOptions(
            modes, self.backend, self.fullgraph, self.dynamic, device, self._warn_of_failure
        )
        self._rank_text = f" on rank {trainer.global_rank}" if trainer.world_size > 1 else ""
        self._patches.enter_context(remove_marks(pl_module))
        self.regions = find_regions(pl_module, self.scope, options)
        if not self.regions:
            raise ValueError(
                f"CompileModel finds nothing to compile in {type(pl_module).__name__}: it has no "
                "forward and no submodules with parameters."
            )
        for region in self.regions:
            region.apply(self._patches)
        self._patches.enter_context(compile_settings(self.regions, self.scope, trainer))
        CLOCK.start()
        self._patches.callback(CLOCK.stop)
        self._logged: dict[str, float] = {}

    def release(self, trainer: pl.Trainer) -> None:
        """Restore ``forward`` of the modules."""
        self._report = self.report()
        super().release(trainer)
        self.regions = []

    # --- steps ----------------------------------------------------------------------------------

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Mark the start of a step for CUDA graphs."""
        if self.regions and self.regions[0].options.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = on_train_batch_start

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Log the values that changed."""
        scalars = self._scalars()
        if scalars != self._logged:
            self._logged = scalars
            log_scalars(trainer, scalars)

    # --- results --------------------------------------------------------------------------------

    def _warn_of_failure(self, region: Region, failed_mode: str) -> None:
        """Warn once for each reason, on the rank that failed: other ranks may not fail."""
        if region.reason in self._warned:
            return
        self._warned.add(region.reason)
        next_mode_text = "uncompiled" if region.mode == EAGER else f"in mode {region.mode!r}"
        failed_mode_text = f" in mode {failed_mode!r}" if self.backend == "inductor" else ""
        warnings.warn(
            f"CompileModel: {region.name} ({region.kind}) could not be compiled{failed_mode_text}"
            f"{self._rank_text} and runs {next_mode_text} from now on. That call ran uncompiled, "
            f"so no batch is lost. The reason: {region.reason}",
            stacklevel=2,
        )

    def _scalars(self) -> dict[str, float]:
        return {
            "compile/seconds": sum(region.seconds for region in self.regions),
            "compile/graphs": float(sum(region.graphs for region in self.regions)),
            "compile/graph_breaks": float(sum(region.breaks for region in self.regions)),
            "compile/recompilations": float(sum(region.recompilations for region in self.regions)),
            "compile/uncompiled": float(sum(region.mode == EAGER for region in self.regions)),
        }

    def report(self) -> Report:
        """Return one row per region: mode, seconds and graphs; the reasons of failures as notes."""
        if not self.regions:
            return self._report
        rows = [
            {
                "region": region.name,
                "class": region.kind,
                "modules": len(region.forwards),
                "mode": region.mode,
                "seconds": round(region.seconds, 3),
                "graphs": region.graphs,
                "graph breaks": region.breaks,
                "recompilations": region.recompilations,
            }
            for region in self.regions
        ]
        notes = [f"{r.name}: {r.reason}" for r in self.regions if r.reason]
        return Report(self._report.title, rows, notes)

    def diagnose(self) -> list[Verdict]:
        """Return whether the regions ran compiled."""
        report = self.report()
        rows = report.rows
        if not rows:
            return []
        compiled = sum(row["mode"] != EAGER for row in rows)
        finding = " ".join([f"{compiled} of {len(rows)} regions ran compiled.", *report.notes])
        if compiled == len(rows):
            return [Verdict("compilation", "ok", finding)]
        advice = "Change the code that could not be compiled, or remove CompileModel."
        return [Verdict("compilation", "look", finding, advice)]
