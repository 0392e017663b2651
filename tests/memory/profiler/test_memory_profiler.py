"""MemoryProfiler against closed forms, MemTracker and the system."""

import gc
import json
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_opt as lo
from lightning_opt.core.measure.memory import MB, malloc_info
from lightning_opt.memory.meters import storage_bytes
from lightning_opt.memory.profiler.profile import CATEGORIES
from tests.helpers.models import AdversarialNet, SmallNet
from tests.helpers.processes import launch
from tests.helpers.trainers import MemoryLogger, quiet_trainer

needs_heap = pytest.mark.skipif(malloc_info() is None, reason="needs glibc's malloc statistics")

ROWS, WIDTH = 512, 256
ACTIVATION = ROWS * WIDTH * 4
WEIGHTS = 2 * (WIDTH * WIDTH + WIDTH) * 4


class Wide(SmallNet):
    """Two linear layers of width 256 with a ReLU, on 512 rows, with Adam: all sizes are known."""

    def __init__(self) -> None:
        super().__init__("Adam")
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.layer(batch)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.randn(8 * ROWS, WIDTH), batch_size=ROWS)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.randn(2 * ROWS, WIDTH), batch_size=ROWS)


def profile(model: Any, every_n_steps: int = 2, **settings: Any) -> lo.MemoryProfiler:
    profiler = lo.MemoryProfiler(every_n_steps, modules=settings.pop("modules", False))
    quiet_trainer(callbacks=[profiler], **settings).fit(model)
    return profiler


# --- records and deltas -------------------------------------------------------------------------


@needs_heap
def test_delta_is_the_size_of_new_tensors():
    size = 100_000
    with lo.MemoryProfiler() as profiler:
        profiler.record("empty")
        kept = [torch.empty(size) for _ in range(5)]
        profiler.record("full")
        del kept[1:]
        profiler.record("one left")
    assert profiler.delta("empty", "full") == pytest.approx(5 * 4 * size, rel=0.01)
    assert profiler.delta("full", "one left") == pytest.approx(-4 * 4 * size, rel=0.01)
    assert profiler.delta("empty", "one left") == pytest.approx(4 * size, rel=0.01)
    with pytest.raises(KeyError, match=r"No record 'afterwards'.*empty, full, one left"):
        profiler.delta("empty", "afterwards")


# --- categories and peaks -----------------------------------------------------------------------


@needs_heap
def test_categories_match_the_closed_form():
    profiler = profile(Wide(), every_n_steps=3)
    last = {record.name: record.parts for record in list(profiler.profile.records)[-6:]}
    assert list(last) == ["step_start", "after_forward", "before_backward", "after_backward",
                          "before_optimizer", "step_end"]  # fmt: skip
    live = {record.name: record.live for record in profiler.profile.records}
    for name, parts in last.items():
        assert sum(parts[category] for category in CATEGORIES) == pytest.approx(
            live[name], rel=0.02
        )
        assert parts["parameters"] == WEIGHTS
        assert parts["optimizer"] == pytest.approx(2 * WEIGHTS, rel=0.001)  # and Adam's step counts
    gradients = {name: parts["gradients"] for name, parts in last.items()}
    assert gradients["step_start"] == gradients["after_forward"] == WEIGHTS
    assert gradients["before_backward"] == 0
    assert gradients["after_backward"] == gradients["step_end"] == WEIGHTS
    # Saved: the outputs of ReLU and of the network. The batch is no activation.
    activations = {name: parts["activations"] for name, parts in last.items()}
    assert activations["after_forward"] == pytest.approx(2 * ACTIVATION, rel=0.05)
    for name in ("step_start", "after_backward", "step_end"):
        assert activations[name] < 0.05 * ACTIVATION


@needs_heap
def test_peaks_match_the_mem_tracker_of_torch():
    from torch.distributed._tools.mem_tracker import MemTracker

    model = Wide()
    profiler = profile(model, every_n_steps=4)
    start = next(r for r in profiler.profile.records if r.name == "step_start")
    batch, optimizer = torch.randn(ROWS, WIDTH), torch.optim.Adam(model.parameters())
    model.layer(batch).square().mean().backward()
    optimizer.step()  # creates the state and gradients before measuring
    tracker = MemTracker()
    tracker.track_external(model.layer, optimizer, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tracker:
            loss = model.layer(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            after_backward = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
            optimizer.step()
            whole = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    before = storage_bytes([*model.parameters(), batch]) + 3 * WEIGHTS  # plus gradients, state
    above = {name: peak - start.live for name, peak in profiler.peaks.items()}
    largest = max(above["forward"], above["backward"])
    assert largest == pytest.approx(after_backward - before, rel=0.05)
    assert max(above.values()) == pytest.approx(whole - before, rel=0.05)


def test_phase_peak_includes_the_code_inside():
    with lo.MemoryProfiler() as profiler:
        profiler.record("before")
        with profiler.phase("wide"):
            for _ in range(3):  # one at a time, so the peak counts one
                torch.zeros(8 * MB).add(1).sum()
        with profiler.phase("narrow"):
            torch.zeros(4 * MB)
    before = profiler.profile.latest("before").live
    # Up to 2 MB: garbage of other tests may be freed meanwhile.
    assert profiler.peaks["wide"] - before == pytest.approx(64 * MB, abs=2 * MB)
    assert profiler.peaks["narrow"] - before == pytest.approx(16 * MB, abs=2 * MB)
    assert [row["phase"] for row in profiler.report().rows] == ["wide", "narrow"]


def test_phases_are_recorded_for_two_optimizers():
    profiler = profile(AdversarialNet(), every_n_steps=1, max_epochs=1, limit_val_batches=0)
    assert set(profiler.peaks) == {"forward", "backward", "optimizer"}
    names = [record.name for record in profiler.profile.records if record.step == 2]
    assert names.count("before_backward") == 2
    assert names.count("before_optimizer") == 2


def test_peak_of_validation_excludes_the_sanity_check():
    profiler = profile(Wide(), every_n_steps=100, num_sanity_val_steps=2)
    assert set(profiler.peaks) == {"validation"}
    assert len(profiler.profile.peaks["validation"]) == 1


def test_compiled_model_is_measured_only_at_the_ends_of_a_phase():
    model = Wide()
    model.layer.compile(backend="eager")
    profiler = profile(model)
    assert set(profiler.peaks) == {"forward", "backward", "optimizer", "validation"}
    assert "only at the two ends" in str(profiler.report())


# --- modules ------------------------------------------------------------------------------------


def test_saved_bytes_by_module_match_the_closed_form():
    rows = profile(Wide(), modules=True).module_report().rows
    saved = {row["module"]: row["saved MB"] * MB for row in rows}
    # The first layer saves the batch, ReLU its output, which the second layer saves again.
    expected = {
        "layer.0": ACTIVATION,
        "layer.1": ACTIVATION,
        "layer.2": 0,
        "(outside of modules)": ACTIVATION,
    }
    assert saved == pytest.approx(expected)


# --- logs ---------------------------------------------------------------------------------------


class CollectGarbage(Wide):
    def on_train_batch_end(self, *_: Any) -> None:
        gc.collect()


def test_run_logs_peaks_and_categories():
    logger = MemoryLogger()
    profiler = profile(CollectGarbage(), every_n_steps=3, logger=logger, max_epochs=2)
    for phase in ("forward", "backward", "optimizer"):
        peaks = [peak / MB for peak in profiler.profile.peaks[phase]]
        assert logger.series(f"profile/peak_{phase}_mb") == peaks
        assert len(peaks) == 5  # of 16 steps
    assert logger.series("profile/resident_mb")[0] > 50
    assert len(profiler.profile.records) == 5 * 6
    assert logger.series("profile/parameters_mb") == [WEIGHTS / MB] * 5
    # The part of the phase "forward" before the backward pass needs most, but is not the last.
    assert profiler.profile.peaks["forward"][-1] >= profiler.profile.latest("before_backward").live
    row = next(row for row in profiler.report().rows if row["phase"] == "backward")
    assert row["peak MB"] == max(profiler.profile.peaks["backward"]) / MB
    assert row["gradients MB"] == WEIGHTS / MB
    assert profiler.profile.pauses.count >= 16
    assert "Garbage collection" in str(profiler.report())


def test_logged_categories_are_of_the_latest_step():
    gc.collect()  # garbage of earlier tests would hide which part of the step needs most
    model, logger = Wide(), MemoryLogger()
    batches = [torch.randn(rows, WIDTH) for rows in (16 * ROWS, 8)]
    model.train_dataloader = lambda: DataLoader(batches, batch_size=None)
    profile(model, every_n_steps=1, logger=logger)
    first, second = logger.series("profile/activations_mb")
    assert second < first / 2


def test_dispatch_mode_is_removed_and_nothing_written_after_a_failing_step(tmp_path):
    model = SmallNet(fail_at=3)
    with pytest.raises(ArithmeticError, match="planted"):
        profile(model, every_n_steps=1, modules=True, default_root_dir=tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ArithmeticError), lo.MemoryProfiler() as profiler, profiler.phase("all"):
        raise ArithmeticError
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    torch.ones(3, requires_grad=True).square().sum().backward()


# --- out of memory ------------------------------------------------------------------------------


class OutOfMemoryNet(Wide):
    """Allocates more memory than any machine has, while large tensors are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [torch.zeros(2 * MB)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scratch = torch.zeros(3 * MB)
        if self.global_step == 3:
            self.allocate(scratch)
        return super().training_step(batch, batch_idx)

    def allocate(self, scratch: Tensor) -> None:
        doubled = scratch.requires_grad_() * 2
        torch.empty(1 << 50)
        del doubled


def test_out_of_memory_report_names_the_largest_tensors(tmp_path, caplog):
    gc.collect()  # tensors of other tests would be listed too
    with pytest.raises(RuntimeError, match=r"allocate memory|not enough memory"):
        profile(OutOfMemoryNet(), every_n_steps=1, default_root_dir=tmp_path)
    content = json.loads((tmp_path / "out_of_memory.json").read_text())
    assert content["title"] == "Out of memory in forward: the largest live tensors"
    found = {row["what"]: row for row in content["rows"]}
    assert found["allocate: scratch"]["MB"] == 12
    assert found["allocate: doubled"]["made by"] == "MulBackward0"
    assert found["kept"]["MB"] == 8
    weights = WIDTH * WIDTH * 4 / MB
    for name in ("layer.0.weight", "layer.0.weight.grad", "Adam.state[layer.2.weight].exp_avg_sq"):
        assert found[name]["MB"] == weights
        assert found[name]["shape"] == "(256, 256)"
    assert "of it in" in content["notes"][1]
    assert "out_of_memory.txt" in caplog.text
    assert (tmp_path / "out_of_memory.txt").read_text().startswith("Out of memory in forward")


def test_out_of_memory_in_a_phase_is_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError), lo.MemoryProfiler() as profiler, profiler.phase("loading"):
        torch.empty(1 << 50)
    assert (tmp_path / "out_of_memory.txt").read_text().startswith("Out of memory in loading")


def test_out_of_memory_error_is_kept_if_the_report_cannot_be_written(tmp_path, caplog):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(RuntimeError, match=r"allocate memory|not enough memory"):
        profile(OutOfMemoryNet(), every_n_steps=1, default_root_dir=file)
    assert "could not write the live tensors" in caplog.text


def run_out_under_a_limit(folder: str) -> tuple[str, list[str]]:
    """Exceed a memory limit in the backward pass."""
    import resource

    model = Wide()
    profile(model)
    limit = psutil.Process().memory_info().vms + 160 * MB  # backward needs 256 MB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    model.train_dataloader = lambda: DataLoader(torch.randn(32768, WIDTH), batch_size=32768)
    try:
        profile(model, default_root_dir=folder)
    except RuntimeError as error:
        content = json.loads((Path(folder) / "out_of_memory.json").read_text())
        return str(error), [row["what"] for row in content["rows"]]
    return "completed", []


@pytest.mark.distributed
def test_out_of_memory_report_is_written_at_a_real_limit(tmp_path):
    ((error, names),) = launch(run_out_under_a_limit, str(tmp_path), processes=1)
    assert "allocate memory" in error
    assert "layer.0.weight" in names


# --- a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_cuda_peaks_come_from_the_allocator():
    logger = MemoryLogger()
    profiler = profile(Wide(), accelerator="gpu", logger=logger)
    assert profiler.profile.exact
    assert profiler.profile.source == "torch's CUDA allocator"
    assert logger.series("profile/fragmentation")
    assert logger.series("profile/alloc_retries")
    above = profiler.peaks["forward"] - profiler.profile.latest("step_start").live
    assert above >= 2 * ACTIVATION
