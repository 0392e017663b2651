"""torch.compile for any Lightning Trainer, which survives its failures."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy

from lightning_opt.core.compiling import CLOCK
from lightning_opt.core.exhaustion import is_out_of_memory
from lightning_opt.core.loggers import log_scalars
from lightning_opt.core.report import Report
from lightning_opt.core.verdicts import Verdict
from lightning_opt.kernels.compiling.errors import passed_compiled_backward
from lightning_opt.kernels.compiling.process_settings import (
    compile_settings,
    ladder,
    lowers_ahead,
    refuse_neighbours,
    unmarked,
)
from lightning_opt.kernels.compiling.regions import EAGER, Region, Shared, give_up
from lightning_opt.kernels.compiling.retry import Retry
from lightning_opt.kernels.compiling.scope import find_regions

if TYPE_CHECKING:
    import lightning.pytorch as pl

MODES = ("auto", "max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead", "default")
SCOPES = ("model", "regions")
OFTEN = 3
"""Recompilations of one region from which on they are worth a warning."""


class CompileModel(Callback):
    """Compiles the model with torch.compile, and goes on without where that fails.

    ``forward`` of the model's parts is replaced by compiled code while a stage runs. Classes, names
    of parameters, ``state_dict`` keys and hooks stay as they are, so that checkpoints load without
    it, and the other way round. Metrics, logging and whatever else ``training_step`` does around
    the calls of its modules runs as before.

    A call that fails while it is compiled, in its forward pass or in its backward graph, is taken
    back (random numbers, buffers, attributes), done again uncompiled, and the region goes on in the
    next mode of the ladder. Said once, with the reason; no batch is lost or trained twice. If the
    uncompiled run raises as well, the error is the model's own and is raised as it is. Errors that
    say that memory ran out pass through.

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

    Behind the last comes the model as it is. Each region goes down the ladder by itself.

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

    def __init__(
        self,
        mode: str = "auto",
        scope: str = "model",
        dynamic: bool | None = None,
        fullgraph: bool = False,
        backend: str | Callable[..., Any] = "inductor",
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
        self._module: ref[Any] | None = None
        self._stack: ExitStack | None = None
        self._retry: Retry | None = None
        self._shared: Shared | None = None
        self.regions: list[Region] = []
        self._reset()

    def _reset(self) -> None:
        self._modes: dict[str, str] = {}
        self._said: set[str] = set()
        self._report = Report(f"CompileModel({self.mode!r}, scope={self.scope!r})", [])

    # --- putting on and taking off --------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what cannot work."""
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
        refuse_neighbours(self, trainer, pl_module)
        if self._module is None or self._module() is not pl_module:
            if self._module is not None:
                self._reset()  # another model: what failed on the last one says nothing about it
            self._module = ref(pl_module)

    # Not in `on_fit_start`: there others (checkpointing) replace `forward`, and belong below.

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the compiled ``forward`` on."""
        self._put_on(trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the compiled ``forward`` on."""
        self._put_on(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the compiled ``forward`` on."""
        self._put_on(trainer, pl_module)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the compiled ``forward`` on."""
        self._put_on(trainer, pl_module)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the compiled ``forward`` on."""
        self._put_on(trainer, pl_module)

    def _put_on(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._stack is not None:
            return
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
        self._agreed = trainer.world_size == 1
        self._logged: dict[str, float] = {}
        self._unproven = True
        self._single = isinstance(trainer.strategy, SingleDeviceStrategy)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Undo everything; Lightning calls no ``teardown`` after an exception."""
        if self._stack is not None and passed_compiled_backward(exception):
            note = getattr(exception, "add_note", None)  # Python 3.10 has none
            if note is not None and not is_out_of_memory(exception):
                note(
                    "CompileModel: this came out of a compiled backward pass, at a place where the "
                    "step cannot be taken back (several processes, manual optimisation, or not the "
                    "first step). Leave CompileModel out to see whether the model itself raises it."
                )
        self._undo()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Undo everything."""
        self._undo()

    def _undo(self) -> None:
        self._end_retry()
        if self._stack is not None:
            self._stack.close()
        self._stack = self._shared = None
        self.regions = []

    # --- steps ----------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Make ready to take the step back, as long as no backward pass has shown that it works."""
        self._mark_step()
        # Where backward graphs are compiled ahead, what is left are errors of compiled code itself,
        # and these show at once; else any recompilation may bring a failure.
        if self._single and pl_module.automatic_optimization:
            if self._unproven or not lowers_ahead():
                assert self._shared is not None
                self._retry = Retry(trainer, pl_module, self._shared, self._backward_failed)
            self._unproven = False

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log what has changed, and after the first batch have all ranks use the same mode."""
        self._end_retry()
        if not self._agreed:
            self._agreed = True
            self._agree(trainer)
        scalars = self._scalars()
        if scalars != self._logged:
            self._logged = scalars
            log_scalars(trainer, scalars)
            self._warn_of_recompilations()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have all ranks use the same mode."""
        if trainer.world_size > 1:
            self._agree(trainer)

    def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Tell CUDA graphs that a step begins."""
        self._mark_step()

    def on_test_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Tell CUDA graphs that a step begins."""
        self._mark_step()

    def on_predict_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Tell CUDA graphs that a step begins."""
        self._mark_step()

    def _mark_step(self) -> None:
        if self._shared is not None:
            self._shared.steps += 1
            if self._shared.device.type == "cuda":
                torch.compiler.cudagraph_mark_step_begin()

    def _end_retry(self) -> None:
        if self._retry is not None:
            self._retry.remove()
            self._retry = None

    def _backward_failed(self, error: BaseException) -> None:
        """Have the regions that took part in this step go on in another mode."""
        assert self._shared is not None
        for region in self.regions:
            if region.last_step == self._shared.steps and region.mode != EAGER:
                region.step_down(error, "backward")

    def _agree(self, trainer: pl.Trainer) -> None:
        """Go down to the lowest mode of any rank: a rank that failed alone would hold them up."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        rungs = torch.tensor([r.rung for r in self.regions], device=trainer.strategy.root_device)
        dist.all_reduce(rungs, op=dist.ReduceOp.MAX)
        # Waits for the device: after the first batch, and once an epoch.
        for region, rung in zip(self.regions, rungs.tolist(), strict=True):
            if rung > region.rung:
                region.reason = "compilation failed on another rank"
                region.go_to(rung)

    # --- what is said ---------------------------------------------------------------------------

    def _tell(self, region: Region, failed: str, error: BaseException, where: str) -> None:
        """Warn once for each reason, on the rank that has failed: the others know nothing of it."""
        self._unproven = True
        give_up(self.regions, error)
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
            f"runs {then} from now on. The step in which it showed ({where} pass) was done "
            f"uncompiled, so nothing is lost. The reason: {region.reason}",
            stacklevel=2,
        )

    def _warn_of_recompilations(self) -> None:
        for region in self.regions:
            if (
                region.counts.recompilations >= OFTEN
                and f"recompile {region.name}" not in self._said
            ):
                self._said.add(f"recompile {region.name}")
                why = region.counts.reasons.get("recompilation", "")
                warnings.warn(
                    f"CompileModel: {region.name} ({region.kind}) was compiled again "
                    f"{region.counts.recompilations} times, which costs more than it brings. "
                    "If shapes vary, try CompileModel(dynamic=True), pad to a few sizes, or "
                    f"set drop_last=True in the DataLoader. The last reason: {why or 'unknown'}",
                    stacklevel=2,
                )

    def _scalars(self) -> dict[str, float]:
        counts = [region.counts for region in self.regions]
        return {
            "compile/seconds": sum(c.seconds for c in counts),
            "compile/graphs": float(sum(c.graphs for c in counts)),
            "compile/graph_breaks": float(sum(c.breaks for c in counts)),
            "compile/recompilations": float(sum(c.recompilations for c in counts)),
            "compile/uncompiled": float(sum(region.mode == EAGER for region in self.regions)),
        }

    def _summarise(self) -> None:
        self._modes = self._current_modes()
        self._report = self._make_report()

    def _make_report(self) -> Report:
        rows = [
            {
                "region": region.name,
                "class": region.kind,
                "modules": len(region.forwards),
                "mode": region.mode,
                "seconds": round(region.counts.seconds, 3),
                "graphs": region.counts.graphs,
                "graph breaks": region.counts.breaks,
                "recompilations": region.counts.recompilations,
            }
            for region in self.regions
        ]
        notes = [f"{r.name}: {r.reason}" for r in self.regions if r.reason]
        notes += [
            f"{region.name}, last {what}: {why}"
            for region in self.regions
            for what, why in region.counts.reasons.items()
            if why
        ]
        return Report(self._report.title, rows, notes)

    def diagnose(self) -> list[Verdict]:
        """Return whether the regions ran compiled."""
        rows = self.report().rows
        if not rows:
            return []
        plain = [row["region"] for row in rows if row["mode"] == EAGER]
        if plain:
            finding = f"{len(plain)} of {len(rows)} regions run uncompiled: {', '.join(plain[:3])}."
            advice = "Look at CompileModel's report(), whose notes say why."
            return [Verdict("compilation", "look", finding, advice)]
        finding = f"{len(rows)} regions ran compiled."
        return [Verdict("compilation", "ok", finding)]

    def report(self) -> Report:
        """Return one row a region: its mode, the seconds and graphs it took; reasons as notes."""
        return self._make_report() if self.regions else self._report

    # --- state ----------------------------------------------------------------------------------

    def _current_modes(self) -> dict[str, str]:
        """Return the mode of each region that has left the first one."""
        if not self.regions:
            return self._modes
        return {region.name: region.mode for region in self.regions if region.rung}

    def state_dict(self) -> dict[str, Any]:
        """Return which regions have gone down the ladder, so that a resumed run need not retry."""
        return {"modes": dict(self._current_modes())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._modes = dict(state_dict["modes"])
        for region in self.regions:
            mode = self._modes.get(region.name, region.modes[0])
            if mode in region.modes and mode != region.mode:
                region.go_to(region.modes.index(mode))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the model, so that the callback can be sent to another process."""
        return {**self.__dict__, "_module": None}
