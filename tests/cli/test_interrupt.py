"""Ctrl-C during a search: one message, no processes or files left."""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lightning_opt.cli import main
from tests.helpers.fork_server import PRELOAD

ROOT = Path(__file__).parents[2]
PROJECT = """
from pathlib import Path
from lightning import LightningDataModule
from torch.utils.data import DataLoader
from tests.tuner.subjects import Sleeper, batches

class Model(Sleeper):
    def on_train_batch_start(self, *_):
        Path(__file__).with_name("step").touch()

class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(batches().dataset, batch_size=32, num_workers=1)
"""
WORDS = "--budget 60s --candidates compile --trainer.accelerator cpu --out"


def tune(folder: Path, temporary: str) -> None:
    """Run the command as a process of its own session, whose children have a mark."""
    os.setsid()
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = temporary
    multiprocessing.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
    os.environ |= {
        "PYTHONPATH": str(ROOT), "INTERRUPTED_BY": str(folder), "TMPDIR": temporary,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
    }  # fmt: skip
    project = folder / "project.py"
    words = ["tune", f"{project}:Model", "--data", f"{project}:Data", *WORDS.split()]
    sys.exit(main([*words, str(folder / "out")]))


def alive(mark: str) -> list[str]:
    """Return the commands of all processes that descend from the one with this mark."""
    found = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get("INTERRUPTED_BY") == mark
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.Error, OSError):
            continue
    return found


def wait(seconds: float, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes by their environment")
def test_ctrl_c_during_a_trial_exits_once_and_leaves_nothing(tmp_path):
    (tmp_path / "project.py").write_text(PROJECT)
    (log := tmp_path / "log").touch()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    # Paths of sockets must be short; pytest's folder may be too long.
    with tempfile.TemporaryDirectory(prefix="lo", dir="/tmp") as folder:
        process = context.Process(target=tune, args=(tmp_path, folder))
        process.start()
        try:
            wait(240, lambda: "trying compile" in log.read_text() or not process.is_alive())
            assert alive(str(tmp_path)) != []
            (tmp_path / "step").unlink(missing_ok=True)  # of the baseline
            wait(240, lambda: (tmp_path / "step").exists() or not process.is_alive())
            assert process.is_alive(), log.read_text()
            os.killpg(process.pid, signal.SIGINT)
            process.join(200)
            assert process.exitcode == 130, log.read_text()
            wait(100, lambda: not alive(str(tmp_path)))
            assert alive(str(tmp_path)) == []
        finally:
            process.kill()  # its children end with it
            process.join()
        assert log.read_text().count("Interrupted.") == 1
        assert "Traceback" not in log.read_text()
        left = [path.name for path in Path(folder).iterdir()]
        assert [name for name in left if name.startswith(("lightning_opt", "pymp"))] == []
