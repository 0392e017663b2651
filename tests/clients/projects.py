"""Tiny trainings of other projects, as their users write them. Nothing is downloaded.

Each function trains once, on the Trainer that the project uses, and returns the trained module. It
imports its packages itself, since only ``make clients`` installs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Settings = Mapping[str, Any]

STEPS = 4

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "max_steps": STEPS,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def is_alone(settings: Settings) -> bool:
    """Return whether one process trains, so that it can predict afterwards."""
    return settings.get("devices", 1) == 1


def without_resume(settings: Settings) -> tuple[dict[str, Any], str | None]:
    """Return the Trainer's arguments, and the checkpoint to resume from."""
    settings = dict(settings)
    return settings, settings.pop("resume", None)


def fit(module: Any, data: Any, settings: Settings, *, predict: bool = True) -> nn.Module:
    import lightning as L

    settings, resume = without_resume(settings)
    kind = "datamodule" if isinstance(data, L.LightningDataModule) else "train_dataloaders"
    trainer = L.Trainer(**{**QUIET, **settings})
    # Checkpoints of some projects hold their own classes.
    trainer.fit(module, **{kind: data}, ckpt_path=resume, weights_only=False)
    if predict and is_alone(settings):
        kind = kind if kind == "datamodule" else "dataloaders"
        L.Trainer(**{**QUIET, "max_steps": -1}).predict(module, **{kind: data})
    return module


def chemprop(settings: Settings) -> nn.Module:
    """Molecules as graphs: chemprop's message passing network."""
    from chemprop import data, featurizers, models
    from chemprop import nn as layers

    smiles = ["CCO", "CCN", "CCC", "c1ccccc1", "CC(=O)O", "CCCl", "CNC", "COC"] * 2
    points = [data.MoleculeDatapoint.from_smi(text, [float(len(text))]) for text in smiles]
    dataset = data.MoleculeDataset(points, featurizers.SimpleMoleculeMolGraphFeaturizer())
    loader = data.build_dataloader(dataset, batch_size=4, shuffle=False)
    module = models.MPNN(
        layers.BondMessagePassing(d_h=16),
        layers.MeanAggregation(),
        layers.RegressionFFN(input_dim=16, hidden_dim=16),
    )
    return fit(module, loader, settings)


def temporal_fusion(settings: Settings) -> nn.Module:
    """pytorch-forecasting's TemporalFusionTransformer."""
    import pandas as pd
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
    from pytorch_forecasting.metrics import QuantileLoss

    frame = pd.DataFrame({"time": np.tile(np.arange(24), 4), "series": np.repeat(list("0123"), 24)})
    frame["value"] = np.sin(frame.time) + frame.series.astype(int)
    dataset = TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=8,
        max_prediction_length=3,
        time_varying_unknown_reals=["value"],
        time_varying_known_reals=["time"],
        static_categoricals=["series"],
    )
    module = TemporalFusionTransformer.from_dataset(
        dataset,
        hidden_size=8,
        attention_head_size=2,
        hidden_continuous_size=4,
        dropout=0.0,
        loss=QuantileLoss(),
        log_interval=-1,
    )
    loader = dataset.to_dataloader(train=True, batch_size=8, num_workers=0, shuffle=False)
    fit(module, loader, settings, predict=False)
    if is_alone(settings):
        module.predict(loader, trainer_kwargs=dict(QUIET))
    return module


def scvi(settings: Settings) -> nn.Module:
    """A variational autoencoder of scvi-tools, which builds its own Trainer."""
    import anndata
    from scvi.model import SCVI

    counts = np.random.default_rng(0).poisson(2.0, (32, 12)).astype(np.float32)
    cells = anndata.AnnData(counts)
    SCVI.setup_anndata(cells)
    model = SCVI(cells, n_hidden=8, n_latent=2)
    settings, resume = without_resume(settings)
    model.train(
        train_size=1.0,
        batch_size=8,
        shuffle_set_split=False,
        ckpt_path=resume,
        **{**QUIET, "max_epochs": 1, **settings},
    )
    if is_alone(settings):
        model.get_latent_representation()
    return model.module


def gluonts(settings: Settings) -> nn.Module:
    """GluonTS's feed-forward estimator, which sets ``gradient_clip_val`` itself."""
    import pandas as pd
    from gluonts.dataset.common import ListDataset
    from gluonts.torch import SimpleFeedForwardEstimator

    series = [
        {"start": pd.Period("2024-01-01", freq="D"), "target": np.sin(np.arange(60) + shift)}
        for shift in range(4)
    ]
    settings, resume = without_resume(settings)
    estimator = SimpleFeedForwardEstimator(
        prediction_length=4,
        context_length=8,
        hidden_dimensions=[8],
        batch_size=4,
        num_batches_per_epoch=STEPS,
        trainer_kwargs={**QUIET, "max_epochs": 1, "enable_checkpointing": True, **settings},
    )
    data = ListDataset(series, freq="D")
    predictor = estimator.train(data, ckpt_path=resume)
    if is_alone(settings):
        next(iter(predictor.predict(data)))
    return predictor.prediction_net


def neuralforecast(settings: Settings) -> nn.Module:
    """An MLP of neuralforecast, which imports ``pytorch_lightning``."""
    import pandas as pd
    from neuralforecast import NeuralForecast
    from neuralforecast.models import MLP

    frame = pd.DataFrame(
        {
            "unique_id": np.repeat(["a", "b"], 40),
            "ds": np.tile(pd.date_range("2024-01-01", periods=40), 2),
            "y": np.sin(np.arange(80)).astype(np.float32),
        }
    )
    model = MLP(
        h=4, input_size=8, hidden_size=8, batch_size=2, **{**QUIET, "max_steps": STEPS, **settings}
    )
    forecast = NeuralForecast([model], freq="D")
    forecast.fit(frame)
    if is_alone(settings):
        forecast.predict()
    return forecast.models[0]


def darts(settings: Settings) -> nn.Module:
    """N-BEATS of darts, which imports ``pytorch_lightning``."""
    from darts import TimeSeries
    from darts.models import NBEATSModel

    series = TimeSeries.from_values(np.sin(np.arange(60, dtype=np.float32)))
    settings, resume = without_resume(settings)
    model = NBEATSModel(
        input_chunk_length=8,
        output_chunk_length=4,
        num_stacks=1,
        num_blocks=1,
        layer_widths=8,
        n_epochs=1,
        batch_size=8,
        random_state=0,
        pl_trainer_kwargs={**QUIET, **settings},
    )
    model.load_ckpt_path = resume  # as load_from_checkpoint sets it
    model.fit(series)
    if is_alone(settings):
        model.predict(4)
    return model.model


def graphs(settings: Settings) -> nn.Module:
    """torch_geometric's LightningDataset with graphs of different sizes."""
    import lightning as L
    from torch_geometric.data import Data
    from torch_geometric.data.lightning import LightningDataset
    from torch_geometric.nn import GCN, global_mean_pool

    class GraphRegressor(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = GCN(4, 8, num_layers=2, out_channels=1)

        def forward(self, batch: Data) -> Tensor:
            return global_mean_pool(self.net(batch.x, batch.edge_index), batch.batch)

        def training_step(self, batch: Data, _: int) -> Tensor:
            loss = nn.functional.mse_loss(self(batch).squeeze(1), batch.y)
            self.log("loss", loss, batch_size=batch.num_graphs)
            return loss

        def predict_step(self, batch: Data, _: int) -> Tensor:
            return self(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    def graph(nodes: int) -> Data:
        edges = torch.stack([torch.arange(nodes), torch.arange(nodes).roll(1)])
        return Data(x=torch.randn(nodes, 4), edge_index=edges, y=torch.randn(1))

    dataset = [graph(3 + number % 4) for number in range(16)]
    return fit(
        GraphRegressor(), LightningDataset(dataset, pred_dataset=dataset, batch_size=4), settings
    )


def finetuning(settings: Settings) -> nn.Module:
    """finetuning-scheduler, which thaws layers at each epoch, beside ours."""
    import lightning as L
    from finetuning_scheduler import FinetuningScheduler

    class Staged(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
            self.head = nn.Linear(8, 1)

        def forward(self, batch: list[Tensor]) -> Tensor:
            return self.head(self.net(batch[0]))

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return nn.functional.mse_loss(self(batch), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            wanted = [parameter for parameter in self.parameters() if parameter.requires_grad]
            return torch.optim.AdamW(wanted, lr=1e-2)

    loader = DataLoader(TensorDataset(torch.randn(16, 8), torch.randn(16, 1)), batch_size=4)
    callbacks = [FinetuningScheduler(max_depth=1), *settings.get("callbacks", [])]
    return fit(Staged(), loader, {**settings, "max_steps": 3 * STEPS, "callbacks": callbacks})


def gan(settings: Settings) -> nn.Module:
    """Lightning's GAN example: two optimizers, manual optimization."""
    import lightning as L

    class GAN(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 8))
            self.discriminator = nn.Sequential(
                nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)
            )

        def loss(self, samples: Tensor, is_real: float) -> Tensor:
            logits = self.discriminator(samples)
            target = torch.full_like(logits, is_real)
            return nn.functional.binary_cross_entropy_with_logits(logits, target)

        def training_step(self, batch: list[Tensor], _: int) -> None:
            (real,) = batch
            first, second = self.optimizers()
            noise = torch.randn(len(real), 4)
            self.toggle_optimizer(first)
            loss = self.loss(self.generator(noise), 1.0)
            first.zero_grad()
            self.manual_backward(loss)
            first.step()
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
            loss = self.loss(real, 1.0) + self.loss(self.generator(noise).detach(), 0.0)
            second.zero_grad()
            self.manual_backward(loss)
            second.step()
            self.untoggle_optimizer(second)

        def predict_step(self, batch: list[Tensor], _: int) -> Tensor:
            return self.generator(torch.randn(len(batch[0]), 4))

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            parts = (self.generator, self.discriminator)
            return [
                torch.optim.Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.999)) for part in parts
            ]

    return fit(GAN(), DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4), settings)


PROJECTS: dict[str, tuple[Callable[[Settings], nn.Module], str]] = {
    "chemprop": (chemprop, "chemprop"),
    "pytorch-forecasting": (temporal_fusion, "pytorch_forecasting"),
    "scvi-tools": (scvi, "scvi"),
    "GluonTS": (gluonts, "gluonts"),
    "neuralforecast": (neuralforecast, "neuralforecast"),
    "darts": (darts, "darts"),
    "torch_geometric": (graphs, "torch_geometric"),
    "finetuning-scheduler": (finetuning, "finetuning_scheduler"),
    "GAN": (gan, "lightning"),
}
"""The training and the package that it needs, by project."""


def installed() -> list[str]:
    return [name for name, (_, package) in PROJECTS.items() if find_spec(package)]
