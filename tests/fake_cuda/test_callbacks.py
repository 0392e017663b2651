"""Every callback trains with Lightning's own loops, and waits for the device at reports alone."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_opt.core.measure import delayed
from tests.helpers.fake_cuda import fit_on_fake_cuda
from tests.helpers.syncs import SyncCounter
from tests.test_contracts import build, each_case, takes

# The first wait for nothing on a device: the copy was started some steps before. The others are the
# check of a split, which ends with the 64th batch that is split.
EXEMPT = (delayed.__file__, "/split_check.py")


pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")  # that compiling imports


@pytest.fixture(autouse=True)
def _runs_here(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    if "Curvature" in request.node.name and not torch.backends.cuda.is_built():
        pytest.skip("torch's CPU build records no graph of CUDA tensors: `make cuda-dry` runs this")


class Watch(Callback):
    """Forgets the syncs before the first step has ended, and keeps those up to the last one."""

    def __init__(self, syncs: SyncCounter) -> None:
        self.syncs = syncs

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0:
            self.syncs.clear()
        if batch_idx == trainer.num_training_batches - 1:
            self.counted = self.syncs.where.copy()


def count_syncs(*callbacks: Callback, **settings: Any) -> dict[str, int]:
    watch = Watch(syncs := SyncCounter())
    fit_on_fake_cuda(*callbacks, watch, syncs=syncs, **settings)
    return {
        place: n for place, n in watch.counted.items() if not any(file in place for file in EXEMPT)
    }


@functools.cache
def syncs_without_us() -> dict[str, int]:
    return count_syncs()


@each_case
def test_adds_no_host_sync_between_reports(name, settings):
    more = {"every_n_steps": 1000} if takes(name, "every_n_steps") else {}
    assert count_syncs(build(name, settings, **more)) == syncs_without_us()


class Keep(Callback):
    """Gives a callback a state when the run begins, and takes its state after each step."""

    def __init__(self, kept: Callback, state: Any = None) -> None:
        self.kept, self.state = kept, state

    def setup(self, trainer, pl_module, stage):
        if self.state:  # as Lightning does
            self.kept.load_state_dict(self.state)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.state = self.kept.state_dict()


@each_case
def test_reports_at_each_step_and_goes_on_from_what_it_kept(name, settings):
    """Its state is of the host, and comes back to the device; accumulation in between."""
    more = {"every_n_steps": 1} if takes(name, "every_n_steps") else {}
    accumulates = name in ("Accumulation", "DynamicBatchSize")
    window = {} if accumulates else {"accumulate_grad_batches": 2}
    keep = Keep(callback := build(name, settings, **more))
    fit_on_fake_cuda(callback, keep, **window)
    tensors = [own for own in tree_leaves(keep.state) if isinstance(own, Tensor)]
    if name != "CurvaturePreconditioner":  # as large as the model, and like an optimizer's state
        assert {own.device.type for own in tensors} <= {"cpu"}
    state = tree_map_only(Tensor, Tensor.cpu, keep.state)
    resumed = build(name, settings, **more)
    fit_on_fake_cuda(resumed, Keep(resumed, state), **window)
