"""The thread of exchanges, arguments and checkpoints that both strategies share."""

import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lightning_opt as lo
from lightning_opt.strategies.compression.compressed_ddp import HookedDDPStrategy
from lightning_opt.strategies.compressors import Quantize
from lightning_opt.strategies.own_exchange import all_to_all
from tests.helpers.models import SmallNet, assert_same_weights
from tests.helpers.processes import launch
from tests.strategies.runs import SHORT_WAIT, Ledger, SaveAtEnd, compressed, fit

pytestmark = pytest.mark.distributed


class Stuck(Ledger):
    """Rank 1 raises in the sixth backward pass, and writes the file ``ended`` at its end.

    The others wait for the file at step ``wait_at``. They end with 4, or with 5 without the file.
    """

    def __init__(self, ended: Path, wait_at: int) -> None:
        super().__init__()
        self.ended, self.wait_at = ended, wait_at

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_rank != 1 and batch_idx == self.wait_at:
            deadline = time.monotonic() + SHORT_WAIT.total_seconds() / 2
            while not self.ended.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            os._exit(4 if self.ended.exists() else 5)
        if self.global_rank == 1 and batch_idx == 5:
            self.weights[0].register_hook(self.fail)  # after the hooks of the other buckets
        return super().training_step(batch, batch_idx)

    def fail(self, gradient: Tensor) -> None:
        raise ArithmeticError("planted")


def _raise_mid_exchange(kind: str, folder: str) -> None:
    ended = Path(folder) / "ended"
    settings: dict[str, Any] = {"timeout": SHORT_WAIT}
    try:
        if kind == "diloco":  # exchanges after the fourth step, and merges after the seventh
            fit(Stuck(ended, 3), lo.DiLoCoStrategy(4, delay=3, **settings), range(9))
        else:
            fit(Stuck(ended, 5), compressed(Quantize(8), **settings), range(9))
    except ArithmeticError:
        threading._shutdown()  # type: ignore[attr-defined]  # what Python waits for at exit
        ended.touch()
        raise


def test_device_gets_contiguous_rows(monkeypatch):
    """With expanded rows torch raises on NCCL, or in some versions sends other memory."""
    sent: list[Tensor] = []
    monkeypatch.setattr(dist, "all_to_all_single", lambda out, rows, group: sent.append(rows))
    rows = torch.empty(4, device="meta").expand(2, -1)
    all_to_all(rows, torch.empty(2, 4, device="meta"), None)
    assert sent[0].is_contiguous()


@pytest.mark.parametrize("kind", ["diloco", "int8"])
def test_exception_ends_the_process_while_its_exchange_waits(kind, tmp_path):
    ends = r"(?s)rank 0 ended with 4.*rank 1 ended with 1.*planted.*rank 2 ended with 4"
    with pytest.raises(AssertionError, match=ends):
        launch(_raise_mid_exchange, kind, str(tmp_path), processes=3)


@pytest.mark.parametrize(
    "strategy", [lo.CompressedDDPStrategy, lo.DiLoCoStrategy, HookedDDPStrategy]
)
def test_another_communication_hook_raises(strategy):
    words = f"{strategy.__name__} has its own exchange, so ddp_comm_hook cannot"
    with pytest.raises(ValueError, match=words):
        strategy(ddp_comm_hook=print)


def _train_alone(path: str) -> None:
    expected = SmallNet()
    fit(expected, "ddp")
    for strategy in ("ddp_topk", "diloco"):
        with pytest.raises(ValueError, match="LBFGS"):
            fit(SmallNet(optimizer="LBFGS"), strategy)
        fit(model := SmallNet(), strategy, callbacks=[SaveAtEnd(path)])
        assert_same_weights(model, expected, rtol=0)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "This checkpoint was written without")
            fit(SmallNet(), strategy, ckpt_path=path, max_epochs=2)


def test_single_process_trains_like_ddp_resumes_without_a_warning_and_lbfgs_raises(tmp_path):
    launch(_train_alone, f"{tmp_path}/last.ckpt", processes=1)
