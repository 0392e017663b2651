"""DataPipelineTuner: the same samples as without it, skipped loaders, several ranks, resume."""

import logging
import multiprocessing
import os
import pickle
import re
import threading

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader

import lightning_opt as lo
from lightning_opt.data.pipeline import pipeline_tuner as tuning
from lightning_opt.data.pipeline.loaders import LoaderSettings
from lightning_opt.data.pipeline.search import Search
from tests.data import datasets
from tests.data.runs import (
    WORKERS,
    Record,
    Recorded,
    Rows,
    choose,
    train,
    train_in_ddp,
    tune_in_ddp,
    tune_with_failures_on_rank_1,
)
from tests.helpers.models import ResumableLoader, SmallNet, assert_same_weights
from tests.helpers.processes import launch
from tests.helpers.trainers import SaveAt, quiet_trainer


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch):
    monkeypatch.setattr(tuning, "MEASUREMENT_SECONDS", 0.1)


# --- the same samples ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "cached", "loader"),
    [
        (WORKERS, True, {}),
        (WORKERS, False, {"generator": 9, "num_workers": 1}),
        (WORKERS, False, {"num_workers": 1, "persistent_workers": True}),
        (LoaderSettings(), False, {}),
    ],
    ids=["cached", "generator", "user persists", "no workers"],
)
def test_samples_are_the_same_as_without_the_tuner(chosen, cached, loader):
    def settings():
        seed = loader.get("generator")
        own = {} if seed is None else {"generator": torch.Generator().manual_seed(seed)}
        return {"shuffle": True, **loader, **own}

    expected, plain, _ = train(None, False, **settings())
    actual, model, tuner = train(chosen, cached, **settings())
    assert actual.workers == {chosen.workers}
    assert tuner.chosen == chosen
    assert actual.seen == expected.seen
    assert actual.states == expected.states  # dropout draws the same numbers too
    for epoch in range(3):
        rows = [row for batch in actual.seen[6 * epoch : 6 * epoch + 6] for row in batch]
        assert sorted(rows) == list(range(24))
    assert_same_weights(model, plain)


@pytest.mark.distributed
@pytest.mark.parametrize(("cached", "own_sampler"), [(True, False), (False, True)])
def test_samples_are_the_same_under_ddp(cached, own_sampler):
    ranks = launch(train_in_ddp, cached, own_sampler)
    for (seen, states, weights, _, _), tuned in ranks:
        assert tuned[:2] == (seen, states)
        assert_same_weights(tuned[2], weights)
        assert tuned[3:] == ({2}, WORKERS)
    for epoch in range(3):
        batches = [b for _, tuned in ranks for b in tuned[0][3 * epoch : 3 * epoch + 3]]
        assert sorted(row for batch in batches for row in batch) == list(range(24))


@pytest.mark.parametrize("same", [True, False], ids=["the same", "a new one"])
def test_loader_that_each_epoch_requests_again_is_tuned_in_each(same, monkeypatch):
    """It is measured once, and torch does not warn that there are more workers than CPUs."""
    measured, made, data = [], [], DataLoader(Rows(), batch_size=4)

    def train_dataloader():
        made.append(data if same else DataLoader(Rows(), batch_size=4))
        return made[-1]

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(Search, "run", lambda *_: measured.append(1) or WORKERS)
    model, record, tuner = Recorded(), Record(), lo.DataPipelineTuner(verbose=False)
    model.train_dataloader = train_dataloader
    settings = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    quiet_trainer(callbacks=[tuner, record], **settings).fit(model)
    assert measured == [1]
    assert len(made) == 3  # as often as without the tuner
    assert record.workers == {2}
    assert "check_worker_number_rationality" not in vars(made[-1])  # after the run it warns again


@pytest.mark.distributed
def test_ranks_choose_the_same_settings():
    (first, rows, note, *printed), (second, other_rows, other_note, *other) = launch(
        tune_in_ddp, False
    )
    assert (first, note) == (second, other_note)
    assert (printed, other) == ([True, [2]], [False, [2]])
    assert rows[1:] == other_rows[1:]  # the slower rank's times
    assert first.workers >= 1


@pytest.mark.distributed
def test_all_ranks_end_when_the_time_is_up_on_one():
    (first, *_), (second, *_) = launch(tune_in_ddp, True)
    assert first == second == LoaderSettings()


@pytest.mark.distributed
def test_failed_trial_on_one_rank_keeps_the_loader_of_all_ranks():
    """With a worker that hangs, and a worker, a probe and a sampler that raise."""
    for (settings, warnings), reasons in zip(
        launch(tune_with_failures_on_rank_1),
        (["another rank"] * 4, ["timed out", "broken worker", "broken probe", "broken sampler"]),
        strict=True,
    ):
        assert settings == [{LoaderSettings()}] * 4
        for warning, reason in zip(warnings, reasons, strict=True):
            assert reason in warning


def test_resumed_run_has_the_same_settings_and_samples(tmp_path, monkeypatch):
    """With a loader that can resume in the middle of an epoch."""

    def fit(*callbacks, **settings):
        record, tuner = Record(), lo.DataPipelineTuner(verbose=False)
        model = SmallNet()
        model.step = lambda batch: model.loss(model(batch[0]), batch[1])
        trainer = quiet_trainer(callbacks=[record, tuner, *callbacks], max_epochs=3)
        trainer.fit(model, ResumableLoader(Rows(), batch_size=4), **settings)
        return record, tuner, dict(model.state_dict())

    with monkeypatch.context() as patch:
        patch.setattr(Search, "run", choose(WORKERS))
        whole, _, weights = fit(SaveAt(tmp_path / "stopped.ckpt", 8))
    monkeypatch.setattr(Search, "run", None)  # a resumed run measures nothing
    resumed, tuner, resumed_weights = fit(ckpt_path=tmp_path / "stopped.ckpt", weights_only=True)
    assert tuner.chosen == WORKERS
    assert resumed.workers == {2}
    assert resumed.seen == whole.seen[8:]
    assert_same_weights(resumed_weights, weights)
    assert "checkpoint" in tuner.report().notes[0]


# --- tuning ------------------------------------------------------------------------------------


def fit(tuner, data, model=None, callbacks=(), **settings):
    trainer = quiet_trainer(callbacks=[tuner, *callbacks], **settings)
    trainer.fit(Recorded() if model is None else model, data)
    return trainer


def test_slow_items_get_workers_and_the_table_is_printed(capsys, monkeypatch):
    """A batch takes 10 s without workers, which is simulated."""
    probe, fetch = tuning.probe, 10.0
    monkeypatch.setattr(tuning, "probe", lambda *given: (fetch, 0.0, probe(*given)[2]))
    monkeypatch.setattr(
        tuning, "time_loader", lambda loader, _, settings, *__: (fetch / settings.workers, 0.9)
    )
    data = DataLoader(Rows(48), batch_size=4)
    tuner = lo.DataPipelineTuner(max_workers=2)
    fit(tuner, data)
    assert tuner.chosen.workers == 2
    assert data.num_workers == 0  # restored after the run
    assert not data.persistent_workers
    printed = capsys.readouterr().out
    assert "workers" in printed
    assert "yes" in printed
    rows = tuner.report().rows
    assert rows[0]["workers"] == 0
    assert 10_000 <= rows[0]["ms a batch"] < 15_000
    pickle.dumps(tuner)
    fetch = 1e-6  # a fast loader, and another run
    fit(tuner, DataLoader(Rows(), batch_size=4))
    assert tuner.report().rows[0]["ms a batch"] < 5000


def test_main_process_touches_neither_dataset_nor_sampler():
    dataset, sampler = datasets.Counting(), datasets.Counted()
    loader = DataLoader(dataset, sampler=sampler, batch_size=4, collate_fn=lambda items: items)
    tuner = lo.DataPipelineTuner(max_workers=0, verbose=False)
    found = []
    look = LambdaCallback(on_train_start=lambda *_: found.append((dataset.fetches, sampler.epoch)))
    quiet_trainer(callbacks=[tuner, look]).fit(Ignoring(), loader)
    assert tuner.report().rows
    assert found == [(0, 0)]


def test_methods_replaced_by_others_are_restored(monkeypatch):
    monkeypatch.setattr(Search, "run", lambda *_: LoaderSettings(1, 2))
    callbacks = [lo.DataPipelineTuner(verbose=False), lo.DynamicBatchSize()]
    trainer = quiet_trainer(callbacks=callbacks, reload_dataloaders_every_n_epochs=1)
    seen = []

    def process(loader):
        seen.append(loader)
        return loader

    trainer.strategy.process_dataloader = process
    for _ in range(2):
        trainer.fit(Recorded(), DataLoader(Rows(), batch_size=4))
        assert vars(trainer.strategy)["process_dataloader"] is process
        assert "dataloader" not in vars(trainer.fit_loop._data_source)
        trainer.fit_loop.epoch_progress.reset()
    assert seen


def unpicklable():
    dataset = Rows()
    dataset.lock = threading.Lock()
    loader = DataLoader(dataset, batch_size=4)
    vars(loader)["_DataLoader__multiprocessing_context"] = multiprocessing.get_context("spawn")
    return loader


@pytest.mark.filterwarnings("ignore:Got pickle error")
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (lambda: DataLoader(datasets.Stream()), "iterable"),
        (lambda: [DataLoader(Rows()), DataLoader(Rows())], "several"),
        (lambda: DataLoader(Broken(), batch_size=4), "KeyError: 'broken'"),
        (unpicklable, "pickle"),
    ],
    ids=["iterable", "several", "broken", "unpicklable"],
)
def test_untunable_loader_stays_unchanged_with_a_warning(data, reason, caplog):
    loaders = data()
    listed = loaders if isinstance(loaders, list) else [loaders]
    before = [dict(vars(loader)) for loader in listed]
    tuner = lo.DataPipelineTuner()
    model = Ignoring()
    with caplog.at_level(logging.WARNING):
        fit(tuner, loaders, model, max_steps=2)
    assert [dict(vars(loader)) for loader in listed] == before
    assert tuner.chosen is None
    (message,) = [r.getMessage() for r in caplog.records if "leaves" in r.getMessage()]
    assert re.search(reason, message)
    assert tuner.report().notes


class Ignoring(SmallNet):
    """Takes any batch."""

    def training_step(self, batch, batch_idx):
        return self.layer(torch.ones(2, 6)).sum()


class Broken(Rows):
    """Raises in worker processes only, so that the fit itself works."""

    pid = os.getpid()

    def __getitem__(self, index):
        if os.getpid() != self.pid:
            raise KeyError("broken")
        return super().__getitem__(index)


def test_lazy_layers_are_initialized_by_the_training():
    """The trial step fails, which leaves its time unknown."""
    models = [SmallNet(), SmallNet()]
    for model, tuners in zip(models, ([], [lo.DataPipelineTuner(max_workers=1)]), strict=True):
        model.layer = torch.nn.LazyLinear(1)
        torch.manual_seed(0)
        quiet_trainer(callbacks=tuners).fit(model)
    assert "unknown" in tuners[0].report().notes[0]
    assert tuners[0].chosen is not None
    assert_same_weights(*models)


@pytest.mark.parametrize("persists", [False, True])
def test_dataset_may_change_between_epochs_unless_the_user_keeps_workers(persists, monkeypatch):
    class Shifted(Rows):
        shift = 0.0

        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x, y + self.shift

    class Shifts(Record):
        def on_train_epoch_start(self, trainer, pl_module):
            data.dataset.shift = 100.0 * trainer.current_epoch

    record = Shifts()
    monkeypatch.setattr(Search, "run", choose(WORKERS))
    kept = {"num_workers": 1, "persistent_workers": True} if persists else {}
    data = DataLoader(Shifted(), batch_size=24, **kept)
    fit(lo.DataPipelineTuner(verbose=False), data, callbacks=[record], max_epochs=3)
    assert record.workers == {2}
    assert [max(rows) // 100 for rows in record.seen] == ([0, 0, 0] if persists else [0, 1, 2])
