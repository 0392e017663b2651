"""Ctrl-C during a search: one message, no processes or files left."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
# Processes that a shell starts in the background ignore the signal by default.
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from lightning_opt.cli import main
sys.exit(main())
"""
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
    project, log = tmp_path / "project.py", tmp_path / "log"
    project.write_text(PROJECT)
    words = ["tune", f"{project}:Model", "--data", f"{project}:Data", *WORDS.split()]
    # Paths of sockets must be short; pytest's folder may be too long.
    with tempfile.TemporaryDirectory(prefix="lo", dir="/tmp") as folder, log.open("w") as errors:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "INTERRUPTED_BY": str(tmp_path),
            "TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words, str(tmp_path / "out")],
            env=environment, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
        )  # fmt: skip
        try:
            wait(240, lambda: "trying compile" in log.read_text() or process.poll() is not None)
            (tmp_path / "step").unlink(missing_ok=True)  # of the baseline
            wait(240, lambda: (tmp_path / "step").exists() or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(200) == 130, log.read_text()
            wait(100, lambda: not alive(str(tmp_path)))
            assert alive(str(tmp_path)) == []
        finally:
            process.kill()  # its children end with it
            process.wait()
        assert log.read_text().count("Interrupted.") == 1
        assert "Traceback" not in log.read_text()
        left = [path.name for path in Path(folder).iterdir()]
        assert [name for name in left if name.startswith(("lightning_opt", "pymp"))] == []
