"""torch.compile for any Lightning Trainer, which survives its failures."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from lightning_opt.core.measure.exhaustion import is_out_of_memory
from lightning_opt.core.modules.compiling import CLOCK
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report
from lightning_opt.core.output.verdicts import Verdict
from lightning_opt.kernels.compiling.errors import passed_compiled_backward
from lightning_opt.kernels.compiling.measuring import Race
from lightning_opt.kernels.compiling.process_settings import (
    compile_settings,
    ladder,
    refuse_neighbours,
    unmarked,
)
from lightning_opt.kernels.compiling.regions import EAGER, Region, Shared
from lightning_opt.kernels.compiling.scope import find_regions
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

MODES = ("auto", "max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead", "default")
SCOPES = ("model", "regions")
OFTEN = 3
"""Recompilations of one region from which on they are worth a warning."""


class CompileModel(RunCallback):
    """Compiles the model with torch.compile, and falls back to eager if that fails.

    The ``forward`` of the model's parts is replaced by compiled code while a stage runs. Classes,
    parameter names, ``state_dict`` keys and hooks stay the same, so checkpoints load with and
    without it. Metrics, logging and everything else that ``training_step`` does around its modules
    run as before.

    If compiling a call or its backward graph fails, the call is rolled back (random numbers,
    buffers, attributes) and repeated uncompiled, and the region moves on to the next mode of the
    ladder. The reason is logged once; no batch is lost or trained twice. If the uncompiled run
    raises as well, the error is the model's own and is raised unchanged. Out-of-memory errors pass
    through. An error that compiled code raises in a backward pass ends the run.

    ================================ ============================================================
    ``mode``                         modes that are tried, in this order
    ================================ ============================================================
    ``"auto"``                       ``default``, on every device; the others take minutes or
                                     overwrite outputs, so they are for those who ask for them
    ``"max-autotune"``               ``max-autotune``, ``reduce-overhead`` (on CUDA), ``default``
    ``"max-autotune-no-cudagraphs"`` this one, ``default``
    ``"reduce-overhead"``            ``reduce-overhead``, ``default``
    ``"default"``                    ``default``
    ================================ ============================================================

    After the last mode comes the uncompiled model. Each region moves down the ladder independently.

    Logged when something was compiled, and when something failed:

    ========================== =================================================================
    ``compile/seconds``        of compilation so far
    ``compile/graphs``         graphs compiled so far; backward graphs are not counted
    ``compile/graph_breaks``   places at which a graph ended and Python went on
    ``compile/recompilations`` calls that compiled again what had been compiled before
    ``compile/uncompiled``     regions that run uncompiled, since compilation failed
    ========================== =================================================================

    Args:
        mode: Where the ladder begins, see above.
        scope: ``"model"`` compiles the module's ``forward`` and each of its submodules as a whole.
            ``"regions"`` compiles the repeated blocks, one compilation for all blocks of one
            structure; what lies around them runs as it is. A model without repeated blocks is
            compiled as under ``"model"``.
        dynamic: As in ``torch.compile``: ``None`` compiles for the first shapes, and for any once
            they change; ``True`` for any from the start; ``False`` for each anew.
        fullgraph: Whether a part that cannot be traced into one graph counts as a failure.
        backend: As in ``torch.compile``, such as ``"inductor"`` or ``"aot_eager"``.
        measure: Whether to find out if it pays: a fit begins with a few timed steps uncompiled; it
            is compiled if the steps that are left could make up for the start, timed again, and
            taken back if it is no faster. The report says what was decided; all ranks decide alike.

    Raises:
        ValueError: In ``__init__`` for an unknown mode or scope, or a mode for another backend than
            inductor; in ``setup`` for an unknown backend, under DeepSpeed, for a second one, for a
            model that is compiled already, and beside what must see single operators.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.CompileModel(scope="regions")], logger=False)

    References:
        Ansel et al. (2024). *PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode
        Transformation and Graph Compilation*.
    """

    only_one = True
    process_only = ("_stack", "_shared", "_race")

    def __init__(
        self,
        mode: str = "auto",
        scope: str = "model",
        dynamic: bool | None = None,
        fullgraph: bool = False,
        backend: str | Callable[..., Any] = "inductor",
        measure: bool = False,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}; got {mode!r}.")
        if scope not in SCOPES:
            raise ValueError(f"scope must be 'model' or 'regions', got {scope!r}.")
        if mode != "auto" and backend != "inductor":
            raise ValueError(
                f"mode={mode!r} is one of inductor's, and backend={backend!r} is given. Leave "
                "mode at 'auto'."
            )
        self.mode, self.scope = mode, scope
        self.dynamic, self.fullgraph, self.backend = dynamic, fullgraph, backend
        self.measure = measure
        self._race: Race | None = None
        self._stack: ExitStack | None = None
        self._shared: Shared | None = None
        self.regions: list[Region] = []
        self._forget()

    def _forget(self) -> None:
        self._modes: dict[str, str] = {}
        self._said: set[str] = set()
        self._report = Report(f"CompileModel({self.mode!r}, scope={self.scope!r})", [])

    # --- putting on and taking off --------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what cannot work."""
        super().setup(trainer, pl_module, stage)
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                "CompileModel does not work with the DeepSpeed strategy, whose engine compiles by "
                "itself: see 'compile' in DeepSpeed's config."
            )
        if isinstance(self.backend, str):
            known = torch.compiler.list_backends(exclude_tags=())
            if self.backend not in known:
                raise ValueError(
                    f"backend must be one of {', '.join(known)} or a function, "
                    f"got {self.backend!r}."
                )
        refuse_neighbours(trainer, pl_module)

    def reset_for_model(self, pl_module: pl.LightningModule) -> None:
        """Try everything again: what failed on the last model says nothing about this one."""
        self._forget()

    # Not in `on_fit_start`: there others (checkpointing) replace `forward`, and belong below.

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the compiled ``forward`` on."""
        if self._stack is None:
            self._put_on(trainer, pl_module)

    on_train_start = on_validation_start = on_test_start = on_predict_start = on_sanity_check_start

    def _put_on(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        device = trainer.strategy.root_device
        shared = Shared(self.backend, self.fullgraph, self.dynamic, device, self._tell)
        modes = ladder(self.mode, device.type)
        self._shared, self._stack = shared, ExitStack()
        self._stack.enter_context(unmarked(pl_module))
        self._stack.callback(self._summarise)
        is_ddp = isinstance(trainer.strategy, DDPStrategy)
        self.regions = find_regions(pl_module, self.scope, modes, shared)
        if not self.regions:
            raise ValueError(
                f"CompileModel finds nothing to compile in {type(pl_module).__name__}: it has no "
                "forward and no submodules with parameters."
            )
        for region in self.regions:
            region.go_to(region.modes.index(self._modes.get(region.name, modes[0])))
            region.put_on(self._stack)
        self._stack.enter_context(compile_settings(self.regions, self.scope, is_ddp))
        CLOCK.start()
        self._stack.callback(CLOCK.stop)
        self._logged: dict[str, float] = {}
        decided = all(region.mode == EAGER for region in self.regions)
        if self.measure and not decided and trainer.state.fn == "fit":
            self._race = Race(self.regions)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Undo everything, and say so if it was compiled code that failed."""
        if self._stack is not None and passed_compiled_backward(exception):
            note = getattr(exception, "add_note", None)  # Python 3.10 has none
            if note is not None and not is_out_of_memory(exception):
                note(
                    "CompileModel: this came out of a compiled backward pass, where the step "
                    "cannot be taken back. Leave CompileModel out to see whether the model itself "
                    "raises it."
                )
        super().on_exception(trainer, pl_module, exception)

    def release(self, trainer: pl.Trainer) -> None:
        """Give the modules their own ``forward`` back."""
        if self._stack is not None:
            self._stack.close()
        self._stack = self._shared = self._race = None
        self.regions = []

    # --- steps ----------------------------------------------------------------------------------

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Begin to time the step, where that is wanted."""
        self.on_validation_batch_start()
        if self._race is not None and not self._race.verdict and self._shared is not None:
            self._race.begin(self._shared.device)

    def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Tell CUDA graphs that a step begins."""
        if self._shared is not None and self._shared.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log what has changed."""
        if self._race is not None and not self._race.verdict:
            self._race.end(trainer)
        scalars = self._scalars()
        if scalars != self._logged:
            self._logged = scalars
            log_scalars(trainer, scalars)
            self._warn_of_recompilations()

    # --- what is said ---------------------------------------------------------------------------

    def _tell(self, region: Region, failed: str, error: BaseException) -> None:
        """Warn once for each reason, on the rank that has failed: the others know nothing of it."""
        if region.reason in self._said:
            return
        self._said.add(region.reason)
        then = "uncompiled" if region.mode == EAGER else f"in mode {region.mode!r}"
        rank = (
            f" on rank {dist.get_rank()}" if dist.is_available() and dist.is_initialized() else ""
        )
        kind = "" if self.backend != "inductor" else f" in mode {failed!r}"
        warnings.warn(
            f"CompileModel: {region.name} ({region.kind}) could not be compiled{kind}{rank} and "
            f"runs {then} from now on. That call ran uncompiled, so nothing "
            f"is lost. The reason: {region.reason}",
            stacklevel=2,
        )

    def _warn_of_recompilations(self) -> None:
        for region in self.regions:
            again, said = region.recompilations, f"recompile {region.name}"
            if again >= OFTEN and said not in self._said:
                self._said.add(said)
                warnings.warn(
                    f"CompileModel: {region.name} ({region.kind}) was compiled again {again} "
                    "times, which costs more than it gains. If shapes vary, try "
                    "CompileModel(dynamic=True), pad to a few sizes, or set drop_last=True in the "
                    "DataLoader. TORCH_LOGS=recompiles in the environment has torch say why.",
                    stacklevel=2,
                )

    def _scalars(self) -> dict[str, float]:
        regions = self.regions
        return {
            "compile/seconds": sum(region.seconds for region in regions),
            "compile/graphs": float(sum(region.graphs for region in regions)),
            "compile/graph_breaks": float(sum(region.breaks for region in regions)),
            "compile/recompilations": float(sum(region.recompilations for region in regions)),
            "compile/uncompiled": float(sum(region.mode == EAGER for region in regions)),
        }

    def _summarise(self) -> None:
        self._modes = {region.name: region.mode for region in self.regions if region.rung}
        self._report = self._make_report()

    def _make_report(self) -> Report:
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
        if self._race is not None:
            notes.append(f"Measured: {self._race.verdict or 'too few steps to tell'}.")
        return Report(self._report.title, rows, notes)

    def diagnose(self) -> list[Verdict]:
        """Return whether the regions ran compiled."""
        rows = self.report().rows
        if not rows:
            return []
        plain = [row["region"] for row in rows if row["mode"] == EAGER]
        if plain and self.measure and len(plain) == len(rows):
            return [Verdict("compilation", "ok", " ".join(self.report().notes))]
        if plain:
            finding = f"{len(plain)} of {len(rows)} regions run uncompiled: {', '.join(plain[:3])}."
            advice = "Look at CompileModel's report(), whose notes say why."
            return [Verdict("compilation", "look", finding, advice)]
        finding = f"{len(rows)} regions ran compiled."
        return [Verdict("compilation", "ok", finding)]

    def report(self) -> Report:
        """Return one row a region: its mode, the seconds and graphs it took; reasons as notes."""
        return self._make_report() if self.regions else self._report
