"""Runs that record the samples of each step."""

import contextlib
import io
import multiprocessing
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler, get_worker_info

import lightning_opt as lo
from lightning_opt.data.pipeline import pipeline_tuner as tuning
from lightning_opt.data.pipeline.loaders import LoaderSettings, settings_of
from lightning_opt.data.pipeline.search import Search
from tests.data.datasets import Numbers
from tests.helpers.models import ResumableLoader, SmallNet
from tests.helpers.trainers import logged_warnings, quiet_trainer


class Rows(Numbers):
    """Rows of six times the index, and a target."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((6,), index / 10), torch.tensor([float(index)])


class Recorded(SmallNet):
    """A model that counts its steps in a buffer, and draws random numbers in each."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def step(self, batch: Any) -> Tensor:
        inputs, targets = batch
        self.steps += 1
        return self.loss(self(torch.nn.functional.dropout(inputs, 0.1)), targets)


class Record(Callback):
    """Records the targets of each batch, and torch's random state after each epoch."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []
        self.states: list[Any] = []
        self.settings: set[LoaderSettings] = set()

    @property
    def workers(self) -> set[int]:
        return {settings.workers for settings in self.settings}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(batch[1].flatten().tolist())
        self.settings.add(settings_of(trainer.train_dataloader))

    def on_train_epoch_end(self, trainer, pl_module):
        self.states.append(torch.get_rng_state().tolist())


def choose(settings: LoaderSettings) -> Callable[..., LoaderSettings]:
    """Return a replacement of ``Search.run`` that tries workers once and chooses ``settings``."""

    def run(search: Search, fetch: float, step: float) -> LoaderSettings:
        if settings.workers:
            assert search.measure(settings) is not None
        return settings

    return run


WORKERS = LoaderSettings(2, 2)


def train(
    tuned: LoaderSettings | None, cached: bool, devices: int = 1, **loader: Any
) -> tuple[Record, SmallNet, Any]:
    record, dataset = Record(), Rows()
    if cached:
        dataset = lo.CachedDataset(dataset, 2**20)  # type: ignore[assignment]
    if loader.pop("distributed", False):
        loader["sampler"] = DistributedSampler(
            dataset,  # type: ignore[arg-type]
            num_replicas=2,
            rank=int(os.environ["LOCAL_RANK"]),
            seed=3,
        )
    torch.manual_seed(5)
    model = Recorded()
    tuner = lo.DataPipelineTuner(verbose=False)
    trainer = quiet_trainer(
        callbacks=[record] if tuned is None else [record, tuner],
        max_epochs=3,
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        use_distributed_sampler=True,
    )
    data = ResumableLoader(dataset, batch_size=4, **loader)
    before = dict(vars(data))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "MEASUREMENT_SECONDS", 0.02)
        patch.setattr(Search, "run", choose(tuned or LoaderSettings()))
        trainer.fit(model, data)
    after = {**vars(data), "served": before.get("served")}
    changed = {name: after[name] for name in before if after[name] != before[name]}
    assert not changed or tuned is None, changed
    return record, model, tuner


def allow_workers() -> None:
    """Let this process fork others, although it is a daemon of the fork server."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork", force=True)


def train_in_ddp(cached: bool, own_sampler: bool) -> Any:
    """Fit under DDP without and with workers; return the samples and the weights of this rank."""
    allow_workers()
    settings = {"distributed": True} if own_sampler else {"shuffle": True}
    runs = []
    for tuned, caches in ((None, False), (WORKERS, cached)):
        record, model, tuner = train(tuned, caches, devices=2, **settings)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        runs.append((record.seen, record.states, weights, record.workers, tuner.chosen))
    return runs


def tune_in_ddp(late: bool) -> Any:
    """Tune under DDP, where rank 1 is slower, or ``late``: its time is up before a measurement.

    Return the settings, the table, the note, whether it was printed, and the processes that share
    the CPUs.
    """
    allow_workers()
    rank = int(os.environ["LOCAL_RANK"])
    dataset = Sleepy(24, 0.004 * (rank + 1))
    tuner = lo.DataPipelineTuner(max_workers=2)
    trainer = quiet_trainer(callbacks=[tuner], devices=2, strategy="ddp")
    probe, limit, processes = tuning.probe, tuning.max_workers_for, list[int]()
    tuning.max_workers_for = lambda *given: processes.append(given[1]) or limit(*given)

    def probe_for_an_hour(*arguments: Any) -> Any:
        later = SimpleNamespace(perf_counter=lambda: time.perf_counter() + 3600, sleep=time.sleep)
        tuning.time = later  # type: ignore[assignment]
        return probe(*arguments)

    if late and rank == 1:
        tuning.probe = probe_for_an_hour
    model, data = Recorded(), DataLoader(dataset, batch_size=4)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer.fit(model, data, data)
    assert float(model.steps) == 12  # of training and validation, and none of the trials
    (note,) = tuner.report().notes
    note = note[note.index("A batch") :]
    return tuner.chosen, tuner.report().rows, note, note in printed.getvalue(), processes


def tune_with_failures_on_rank_1() -> Any:
    """Tune loaders that fail on rank 1; return loader settings and warnings."""
    allow_workers()
    settings, warnings, time_loader = [], list[str](), tuning.time_loader
    for failure in ("hang", "worker", "probe", "sampler"):
        dataset = FailsInWorkers(failure)
        sampler = FailingSampler(dataset) if failure == "sampler" else None
        data = DataLoader(dataset, batch_size=4, sampler=sampler)
        tuner = lo.DataPipelineTuner(max_workers=1, budget_seconds=600.0, verbose=False)
        if failure == "hang" and os.environ["LOCAL_RANK"] == "1":
            tuning.time_loader = lambda *given: time_loader(*given[:-1], 2.0)
        record = Record()
        trainer = quiet_trainer(
            callbacks=[tuner, record], devices=2, strategy="ddp", use_distributed_sampler=False
        )
        with logged_warnings() as messages:
            trainer.fit(Recorded(), data)
        warnings += messages
        tuning.time_loader = time_loader
        settings.append(record.settings)
        assert tuner.chosen is None
    return settings, warnings


class Sleepy(Rows):
    def __init__(self, length: int = 24, seconds: float = 0.002) -> None:
        super().__init__(length)
        self.seconds = seconds

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return super().__getitem__(index)


class FailingSampler(SequentialSampler):
    """Cannot be copied on rank 1."""

    def __deepcopy__(self, memo: Any) -> Any:
        if os.environ["LOCAL_RANK"] == "1":
            raise RuntimeError("broken sampler")
        return self


class FailsInWorkers(Sleepy):
    """Hangs or raises in each worker of rank 1, or where a batch is timed alone."""

    def __init__(self, failure: str) -> None:
        super().__init__()
        self.failure = failure

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if info is not None and os.environ["LOCAL_RANK"] == "1":
            where = "worker" if info.dataset is self else "probe"
            if self.failure == where:
                raise RuntimeError(f"broken {where}")
            if (self.failure, where) == ("hang", "worker"):
                time.sleep(600)
        return super().__getitem__(index)
