"""Trains with every feature under a package of Lightning."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_opt as lo
from tests.matrix.subjects import find_subjects


def net_of(pl: Any) -> Any:
    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("val_loss", loss, sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

        def train_dataloader(self) -> Any:
            rows = torch.randn(48, 7, generator=torch.Generator().manual_seed(0))
            return DataLoader(TensorDataset(rows[:, :6], rows[:, 6:]), batch_size=4)

        val_dataloader = predict_dataloader = train_dataloader

    return Net()


def train(pl: Any, kind: Any = None, resume: Any = None, **settings: Any) -> Any:
    """Fit, validate and predict with a package's Trainer, and return it."""

    class Names(pl.loggers.logger.Logger):
        name = version = "names"
        logged: set[str] = set()

        def log_hyperparams(self, *_: Any, **__: Any) -> None:
            pass

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.logged = self.logged | metrics.keys()

    torch.manual_seed(0)
    quiet = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "log_every_n_steps": 1}
    defaults |= {"limit_val_batches": 2, "limit_predict_batches": 1}
    arguments = {**defaults, **dict.fromkeys(quiet, False), "logger": Names(), **settings}
    trainer = (kind or pl.Trainer)(**arguments)
    net = net_of(pl)
    trainer.fit(net, ckpt_path=resume)
    trainer.validate(net, verbose=False)
    trainer.predict(net)
    return trainer


def outcome(trainer: Any) -> Any:
    """Return the final weights, as sums, and the logged names."""
    weights = [p.double().sum().item() for p in trainer.lightning_module.parameters()]
    return [weights, sorted(trainer.logger.logged)]


def features(pl: Any) -> dict[str, dict[str, Any]]:
    """Return the arguments of :func:`train` by feature."""

    class Counter(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            self.batches = getattr(self, "batches", 0) + 1

    class OwnTrainer(pl.Trainer):
        pass

    # The last row of each class in the matrix; those with a policy need blocks or images.
    rows = [one for one in find_subjects() if "policy" not in one.settings]
    subjects = {one.name: one for one in rows if one.kind != "strategy"}
    name = "PerformanceMonitor"  # how many samples it takes depends on the time
    subjects[name] = replace(subjects[name], settings={"sample_seconds": 3600.0})
    found = {"nothing": {}, **{name: one.trainer_settings() for name, one in subjects.items()}}
    for name in ("basic", "advanced", "ultra"):
        chosen = lo.preset(name)
        found[f"preset {name}"] = chosen.trainer_kwargs(accelerator="cpu", devices=1)
    for strategy in ("ddp_topk", "ddp_int8", "ddp_fp16", "diloco"):
        found[strategy] = {"strategy": strategy}
    return found | {
        "a callback of the user between two": {
            "callbacks": [lo.GradientHealth(every_n_steps=3), Counter(), lo.DataMonitor()],
            "kind": OwnTrainer,
        },
    }


def train_all(pl: Any, folder: Any) -> dict[str, Any]:
    """Return the outcome by feature; some features write files into the folder."""
    return {
        feature: outcome(train(pl, default_root_dir=folder, **settings))
        for feature, settings in features(pl).items()
    }
