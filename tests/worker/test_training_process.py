"""A training in its own process: its steps, its failures and its end."""

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_opt.worker import training_process
from lightning_opt.worker.recipes import import_attribute, instantiate
from lightning_opt.worker.training_process import FitFailed, TrainingProcess
from tests.helpers.fork_server import share_fork_server, use_fork_server
from tests.helpers.processes import launch
from tests.helpers.trainers import quiet_trainer
from tests.profiling.fitting import CPU, Net, Rows, mishap, rows, rows_with_workers


def plain_losses(epochs: int = 2) -> list[float]:
    losses: list[float] = []
    spy = LambdaCallback(on_train_batch_end=lambda *args: losses.append(float(args[2]["loss"])))
    state = torch.get_rng_state()
    seed_everything(0, workers=True, verbose=False)
    net = Net()
    seed_everything(0, workers=True, verbose=False)
    quiet_trainer(callbacks=[spy], max_epochs=epochs).fit(net, rows())
    torch.set_rng_state(state)
    del os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"]
    return losses


def rows_and_numbers() -> Any:
    """Make the rows, with random numbers that the training does not see."""
    torch.rand(3)
    return rows()


@pytest.fixture(scope="module")
def fit() -> Iterator[TrainingProcess]:
    with TrainingProcess(Net, rows_and_numbers, CPU) as fit:
        yield fit


def pid_of(fit: TrainingProcess) -> int:
    assert fit._process.pid is not None
    return fit._process.pid


def gone(pid: int, seconds: float = 100.0) -> bool:
    """Return whether the process ends in time; a zombie has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


# --- steps ----------------------------------------------------------------------------------------


def test_steps_equal_an_uninterrupted_training(fit):
    """In blocks of different sizes, across the end of an epoch (10 batches)."""
    steps = [*fit.advance(3), *fit.advance(1), *fit.advance(16)]
    assert [step.loss for step in steps] == plain_losses()
    assert {step.samples for step in steps} == {4}
    assert all(0 < step.seconds < 60 for step in steps)
    assert fit.steps == steps
    assert pid_of(fit) != os.getpid()

    process = psutil.Process(pid_of(fit))
    time.sleep(0.2)
    before = sum(process.cpu_times()[:2])
    time.sleep(0.5)
    assert sum(process.cpu_times()[:2]) - before <= 0.1, "a paused process uses no CPU"


IMPORTED = """
import torch
from tests.profiling.fitting import Net
HELD = torch.ones(25_000_000)
class Silent(Net):
    def training_step(self, batch, batch_idx):
        pass
"""


def test_peak_memory_includes_the_model_but_no_imports_and_a_missing_loss_is_nan(tmp_path):
    def large() -> Net:
        net = Net()
        net.more = nn.Parameter(torch.ones(25_000_000))  # 100 MB
        return net

    (tmp_path / "imported.py").write_text(IMPORTED)
    with (
        TrainingProcess(large, rows, CPU) as large_process,
        TrainingProcess(f"{tmp_path}/imported.py:Silent", rows, CPU) as small_process,
    ):
        large_process.advance(1)
        assert math.isnan(small_process.advance(1)[0].loss)
        # The import counted would give about 0, the model counted twice 200 MB.
        assert 95e6 < large_process.peak_bytes - small_process.peak_bytes < 180e6


class Service(CSVLogger):
    """A logger that starts a run as soon as it is created."""

    def __init__(self) -> None:
        raise AssertionError("a measurement appears among the user's runs")


def test_created_settings_with_class_paths_are_used():
    def settings() -> dict[str, Any]:
        waits = {"class_path": "tests.profiling.fitting.Waits", "init_args": {"seconds": 0.1}}
        callbacks = [waits, {"class_path": "lightning_opt.GradientHealth"}]
        more = {"strategy": {"class_path": "SingleDeviceStrategy"}, "accumulate_grad_batches": 2}
        more["logger"] = {"class_path": f"{__name__}.Service"}
        return {**CPU, **more, "callbacks": callbacks}

    with TrainingProcess("tests.profiling.fitting:Net", rows, settings) as fit:
        (first,) = fit.advance(1)
    assert first.seconds >= 0.1
    assert first.loss == pytest.approx(plain_losses()[0], rel=1e-6), "not divided by 2"


class Draws(Callback):
    def __init__(self) -> None:
        torch.rand(1)


def test_process_has_the_settings_of_its_parent_and_its_own_seed(fit, monkeypatch, tmp_path):
    assert is_forked(fit)  # the fork server had other settings when it started
    (tmp_path / "added_module.py").write_text("from tests.worker.test_training_process import Net")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PATH")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)

    def make() -> Net:
        found = [torch.get_num_threads(), torch.initial_seed(), "PATH" in os.environ]
        (tmp_path / "found").write_text(str(found))
        return import_attribute("added_module:Net")()

    def data() -> Any:
        (tmp_path / "drawn").write_text(str(float(torch.rand(1))))
        return rows()

    settings = {**CPU, "callbacks": [{"class_path": f"{__name__}.Draws"}]}
    try:
        with TrainingProcess(make, data, settings, seed=7) as other:
            other.advance(1)
            assert is_forked(other)
    finally:
        torch.set_num_threads(threads)
    assert (tmp_path / "found").read_text() == str([threads + 1, 7, False])
    first = torch.rand(1, generator=torch.Generator().manual_seed(7))
    assert (tmp_path / "drawn").read_text() == str(float(first))


def test_changed_early_variable_starts_a_new_interpreter(fit, monkeypatch):
    """The fork server has imported torch without that variable."""
    monkeypatch.setenv("OMP_THREAD_LIMIT", "3")
    with TrainingProcess(lambda: Net(), rows, CPU, timeout=3600) as fresh:
        assert [step.loss for step in fresh.advance(5)] == plain_losses()[:5]
        assert is_forked(fit)
        assert not is_forked(fresh)


def is_forked(fit: TrainingProcess) -> bool:
    return "forkserver" in " ".join(psutil.Process(pid_of(fit)).cmdline())


class Counted(Rows):
    def __init__(self, file: Path) -> None:
        super().__init__(4000)
        self.file = file

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.005)
        with self.file.open("ab") as file:
            file.write(b".")
        return super().__getitem__(index)


def test_workers_prepare_no_batches_during_a_pause(tmp_path):
    """A training that waits for data would otherwise look faster after each pause."""
    file = tmp_path / "made"
    with TrainingProcess(
        Net, lambda: DataLoader(Counted(file), batch_size=8, num_workers=2), CPU
    ) as fit:
        for _ in range(2):
            fit.advance(2)
            time.sleep(0.1)  # until the last write has ended
            made = file.stat().st_size
            time.sleep(0.3)
            assert file.stat().st_size == made
        fit.advance(4)
        assert file.stat().st_size > made


def leave_one_open(server: dict[str, Any]) -> tuple[int, int, str]:
    """Start a training in a rank of a cluster, and leave it open."""
    use_fork_server(server)
    multiprocessing.current_process().daemon = False  # which may not have children
    os.environ |= {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "two nodes", "LOCAL_RANK": "1"}
    fit = TrainingProcess(Net, rows, TWO_RANKS, timeout=3600)
    fit.advance(2)
    LEFT_OPEN.append(fit)
    return pid_of(fit), fit.steps[0].samples, os.environ["LOCAL_RANK"]


LEFT_OPEN: list[TrainingProcess] = []


def test_process_with_an_open_training_exits_and_ignores_its_rank():
    ((pid, samples, rank),) = launch(leave_one_open, share_fork_server(), processes=1)
    assert (samples, rank) == (8, "1"), "two ranks with batches of 4"
    assert gone(pid)


def start_two_and_die(server: dict[str, Any], file: Path) -> None:
    """One training is paused, another hangs. Each has a worker."""
    use_fork_server(server)
    multiprocessing.set_start_method(None, force=True)  # of loaders, which otherwise fork a server
    settings = [CPU, lambda: mishap("hangs")]
    fits = [TrainingProcess(Net, rows_with_workers, one) for one in settings]
    for fit in fits:
        fit.advance(2)
    pids = [pid for fit in fits for pid in (pid_of(fit), *children_of(fit))]
    fits[1]._send(5)
    file.write_text(" ".join(map(str, pids)))
    os.kill(os.getpid(), signal.SIGKILL)


def test_all_processes_end_with_a_killed_parent(tmp_path):
    file, context = tmp_path / "pids", multiprocessing.get_context("forkserver")
    parent = context.Process(target=start_two_and_die, args=(share_fork_server(), file))
    parent.start()
    parent.join(300)
    pids = [int(pid) for pid in file.read_text().split()]
    assert len(pids) == 4
    assert [pid for pid in pids if not gone(pid)] == []


TWO_RANKS = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}


class OnRank1(Callback):
    """Fails or hangs on rank 1, while rank 0 waits for ever, or for rank 1 in the step."""

    def __init__(self, fails: bool, waits: bool) -> None:
        self.fails, self.waits = fails, waits

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step != 5:
            return
        if trainer.global_rank == 0:
            time.sleep(3600 * self.waits)
        elif self.fails:
            raise ArithmeticError("planted on rank 1")
        else:
            self.hang()

    def hang(self) -> None:
        time.sleep(3600)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("waits", [False, True])
def test_two_ranks_step_together_and_the_first_failure_is_reported(waits):
    """Without waiting rank 0 also fails, because its connection is closed."""
    settings = {**TWO_RANKS, "callbacks": [OnRank1(fails=True, waits=waits)]}
    with TrainingProcess(Net, rows, lambda: settings, timeout=3600) as fit:
        steps = [*fit.advance(3), *fit.advance(2)]
        assert {step.samples for step in steps} == {8}
        pids = [pid_of(fit), *children_of(fit)]
        assert len(pids) >= 2
        with pytest.raises(FitFailed, match="ArithmeticError: planted on rank 1") as failure:
            fit.advance(2)
    assert failure.value.kind == "error"
    assert "in on_train_batch_start" in failure.value.details
    assert all(gone(pid) for pid in pids)


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("ends", "error", "ended after 3 steps"),
        ("raises", "error", "ArithmeticError: planted"),
        ("takes_memory", "out of memory", "allocate"),
        ("segfaults", "died", "SIGSEGV"),
        ("leaves", "died", "exit status 7"),
        ("is_killed", "out of memory", "SIGKILL"),
    ],
)
def test_failure_has_a_kind_and_a_sentence(what, kind, message):
    settings = {**CPU, "max_steps": 3} if what == "ends" else lambda: mishap(what)
    with TrainingProcess(Net, rows, settings) as fit:
        assert len(fit.advance(2)) == 2
        with pytest.raises(FitFailed, match=message) as failure:
            fit.advance(2)
        assert failure.value.kind == kind
        assert "\n" not in failure.value.message
        if what in ("raises", "segfaults"):
            assert f"in {what}" in failure.value.details  # where in the user's code
            assert f"in {what}" in "".join(traceback.format_exception(failure.value))
        with pytest.raises(FitFailed):
            fit.advance(1)
        assert fit.closed


@pytest.mark.slow
@pytest.mark.distributed
def test_timeout_reports_the_stacks_of_all_ranks(monkeypatch):
    settings = {**TWO_RANKS, "callbacks": [OnRank1(fails=False, waits=True)]}
    monkeypatch.setattr(training_process, "STACK_SECONDS", 3.0)
    with TrainingProcess(Net, rows, lambda: settings, timeout=3600) as fit:
        pid = pid_of(fit)
        fit.advance(5)
        fit.timeout = 4
        with pytest.raises(FitFailed, match=r"did not respond within 4 s") as failure:
            fit.advance(3)
        assert failure.value.kind == "timeout"
        for function in ("in hang", "in on_train_batch_start"):
            assert function in failure.value.details
        assert gone(pid)


def broken() -> Net:
    raise LookupError("no such weights")


@pytest.mark.parametrize(
    ("model", "data", "settings", "message"),
    [
        (broken, rows, CPU, "no such weights"),
        (Net, rows, {**CPU, "max_stepz": 3}, "max_stepz"),
        (Net, rows, {**CPU, "callbacks": [{"class_path": "Nothing"}]}, "no class 'Nothing'"),
        ("tests.profiling.fitting:Nothing", rows, CPU, "no 'Nothing'"),
        (lambda: "a model", rows, CPU, "must make a LightningModule"),
        (Net, lambda: rows(0 + 1, 2, drop_last=True), CPU, "data is empty"),
        (Net, rows, {**CPU, "devices": 2, "strategy": "ddp_spawn"}, "strategy='ddp'"),
        (Net, rows, {**CPU, "num_nodes": 2, "strategy": "ddp"}, "num_nodes=1"),
    ],
)
def test_start_failure_names_the_reason(model, data, settings, message):
    with (
        TrainingProcess(model, data, settings) as fit,
        pytest.raises(FitFailed, match=message) as failure,
    ):
        fit.advance(1)
    assert failure.value.kind == "setup"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((Net(), rows), TypeError, "model must be a function"),
        ((Net, rows()), TypeError, "data must be a function"),
        (("project.Model", rows), ValueError, "package.module:attribute"),
        ((Net, rows, 3), TypeError, "settings must be"),
        ((Net, rows, {"callbacks": [(i for i in ())]}), TypeError, "cannot be pickled"),
    ],
)
def test_invalid_arguments_raise_before_a_process_starts(arguments, error, message):
    with pytest.raises(error, match=message):
        TrainingProcess(*arguments)


# --- the end ------------------------------------------------------------------------------------


def children_of(fit: TrainingProcess) -> list[int]:
    return [child.pid for child in psutil.Process(pid_of(fit)).children(recursive=True)]


def test_closed_training_cleans_up_and_ends_its_workers(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    get_temp_dir()  # made by the first process of all
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    class Leaves(Callback):
        def on_exception(self, *_: Any) -> None:
            (tmp_path / "tidy").touch()

    fit = TrainingProcess(Net, rows_with_workers, lambda: {**CPU, "callbacks": [Leaves()]})
    fit.advance(2)
    pids = [pid_of(fit), *children_of(fit)]
    assert len(pids) == 2
    fit.close()
    fit.close()
    assert (tmp_path / "tidy").exists()
    with monkeypatch.context() as patch:
        patch.setattr(training_process, "start_process", Mock(side_effect=OSError("planted")))
        with pytest.raises(OSError, match="planted"):
            TrainingProcess(Net, rows, CPU)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert all(gone(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="closed"):
        fit.advance(1)


def test_deleted_process_is_killed():
    fit = TrainingProcess(Net, rows, CPU)
    fit.advance(1)
    pid = pid_of(fit)
    del fit
    assert gone(pid)


def test_interrupted_training_is_closed(monkeypatch):
    """Otherwise the next call would receive the steps of the interrupted one."""
    fit = TrainingProcess(Net, rows, CPU)
    fit.advance(1)
    pid = pid_of(fit)
    monkeypatch.setattr(fit._connection, "poll", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        fit.advance(1)
    assert gone(pid)
    with pytest.raises(RuntimeError, match="closed"):
        fit.advance(1)


# --- factories ----------------------------------------------------------------------------------


@dataclass
class Limits:
    largest: float = 1.0


class Limited(Callback):
    def __init__(self, limits: Limits, **others: Any) -> None:
        self.limits, self.others = limits, others


def test_settings_become_dataclasses_and_keyword_arguments(monkeypatch):
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # as the commands do
    entry = {
        "class_path": f"{__name__}.Limited",
        "init_args": {"limits": {"largest": 3}},
        "dict_kwargs": {"words": 2},
    }
    made = instantiate(entry)
    assert (made.limits, made.others) == (Limits(3.0), {"words": 2})
    entry["init_args"] = {"limits": {"lowest": 3}}  # no Limits, so it is passed on
    assert instantiate(entry).limits == {"lowest": 3}


def test_second_file_of_a_name_has_the_same_module_name_in_every_process(tmp_path, monkeypatch):
    path = os.pathsep.join(sys.path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    source = "def function():\n    pass\n"
    (file := tmp_path / "json.py").write_text(source)  # a module of this name is loaded
    own = import_attribute(f"{file}:function").__module__
    code = "import json, sys, types; "
    code += "sys.modules['lightning_opt.trainer.lightning'] = types.SimpleNamespace(DEFAULT=None); "
    code += f"from {import_attribute.__module__} import import_attribute as get; "
    code += f"print(get({f'{file}:function'!r}).__module__)"
    environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, env=environment, text=True).strip() == own


def test_file_path_is_imported_with_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_ours.py").write_text("VALUE = 3\n")
    (tmp_path / "project_of_ours.py").write_text(
        "import neighbour_of_ours\nclass Model:\n    size = neighbour_of_ours.VALUE\n"
    )
    path = f"{tmp_path}/project_of_ours.py"
    assert import_attribute(f"{path}:Model.size") == 3
    assert import_attribute(f"{path}:Model") is import_attribute(f"{path}:Model")
    with pytest.raises(ImportError, match="no 'Other'"):
        import_attribute(f"{path}:Other")
    with pytest.raises(ImportError, match="no file"):
        import_attribute(f"{tmp_path}/nothing.py:Model")
    del sys.modules["project_of_ours"], sys.modules["neighbour_of_ours"]
    (tmp_path / "broken_one.py").write_text("raise ArithmeticError('planted')")
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="planted"):
            import_attribute(f"{tmp_path}/broken_one.py:Model")
