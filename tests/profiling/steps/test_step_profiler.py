"""StepProfiler in trainings whose parts take known times of a simulated clock."""

import contextlib
import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_opt as lo
from lightning_opt.profiling.steps import phase_clock
from tests.helpers.footprint import model_footprint, process_footprint, trainer_footprint
from tests.helpers.models import AdversarialNet, SmallNet, loader_of
from tests.helpers.processes import launch
from tests.helpers.syncs import SyncCounter
from tests.helpers.trainers import MemoryLogger, quiet_trainer
from tests.profiling.clock import Clock

NAP = 0.02
"""The unit of the simulated times, in seconds."""


def quiet_profiler(**settings: Any) -> lo.StepProfiler:
    return lo.StepProfiler(**{"print_table": False, **settings})


def fit(
    profiler: Any, model: LightningModule | None = None, *callbacks: Callback, **settings: Any
) -> Any:
    trainer = quiet_trainer(profiler=profiler, callbacks=list(callbacks), **settings)
    trainer.fit(SmallNet() if model is None else model)
    return trainer


def rows_of(profiler: lo.StepProfiler, stage: str | None = None) -> dict[str, dict[str, Any]]:
    return {row["phase"]: row for row in profiler.report(stage).rows}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(phase_clock, "perf_counter", clock)
    return clock


# --- sums --------------------------------------------------------------------------------------


def phases_of_a_fit(accumulate: int, **settings: Any) -> dict[str, Any]:
    profiler = quiet_profiler()
    fit(profiler, SmallNet(), logger=MemoryLogger(), accumulate_grad_batches=accumulate, **settings)
    measures = profiler.measures()
    assert sum(measures.seconds.values()) == pytest.approx(measures.wall, rel=1e-9)
    return {
        "rows": rows_of(profiler),
        "batches": measures.batches,
        "ranks": measures.ranks,
    }


@pytest.mark.parametrize("accumulate", [1, 3])
def test_phases_add_up_to_the_wall_time(accumulate, monkeypatch):
    monkeypatch.setattr(phase_clock, "perf_counter", Clock(tick=1e-3))
    found = phases_of_a_fit(accumulate, num_sanity_val_steps=2, val_check_interval=6)
    assert found["batches"] == 12
    rows = found["rows"]
    # FLOPs are counted in the first batch, which is excluded. With accumulation it does not step.
    assert rows["backward"]["count"] == rows["forward"]["count"] == 11
    assert rows["optimizer step"]["count"] == (11 if accumulate == 1 else 4)
    assert rows["validation"]["count"] == 3  # the sanity check and two validations
    assert "gradient communication" not in rows
    shares = sum(float(row["share"].rstrip("%")) for row in rows.values())
    assert shares == pytest.approx(100.0, abs=0.1 * len(rows))


def measure_in_ddp() -> Any:
    torch.manual_seed(0)
    fits = [phases_of_a_fit(accumulate, devices=2, strategy="ddp") for accumulate in (1, 3)]
    clock, profiler = Clock(), quiet_profiler(flops=False, print_table=True)

    class SlowRank1(Callback):
        def on_after_backward(self, trainer: Any, *args: Any) -> None:
            clock.spend(NAP * trainer.global_rank)

    class Net(SmallNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            clock.spend(NAP)
            return super().training_step(batch, batch_idx)

        def forward(self, x: Tensor) -> Tensor:
            clock.spend(2 * NAP)
            return super().forward(x)

    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(phase_clock, "perf_counter", clock)
        fit(profiler, Net(), SlowRank1(), devices=2, strategy="ddp", limit_val_batches=0)

    with contextlib.suppress(ArithmeticError):
        fit(quiet_profiler(), SmallNet(fail_at=0), devices=2, strategy="ddp")
    # Rank 0 does not wait for a profiler of rank 1, after the failed run of both either.
    alone = quiet_profiler() if dist.get_rank() == 0 else None
    fit(alone, SmallNet(), devices=2, strategy="ddp")
    if alone is not None:
        assert alone.measures().batches == 12
        assert alone.measures().ranks == []
    return fits, profiler.measures().ranks, profiler.measures().seconds, out.getvalue()


@pytest.mark.distributed
def test_each_rank_measures_communication_and_busy_time():
    first, second = launch(measure_in_ddp)
    for fits, ranks, seconds, _ in (first, second):
        # Only batches that step wait for communication. The first batch is excluded.
        for found, steps in zip(fits, (11, 4), strict=True):
            rows = found["rows"]
            assert rows["gradient communication"]["count"] == steps
            assert rows["optimizer step"]["count"] == steps
            assert rows["forward"]["count"] == rows["loss"]["count"] == 11
            assert rows["waiting for ranks"]["count"] >= 11
            assert len(found["ranks"]) == 2
        assert ranks == pytest.approx([3 * NAP, 4 * NAP])
        # DDP calls `training_step` through the module's `forward`, which is not the forward pass.
        assert seconds["loss"] == pytest.approx(12 * NAP)
        assert seconds["forward"] == pytest.approx(24 * NAP)
    assert "Slowest rank: 1, busy 80 ms per batch, 20 ms (25.0%) more than" in first[3]
    assert second[3] == ""


# --- phases ---------------------------------------------------------------------------------


BATCH = torch.randn(4, 6), torch.randn(4, 1)
CLOCK = Clock()
"""The clock of the classes below."""


class SpendingPart(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: CLOCK.spend(1.5 * NAP, "backward"))
        CLOCK.spend(NAP, "forward")
        return x * 1


class SpendingCriterion(nn.Module):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        CLOCK.spend(NAP, "loss")
        return nn.functional.mse_loss(outputs, targets)


class SpendingRows(Dataset[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        CLOCK.spend(3 * NAP, "data wait")
        return BATCH


class SpendingLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        CLOCK.spend(4 * NAP, "validation")
        return super().__iter__()


class SpendingSgd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        CLOCK.spend(2 * NAP, "optimizer step")
        return loss


class Spending(SmallNet):
    """Calls modules in a list, and a loss module."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([self.layer, SpendingPart()])
        self.criterion = SpendingCriterion()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for part in self.parts:
            x = part(x)
        CLOCK.spend(NAP, "loss")
        loss = self.criterion(x, batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        CLOCK.spend(4 * NAP, "validation")

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        CLOCK.spend(NAP, "clipping")

    def transfer_batch_to_device(self, batch: Any, *args: Any) -> Any:
        if self.trainer.training:
            CLOCK.spend(NAP, "transfer")
        return batch

    def on_train_batch_start(self, *args: Any) -> None:
        CLOCK.spend(NAP, "hooks of the module")

    def configure_optimizers(self) -> Any:
        CLOCK.spend(8 * NAP, "setup")
        return SpendingSgd(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(SpendingRows(), batch_size=None)

    def val_dataloader(self) -> Any:
        return SpendingLoader([BATCH], batch_size=None)  # type: ignore[arg-type]


class SpendingCallback(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        CLOCK.spend(0.5 * NAP, "callback SpendingCallback")

    on_after_backward = on_train_batch_end

    def on_save_checkpoint(self, *args: Any) -> None:
        CLOCK.spend(6 * NAP, "checkpoint")


class SpendingLogger(MemoryLogger):
    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        CLOCK.spend(NAP, "logging")


def test_each_phase_has_the_time_that_its_part_spent(monkeypatch, tmp_path):
    monkeypatch.setattr(phase_clock, "perf_counter", CLOCK)
    profiler = quiet_profiler(flops=False, log_every_n_steps=0)
    callbacks = [SpendingCallback(), ModelCheckpoint(tmp_path, save_top_k=-1)]
    settings = {"enable_checkpointing": True, "val_check_interval": 1, "limit_val_batches": 1}
    fit(profiler, Spending(), *callbacks, logger=SpendingLogger(), **settings)
    assert len(CLOCK.spent) == 13
    spent = {name: seconds for name, seconds in profiler.measures().seconds.items() if seconds}
    assert spent == pytest.approx(CLOCK.spent)
    outside = ("setup", "validation", "checkpoint")
    steps = sum(seconds for name, seconds in CLOCK.spent.items() if name not in outside)
    assert profiler.measures().clock.work.steps.total == pytest.approx(steps)
    step = steps - CLOCK.spent["callback SpendingCallback"]
    share = f"{CLOCK.spent['data wait'] / step:.0%}"
    profile, data = profiler.diagnose()
    assert profile.finding == (
        f"'data wait' takes longest, {share} of the step time without callbacks."
    )
    assert data.finding == f"StepProfiler: {share} of a step is waiting for data."
    assert (data.topic, data.state) == ("data", "look")
    assert "DataPipelineTuner" in data.advice


def test_forward_and_loss_are_one_phase_if_the_model_is_compiled():
    compiled = SmallNet()
    compiled.layer.compile(backend="eager")
    profiler = quiet_profiler()
    fit(profiler, compiled, limit_val_batches=0)
    rows = rows_of(profiler)
    assert rows["forward and loss"]["count"] == 12
    assert "forward" not in rows
    assert any("compiled" in note for note in profiler.report().notes)


# --- side effects ------------------------------------------------------------


@pytest.mark.parametrize("fail_at", [None, 0, 4])
def test_hooks_are_removed_after_a_run_or_an_exception(fail_at):
    def footprints(profiler: Any) -> tuple[Any, ...]:
        model, trainer = SmallNet(fail_at=fail_at), quiet_trainer(profiler=profiler, max_epochs=2)
        try:
            trainer.fit(model)
        except ArithmeticError:
            assert fail_at is not None
        found = trainer_footprint(trainer)
        found["trainer"]["attributes"].pop("profiler")
        assert torch._C._len_torch_dispatch_stack() == 0
        return model_footprint(model), found, process_footprint()

    footprints(None)  # the first run in a process creates lasting objects
    assert footprints(quiet_profiler()) == footprints(None)


class Copies(Callback):
    """Copies a module within an epoch, as averaging callbacks do."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.copy = copy.deepcopy(pl_module.layer)
        self.size = len(pickle.dumps(pl_module.layer))


def test_module_copies_have_no_active_hooks():
    class Idle(Callback):
        pass

    copies, model, profiler = Copies(), SmallNet(), quiet_profiler(flops=False)
    fit(profiler, model, copies, Idle())
    callbacks = [name for name in rows_of(profiler) if name.startswith("callback ")]
    assert callbacks == ["callback Copies"]  # callbacks without hooks have no phase
    before = profiler.report().rows
    assert copies.copy(torch.ones(2, 6)).shape == (2, 1)
    assert profiler.report().rows == before
    assert copies.size < len(pickle.dumps(model.layer)) + 1000


def test_profiler_adds_no_waits_for_the_device():
    def syncs(profiler: Any) -> dict[str, int]:
        class Counted(SmallNet):
            def on_train_batch_start(self, *args: Any) -> None:
                if args[1] == 1:
                    counter.clear()

            def on_train_batch_end(self, *args: Any) -> None:
                counted.update(counter.where)

        counted: dict[str, int] = {}
        with SyncCounter() as counter:
            fit(profiler, Counted())
        return counted

    assert syncs(quiet_profiler(log_every_n_steps=0)) == syncs(None)


# --- runs ---------------------------------------------------------------------------------------


def test_second_fit_and_each_evaluation_have_their_own_measures():
    profiler, model = quiet_profiler(), SmallNet()
    trainer = quiet_trainer(profiler=profiler, max_epochs=2)
    trainer.fit(model)
    first = profiler.measures()
    assert (first.batches, first.clock.work.samples) == (24, 23 * 4)  # without the first batch
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model)
    assert profiler.measures() is not first
    assert profiler.measures().batches == 12
    for stage in ("validate", "test", "predict"):
        getattr(trainer, stage)(model, **({} if stage == "predict" else {"verbose": False}))
        rows = rows_of(profiler, stage)
        assert {"data wait", "transfer", "forward", "Lightning's loop"} <= set(rows)
        assert profiler.measures(stage).seconds["forward"] > 0
    assert profiler.measures().stage == "fit"


def test_manual_optimization_is_measured():
    profiler = quiet_profiler()
    fit(profiler, AdversarialNet(), limit_val_batches=0)
    rows = rows_of(profiler)
    for phase in ("forward", "loss", "backward", "optimizer step"):
        assert rows[phase]["count"] == 11, phase


def test_stopped_epoch_counts_finished_batches():
    class Stops(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> Any:
            trainer.should_stop = index == 5

    profiler = quiet_profiler()
    fit(profiler, SmallNet(), Stops(), max_epochs=5)
    assert profiler.measures().batches == 6
    assert profiler.measures().clock.work.steps.count == 5


# --- regions ------------------------------------------------------------------------------------


def test_regions_and_user_actions_have_their_own_phases(clock):
    profiler = quiet_profiler(flops=False)

    class Net(SmallNet):
        """Has nested regions, and one around the forward pass."""

        def forward(self, x: Any) -> Any:
            with profiler.region("outer", bytes=8e6):
                clock.spend(NAP)
                with profiler.region("inner"):
                    clock.spend(2 * NAP)
            clock.spend(NAP)
            return self.layer(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with self.trainer.profiler.profile("my part"):
                clock.spend(5 * NAP)
            with profiler.region("all of it") if batch_idx == 3 else contextlib.nullcontext():
                return super().training_step(batch, batch_idx)

    with profiler.region("before any run"):
        pass
    fit(profiler, Net(), limit_val_batches=0, limit_train_batches=4)
    measures, rows = profiler.measures(), rows_of(profiler)
    # The time of an inner region does not count for the outer one.
    assert measures.seconds["region inner"] == pytest.approx(4 * 2 * NAP)
    assert measures.seconds["region outer"] == pytest.approx(4 * NAP)
    assert measures.seconds["my part"] == pytest.approx(4 * 5 * NAP)
    assert rows["my part"]["count"] == 4
    assert rows["forward"]["count"] == 3  # in one step, its time counted for the region
    assert rows["region all of it"]["count"] == 1
    assert measures.bytes == {"region outer": 4 * 8e6}
    assert f"Region outer: {8e6 / NAP / 1e9:.4g} GB/s." in profiler.report().notes


# --- FLOPs and rates ----------------------------------------------------------------------------


def test_rates_follow_from_counted_flops_and_step_time():
    profiler = quiet_profiler(peak_flops=1e9, tokens=7)
    model = SmallNet(widths=(5, 5))
    model.val_dataloader = lambda: loader_of(1, batch_size=3)  # counts in no rate
    # The matrix products of Muon's update are not the model's.
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    model.configure_optimizers = lambda: torch.optim.Muon(matrices)
    fit(profiler, model, val_check_interval=1)
    measures = profiler.measures()
    expected = lo.count_flops(model.layer, torch.ones(4, 6))
    assert measures.flops == expected
    seconds = measures.clock.work.steps.total
    assert measures.rates == pytest.approx(
        {
            "samples_per_second": 11 * 4 / seconds,
            "tokens_per_second": 7 * 11 * 4 / seconds,
            "flops_per_second": 11 * expected.model / seconds,
            "mfu": 11 * expected.model / seconds / 1e9,
        }
    )
    assert "MFU" in str(profiler.report())
    assert quiet_profiler(flops=False).peak_flops is None


def test_flops_are_counted_without_the_check_of_split_batches():
    profiler, model = quiet_profiler(), SmallNet(widths=(5, 5))
    fit(profiler, model, lo.MicroBatching(2))
    assert profiler.measures().flops == lo.count_flops(model.layer, torch.ones(4, 6))


def test_tokens_are_counted_by_batch_key():
    class Named(SmallNet):
        def train_dataloader(self) -> Any:
            batches = [{"ids": torch.ones(2, n, dtype=torch.long)} for n in (3, 4, 5)]
            return DataLoader(batches, batch_size=None)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(torch.ones(2, 6)).mean()

    profiler = quiet_profiler(tokens="ids", flops=False)
    fit(profiler, Named(), limit_val_batches=0)
    work = profiler.measures().clock.work
    assert (work.samples, work.tokens) == (6, 24)
    with pytest.raises(ValueError, match=r"tokens='words'.*\['ids'\]"):
        fit(quiet_profiler(tokens="words"), Named())


def test_failing_flop_formula_becomes_a_note(monkeypatch):
    def fails(*args: Any, **kwargs: Any) -> int:
        raise AssertionError("odd shapes")

    monkeypatch.setitem(torch.utils.flop_counter.flop_registry, torch.ops.aten.addmm, fails)
    profiler = quiet_profiler()
    fit(profiler)
    assert any("odd shapes" in note for note in profiler.report().notes)


# --- output -----------------------------------------------------------------------------------


def test_table_is_printed_and_means_are_logged(capsys):
    logger = MemoryLogger()
    profiler = lo.StepProfiler(log_every_n_steps=5)
    model = SmallNet()
    trainer = fit(profiler, model, logger=logger)
    assert capsys.readouterr().out.startswith("StepProfiler: fit")
    # After 5 and 10 batches and at the end. The first batch, which counts FLOPs, is excluded.
    assert len(logger.series("time/step_ms")) == 3
    assert [step for step, metrics in logger.records if "time/step_ms" in metrics] == [6, 11, 12]
    for _, metrics in logger.records:
        parts = [v for k, v in metrics.items() if k.endswith("_ms") and k != "time/step_ms"]
        assert sum(parts) == pytest.approx(metrics.get("time/step_ms", 0.0))
    assert trainer.callback_metrics["time/forward_ms"] > 0
    trainer.validate(model, verbose=False)
    with pytest.raises(RuntimeError, match=r"measured: \['fit', 'validate'\]"):
        profiler.report("test")
    trainer.profiler = newest = lo.StepProfiler(print_table=False)
    for evaluate in (trainer.validate, trainer.test, trainer.validate):
        evaluate(model, verbose=False)
    assert newest.report().title == newest.report("validate").title


# --- construction -------------------------------------------------------------------------------


def test_profiler_can_be_pickled_before_and_after_a_run():
    profiler = quiet_profiler()
    for _ in range(2):
        twin = pickle.loads(pickle.dumps(profiler))
        assert twin.log_every_n_steps == 100
        fit(profiler)
    fit(twin)
    assert twin.measures().batches == 12
