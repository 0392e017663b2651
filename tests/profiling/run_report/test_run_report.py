"""The report page of real runs: its findings, its pictures, and when it is written."""

import html
import mmap
import re
import resource
import sys
import xml.etree.ElementTree as ET
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lightning_opt as lo
from lightning_opt.core.output.loggers import log_image
from lightning_opt.data.pipeline import data_monitor
from lightning_opt.profiling.run_report import page as page_module
from lightning_opt.profiling.run_report import run_report
from lightning_opt.profiling.run_report.pictures import PICTURES, Data, draw, to_svg
from tests.helpers.models import SmallNet, assert_same_state, assert_same_weights
from tests.helpers.processes import launch
from tests.helpers.trainers import MemoryLogger, quiet_trainer
from tests.profiling.clock import Clock
from tests.profiling.drawing import draw_here


class Reader(str):
    """A page, whose texts can be read by section and tag."""

    def texts(self, section: str, tag: str) -> list[str]:
        (content,) = re.findall(rf'<section id="{section}"(.*?)</section>', self, re.DOTALL)
        return texts_of(content, tag)

    @property
    def sentence(self) -> str:
        return texts_of(self, "h1")[0]


def texts_of(content: str, tag: str) -> list[str]:
    found = re.findall(rf"<{tag}(?: [^>]*)?>([^<]+)", content)
    return [html.unescape(text.strip()) for text in found if text.strip()]


def fit(folder: Path, *callbacks: Callback, model: Any = None, **settings: Any) -> Any:
    trainer = quiet_trainer(callbacks=list(callbacks), default_root_dir=folder, **settings)
    trainer.fit(SmallNet() if model is None else model)
    return trainer


def read(folder: Path) -> Reader:
    return Reader((folder / "report.html").read_text())


def titles_of(page: Reader) -> list[str]:
    return page.texts("pictures", "figcaption")


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Disable pictures, because drawing starts a process that imports matplotlib."""
    monkeypatch.setattr(page_module, "find_spec", lambda name: None)


@pytest.fixture
def pictures(monkeypatch):
    monkeypatch.setattr(page_module, "find_spec", find_spec)
    draw_here(monkeypatch)


# --- findings and setup --------------------------------------------------------------------------


CLOCK = Clock()


class Items(Dataset[Any]):
    """Samples that take 10 ms by the simulated clock, and whose targets become huge."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> Any:
        CLOCK.spend(0.01)
        generator = torch.Generator().manual_seed(index)
        growth = 1.0 if index < 40 else 1e5
        return torch.randn(6, generator=generator), torch.full((1,), growth)


class Troubled(SmallNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        CLOCK.spend(0.01)
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Items(), batch_size=4)


class LimitsMemory(Callback):
    """Limits the address space to 64 MB more than is used, of which 1 GB is never touched."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2:
            self.reserved = mmap.mmap(-1, 2**30)
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            room = 64 * 2**20
            limit = pages * resource.getpagesize() + room
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _three_problems(folder):
    data_monitor.time = CLOCK  # type: ignore[assignment]
    callbacks = [
        lo.GradientHealth(every_n_steps=5),
        lo.DataMonitor(every_n_steps=10),
        LimitsMemory(),
        lo.RunReport(),
    ]
    fit(folder, *callbacks, model=Troubled(lr=1e-9))


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_three_planted_problems_become_three_findings(tmp_path):
    launch(_three_problems, tmp_path, processes=1)
    page = read(tmp_path)
    findings, code = page.texts("findings", "h3"), page.texts("findings", "pre")
    assert len(findings) == len(code) == 3
    advised = dict(zip(code, findings, strict=True))  # their order depends on what was measured
    assert "exploding" in advised["Trainer(callbacks=[lo.AdaptiveClipping()])"]
    full = advised["Trainer(callbacks=[lo.MicroBatching('auto')])"]
    assert re.match(r"At the peak, memory was (9\d|100)% full: .* \(address space\)", full)
    waits = advised["Trainer(callbacks=[lo.DataPipelineTuner()])"]
    assert re.match(r"Training waits for data 80% of the time", waits)
    assert page.sentence.startswith("Finished after 40 steps in ")


def test_page_has_all_sections_pictures_and_settings(tmp_path, monkeypatch):
    """It needs neither scripts nor the network, and loggers receive its images."""
    monkeypatch.setattr(page_module, "find_spec", find_spec)  # drawn in a process of their own
    profiler = lo.StepProfiler(print_table=False)
    callbacks = [
        lo.RunReport(),
        lo.GradientHealth(every_n_steps=2),
        lo.NonFiniteGuard(spike=7.0),
        lo.AdaptiveClipping(every_n_steps=2),
        lo.MemoryProfiler(every_n_steps=3),
    ]
    loggers = [TensorBoardLogger(tmp_path, "board", version=0), CSVLogger(tmp_path, "csv", 0)]
    given = {"max_epochs": 2, "limit_val_batches": 1}
    fit(tmp_path, *callbacks, profiler=profiler, logger=loggers, **given)
    text = (tmp_path / "board" / "version_0" / "report.html").read_text()
    page = Reader(text)
    assert re.findall(r'<section id="(\w+)"', text) == ["findings", "pictures", "reports", "setup"]
    assert titles_of(page) == titles_of(read(tmp_path / "csv" / "version_0")) == list(PICTURES)[:4]
    assert len(text) < 1e6
    assert not re.search("<(script|link|img|iframe|object)", text)
    assert not re.findall(r"""(?:href|src|url)\W+(https?:[^"')]+)""", text)
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(svg)
    titles = page.texts("reports", "summary")
    assert titles[:4] == [part.report().title for part in callbacks[1:]]
    assert titles[4].startswith("StepProfiler: fit")
    assert "Does memory grow without end? LeakDetector() measures" in str(
        page.texts("pictures", "li")
    )
    assert "GradientHealth" not in str(page.texts("pictures", "li"))
    cells = page.texts("setup", "td")
    settings = dict(zip(cells[::2], cells[1::2], strict=True))
    assert settings["RunReport"] == "defaults"
    assert settings["NonFiniteGuard"] == "spike=7.0"
    assert "max_epochs=2, limit_val_batches=1" in settings["Trainer"]
    for default in ("limit_train_batches", "min_epochs", "precision"):
        assert default not in settings["Trainer"]
    assert torch.__version__ in settings["machine"]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "board" / "version_0")).Reload()
    images = {tag: len(events.Images(tag)) for tag in events.Tags()["images"]}
    assert images == {f"report/{title}": 1 for title in list(PICTURES)[:4]}


def test_names_and_messages_are_escaped(tmp_path, pictures):
    name = "<script>alert('&amp;')</script>$x$"

    class Odd(SmallNet):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(6, 1))

        def forward(self, x: Any) -> Any:
            return super().forward(x) + getattr(self, name)(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 8:
                raise OSError('no "data" in <a&b>/c')
            return super().training_step(batch, batch_idx)

    folder = tmp_path / "a & <b>"
    with pytest.raises(OSError, match="no"):
        fit(folder, lo.RunReport(), lo.GradientHealth(every_n_steps=2), model=Odd())
    page = read(folder)
    assert page.sentence.startswith('Stopped by OSError: no "data" in <a&b>/c after 8 steps in ')
    assert "<script" not in page
    assert name in page.texts("reports", "td")
    assert name in page.texts("pictures", "text")
    assert any("a & <b>" in text for text in page.texts("setup", "td"))


# --- when it is written -------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "last"), [(ArithmeticError, False), (KeyboardInterrupt, True)])
def test_exception_writes_the_page_after_all_callbacks(tmp_path, error, last):
    class Ends(Callback):
        ended = False

        def on_exception(self, *args: Any) -> None:
            self.ended = True

        def report(self) -> lo.Report:
            return lo.Report("ended" if self.ended else "running", [])

        def diagnose(self) -> list[Any]:
            return []

    class Fails(SmallNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 5:
                raise error("planted")
            return super().training_step(batch, batch_idx)

    callbacks = [Ends(), lo.RunReport()] if last else [lo.RunReport(), Ends()]
    trainer = quiet_trainer(callbacks=callbacks, default_root_dir=tmp_path)
    before = list(trainer.callbacks)
    with pytest.raises((error, SystemExit)):
        trainer.fit(Fails())
    page = read(tmp_path)
    assert page.sentence.startswith(f"Stopped by {error.__name__}: planted after 5 steps in ")
    assert page.texts("reports", "summary") == ["ended"]
    assert trainer.callbacks == before


OF_CUDA = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 7.5 GiB free."


@pytest.mark.parametrize(("message", "size"), [("", f"{2**52} bytes"), (OF_CUDA, "20.00 GiB")])
def test_out_of_memory_is_the_first_finding(tmp_path, pictures, message, size):
    class Large(SmallNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                if message:
                    raise torch.OutOfMemoryError(message)
                torch.empty(2**50)
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="allocate"):
        fit(tmp_path, lo.RunReport(), model=Large())
    page = read(tmp_path)
    finding = f"Memory ran out at step 3: tried to allocate {size}."
    assert page.texts("findings", "h3")[0] == finding
    assert page.texts("findings", "pre")[0] == "Trainer(callbacks=[lo.MicroBatching('auto')])"
    assert any("out of memory" in text for text in page.texts("pictures", "text"))


@pytest.fixture
def written_at_each_step(monkeypatch):
    monkeypatch.setattr(run_report, "WRITE_SECONDS", 0.0)
    monkeypatch.setattr(run_report, "MAX_SHARE", 1e9)


@pytest.mark.usefixtures("written_at_each_step")
def test_page_is_written_during_the_run(tmp_path):
    sentences = []

    class Reads(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            sentences.append(read(tmp_path).sentence)

    fit(tmp_path, lo.RunReport(), Reads(), max_steps=3)
    starts = [sentence.partition(" steps")[0] for sentence in sentences]
    assert starts == ["Running after 0", "Running after 1", "Running after 2"]
    assert not (tmp_path / "report.html.new").exists()


@pytest.mark.usefixtures("written_at_each_step")
def test_failing_page_warns_once_and_training_continues(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.touch()
    alone, model, report = SmallNet(), SmallNet(), lo.RunReport()
    fit(tmp_path, model=alone, max_steps=3)
    fit(blocked / "folder", report, model=model, max_steps=3)
    (message,) = [m for m in caplog.messages if m.startswith("RunReport could not write")]
    assert "Training continues." in message
    fit(blocked / "folder", report, max_steps=3)
    assert caplog.messages.count(message) == 2  # once in each run
    assert_same_weights(model, alone)


def test_page_names_the_callback_that_stopped_the_run(tmp_path):
    fit(tmp_path, lo.RunReport(), Timer({"seconds": 0}))
    assert read(tmp_path).sentence.startswith("Stopped by Timer after 0 steps in ")


def test_exception_before_the_first_step_writes_the_page(tmp_path):
    class Fails(SmallNet):
        def validation_step(self, *args: Any) -> Any:
            raise ArithmeticError("planted")

    report = lo.RunReport()
    fit(tmp_path, report)
    with pytest.raises(ArithmeticError):
        fit(tmp_path, report, model=Fails(), num_sanity_val_steps=1)
    assert "ArithmeticError: planted after 0 steps in " in read(tmp_path).sentence
    assert " 0.0 samples per second" in read(tmp_path).sentence


def test_failing_report_and_failing_series_are_named_on_the_page(tmp_path, pictures):
    class Broken(Callback):
        def diagnose(self) -> list[Any]:
            return []

        def report(self) -> lo.Report:
            raise ValueError("planted")

        series = report

    fit(tmp_path, Broken(), lo.RunReport())
    page = read(tmp_path)
    assert page.texts("reports", "summary") == ["Broken failed: ValueError: planted"]
    drawing = "Drawing the pictures failed: ValueError('planted')"
    assert page.texts("pictures", "p") == [drawing]


class Validated(SmallNet):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.step(batch))


def test_resumed_run_continues_the_curve(tmp_path):
    first, second = lo.RunReport(), lo.RunReport()
    trainer = fit(tmp_path / "1", first, model=Validated(), num_sanity_val_steps=1)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = quiet_trainer(callbacks=[second], default_root_dir=tmp_path / "2", max_epochs=2)
    resumed.fit(Validated(), ckpt_path=tmp_path / "last.ckpt")
    (validation,) = (k for k in second.state_dict()["sums"] if k.startswith("validation/"))
    assert list(second.state_dict()["sums"][validation]) == [11, 23]  # not that of the check
    losses = second.state_dict()["sums"]["loss"]
    assert len(losses) == 24
    assert {step: losses[step] for step in first.state_dict()["sums"]["loss"]} == (
        first.state_dict()["sums"]["loss"]
    )
    assert " after 24 steps (resumed at 12) in " in read(tmp_path / "2").sentence
    page, later = (tmp_path / "2" / "report.html").read_text(), SmallNet()
    later.validation_step = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):  # an error after the run does not change its page
        resumed.validate(later, verbose=False)
    assert (tmp_path / "2" / "report.html").read_text() == page


def test_curves_of_other_callbacks_continue_after_a_resume_and_restart_with_a_model(tmp_path):
    def run(report: lo.RunReport, epochs: int, path: Path | None = None) -> Any:
        callbacks = [report, lo.AdaptiveClipping(every_n_steps=4)]
        trainer = quiet_trainer(callbacks=callbacks, default_root_dir=tmp_path, max_epochs=epochs)
        trainer.fit(SmallNet(), ckpt_path=path, weights_only=True if path else None)
        return trainer

    whole, first, resumed = (lo.RunReport() for _ in range(3))
    run(whole, 2)
    run(first, 1).save_checkpoint(tmp_path / "last.ckpt")
    run(resumed, 2, tmp_path / "last.ckpt")
    assert_same_state(resumed.state_dict(), whole.state_dict())
    assert len(whole.state_dict()["sums"]) > 1
    trainer = run(first, 2)
    assert_same_state(first.state_dict(), whole.state_dict())
    trainer.fit_loop.max_epochs += 2
    trainer.fit(SmallNet())
    assert first.state_dict()["sums"].keys() == whole.state_dict()["sums"].keys()


@pytest.mark.parametrize("is_first", [True, False])
def test_batch_size_trials_leave_no_trace_in_the_report(tmp_path, monkeypatch, is_first):
    states: list[str] = []
    monkeypatch.setattr(lo.RunReport, "_write", lambda self, _, state, **__: states.append(state))
    plain, tried = lo.RunReport(), lo.RunReport()
    fit(tmp_path, plain, lo.AdaptiveClipping(every_n_steps=4))
    callbacks = [tried, lo.DynamicBatchSize(max_size=4)][:: 1 if is_first else -1]
    fit(tmp_path, *callbacks, lo.AdaptiveClipping(every_n_steps=4))
    assert states == ["Finished", "Finished"]
    sums = tried.state_dict()["sums"]
    assert any(key.startswith("batch_size/") for key in sums)
    own = {key: points for key, points in sums.items() if not key.startswith("batch_size/")}
    assert_same_state(own, plain.state_dict()["sums"])


# --- recorded losses ---------------------------------------------------------------------------


def test_loss_of_each_accumulated_batch_is_recorded_and_not_logged(tmp_path):
    losses, logger = [], MemoryLogger()

    class Keeps(SmallNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            outputs = super().training_step(batch, batch_idx)
            losses.append(outputs["loss"].item())
            return outputs

    report = lo.RunReport()
    fit(tmp_path, report, model=Keeps(), accumulate_grad_batches=3, logger=logger)
    sums = report.state_dict()["sums"]["loss"]
    assert sum(count for _, count in sums.values()) == 12
    assert sum(total for total, _ in sums.values()) == pytest.approx(sum(losses))
    assert {key for _, metrics in logger.records for key in metrics} <= {"epoch"}


# --- loggers, notebooks, matplotlib -------------------------------------------------------------


def test_wandb_and_mlflow_receive_pictures(tmp_path):
    images: list[Any] = []
    wandb = SimpleNamespace(log_image=lambda *image: images.append(image))
    client = SimpleNamespace(log_artifact=lambda *image: images.append(image))
    mlflow = SimpleNamespace(run_id="7", experiment=client)
    trainer: Any = SimpleNamespace(loggers=[wandb, mlflow], fit_loop=quiet_trainer().fit_loop)
    file = tmp_path / "Loss.png"
    log_image(trainer, "report/Loss", file)
    assert images == [("report/Loss", [str(file)], 0), ("7", str(file), "report")]


def test_notebook_shows_the_page_in_a_frame(tmp_path):
    trainer = fit(tmp_path, lo.GradientHealth(every_n_steps=2), lo.RunReport())
    page = lo.report(trainer)
    shown, written = Reader(page), read(tmp_path)
    assert shown.texts("reports", "summary") == written.texts("reports", "summary") != []
    assert shown.sentence == written.sentence
    (source,) = re.findall(r'srcdoc="([^"]*)"', page._repr_html_())
    assert html.unescape(source) == page
    needed = "Pictures need matplotlib: pip install 'lightning-opt[plots]'"
    assert written.texts("pictures", "p") == [needed]


def test_report_without_the_callback_shows_the_other_callbacks(tmp_path, pictures):
    trainer = fit(tmp_path, lo.GradientHealth(every_n_steps=2))
    page = Reader(lo.report(trainer))
    assert page.sentence == "12 steps"
    assert titles_of(page) == ["Loss and gradient norm", "Gradient RMS by layer"]
    assert not list(tmp_path.iterdir())


# --- pictures -----------------------------------------------------------------------------------


def legend_of(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_phases_are_grouped_and_their_shares_add_up():
    names = {"data_wait": 3.0, "forward": 1.0, "loss": 1.0, "callback_A_B": 2.0, "other": 3.0}
    series = {f"time/{name}_ms": [(10, ms), (20, ms)] for name, ms in names.items()}
    series["time/step_ms"] = [(10, 10.0), (20, 10.0)]
    labels = legend_of(draw("Where a step's time goes", Data(series)))
    assert labels == ["data 30%", "forward 20%", "callbacks 20%", "Lightning 30%"]


def test_x_axis_spans_the_run_in_every_picture():
    series = {"loss": [(0, 1.0), (500, 1.0)], "accumulation/batches": [(3, 2.0)]}
    for title in ("Loss and gradient norm", "Batch sizes and communication"):
        axes = draw(title, Data(series, [(510, "out of memory")])).axes[-1]
        assert axes.get_xlim() == pytest.approx((-5.1, 515.1))


@pytest.mark.parametrize("count", [1, 300])
def test_any_number_of_layers_with_zeros_and_nan_is_drawn(count):
    values = [(10, 0.0), (20, float("nan")), (30, 1e-9), (40, 1e5)]
    series = {f"layers/blocks.{i}.attention.projection": values for i in range(count)}
    svg = to_svg("Gradient RMS by layer", Data(series))
    ET.fromstring(svg)
    assert len(svg) < 100_000
    assert len(draw("Gradient RMS by layer", Data(series)).axes[0].get_yticks()) <= 20


def test_series_without_finite_values_are_drawn():
    series = {"loss": [(1, float("nan")), (2, float("inf"))], "health/norm": [(1, float("inf"))]}
    ET.fromstring(to_svg("Loss and gradient norm", Data(series)))


# --- several processes --------------------------------------------------------------------------


def _count_collectives(folder, report):
    callbacks = [lo.RunReport()] if report else []
    profiler = lo.StepProfiler(print_table=False, flops=False)
    settings = {"devices": 2, "strategy": "ddp", "logger": CSVLogger(folder, "csv", 0)}
    fit(folder, *callbacks, profiler=profiler, **settings)
    groups = dist.distributed_c10d._world.pg_map
    count = sum(group._get_sequence_number_for_group() for group in groups)
    files = sorted(path.name for path in folder.rglob("report.html*"))
    return count, files, [one.sentence for one in callbacks]


@pytest.mark.distributed
def test_rank_0_writes_the_page_without_a_collective(tmp_path):
    (plain, *_), _ = launch(_count_collectives, tmp_path / "plain", False)
    (with_report, files, written), others = launch(_count_collectives, tmp_path / "report", True)
    assert written != others[2] == [lo.RunReport().sentence]
    assert with_report == plain > 0
    assert files == ["report.html"]
    page = read(tmp_path / "report" / "csv" / "version_0")
    assert any("Slowest rank" in text for text in page.texts("reports", "p"))
