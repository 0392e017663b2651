"""Every callback trains with Lightning's loops, and waits for the device only at reports."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_opt.batching import comparison
from lightning_opt.core.measure import reading
from lightning_opt.core.modules import state_kinds
from lightning_opt.profiling.run_report import page
from tests.helpers.fake_cuda import fit_on_fake_cuda
from tests.helpers.syncs import SyncCounter
from tests.test_contracts import build, each_case

# Delayed reads do not wait: their copy started some steps earlier. The comparison of a batch with
# its parts runs at few of the first 64 batches.
EXEMPT = (reading.__file__, comparison.__file__, state_kinds.__file__)


pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script"),  # torch's compiler imports it
    pytest.mark.filterwarnings("ignore:.*parts of a batch"),  # fake gradients cannot be compared
]


@pytest.fixture(autouse=True)
def _working_directory(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(page, "find_spec", lambda _: None)  # draws no pictures
    if "Curvature" in request.node.name and not torch.backends.cuda.is_built():
        pytest.skip("torch's CPU build records no graph of CUDA tensors: `make cuda-dry` runs this")


class Watch(Callback):
    """Keeps the syncs from the end of the first step to the end of the last."""

    def __init__(self, syncs: SyncCounter) -> None:
        self.syncs = syncs

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0:
            self.syncs.clear()
        if batch_idx == trainer.num_training_batches - 1:
            self.counted = self.syncs.where.copy()


def count_syncs(*callbacks: Callback, **settings: Any) -> dict[str, int]:
    watch = Watch(syncs := SyncCounter())
    fit_on_fake_cuda(*callbacks, watch, syncs=syncs, steps=4, **settings)
    return {
        place: n for place, n in watch.counted.items() if not any(file in place for file in EXEMPT)
    }


@functools.cache
def syncs_without_callback() -> dict[str, int]:
    return count_syncs()


@each_case
def test_adds_no_host_sync_between_reports(name, settings):
    assert count_syncs(build(name, settings, every_n_steps=1000)) == syncs_without_callback()


class StateKeeper(Callback):
    """Loads a state into a callback in ``setup``, and saves its state after each step."""

    def __init__(self, callback: Callback, state: Any = None) -> None:
        self.callback, self.state = callback, state

    def setup(self, trainer, pl_module, stage):
        if self.state:  # Lightning skips an empty one too
            self.callback.load_state_dict(self.state)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.state = self.callback.state_dict()


@each_case
def test_state_is_on_host_and_resumes_on_device(name, settings):
    """With a report at each step, and accumulation."""
    accumulates = name in ("Accumulation", "DynamicBatchSize")
    run: dict[str, Any] = {"steps": 3, **({} if accumulates else {"accumulate_grad_batches": 2})}
    callback = build(name, settings, every_n_steps=1)
    keeper = StateKeeper(callback)
    fit_on_fake_cuda(callback, keeper, **run)
    tensors = [own for own in tree_leaves(keeper.state) if isinstance(own, Tensor)]
    if name != "CurvaturePreconditioner":  # as large as the model, like an optimizer's state
        assert {own.device.type for own in tensors} <= {"cpu"}
    state = tree_map_only(Tensor, Tensor.cpu, keeper.state)
    resumed = build(name, settings, every_n_steps=1)
    fit_on_fake_cuda(resumed, StateKeeper(resumed, state), **run)
