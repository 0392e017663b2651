"""Four trainings that leak, and six similar ones that do not."""

import queue
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import CatMetric

from tests.helpers.models import FEATURES, SmallNet, loader_of
from tests.helpers.trainers import MemoryLogger

BATCHES = 50
EPOCHS = 6


class Net(SmallNet):
    """Three small layers; subclasses leak in :meth:`leak`, once per step."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(widths=(32, 32), **settings)
        self.prepare()

    def prepare(self) -> None: ...

    def leak(self, batch: Any, loss: Tensor) -> None: ...

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.step(batch)
        self.leak(batch, loss)
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return loader_of(BATCHES)


# --- leaks --------------------------------------------------------------------------------------


class LossList(Net):
    """Losses kept with their graphs and never cleared."""

    def prepare(self) -> None:
        self.losses: list[Tensor] = []

    def leak(self, batch, loss):
        self.losses.append(loss)


class RunningLoss(Net):
    """A sum of losses with the graphs of all of them."""

    def prepare(self) -> None:
        self.running: Any = 0.0

    def leak(self, batch, loss):
        self.running = self.running + loss


class UnresetMetric(Net):
    """A metric that is updated but never reset."""

    def prepare(self) -> None:
        self.scores = CatMetric()

    def leak(self, batch, loss):
        self.scores.update(batch[0].repeat(4, 1).flatten())


class HoardingLogger(MemoryLogger):
    def __init__(self) -> None:
        super().__init__()
        self.buffer: list[dict[str, Any]] = []

    def keep(self, values: list[float]) -> None:
        self.buffer.append({"values": values})


class Several(Net):
    """A cache, a queue, hooks, a logger and a list of a Python module grow at once."""

    def prepare(self) -> None:
        self.cache: dict[int, Tensor] = {}
        self.jobs: queue.Queue[Any] = queue.Queue()

    def leak(self, batch, loss):
        self.cache[len(self.cache)] = torch.cat([batch[0]] * 10)
        self.jobs.put(batch[0].repeat(10, 1))
        self.trainer.logger.keep([random.random() for _ in range(60)])
        CACHE.append(torch.zeros(500))
        inputs = batch[0].repeat(20, 1)

        def remember(module: nn.Module, args: Any, output: Tensor) -> None:
            self.last = inputs.shape

        self.layer[0].register_forward_hook(remember)


CACHE: list[Tensor] = []

LEAKS: dict[str, tuple[Callable[[], Net], str, set[str]]] = {
    # name: model, kind, paths
    "loss list": (LossList, "graph", {"LossList.losses"}),
    "graph kept": (RunningLoss, "graph", {"RunningLoss.running"}),
    "metric": (UnresetMetric, "container", {"UnresetMetric.scores.value"}),
    "several": (
        Several,
        "container",
        {
            "Several.cache",
            "Several.jobs.queue",
            "Several.layer.0._forward_hooks",
            "HoardingLogger.buffer",
            f"{__name__}.CACHE",
        },
    ),
}


# --- trainings without a leak -------------------------------------------------------------------


class CachedItems(Dataset[Any]):
    """Random items that are kept after their first use."""

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> Any:
        if index not in self.known:
            self.known[index] = torch.randn(400, FEATURES), torch.randn(400, 1)
        return self.known[index]


class WarmLoader(Net):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(CachedItems(), batch_size=None)


class Curriculum(Net):
    """Batches that grow at every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.inputs = batch[0].repeat(4 + self.global_step, 1)
        return self.layer(self.inputs).square().mean()


class EpochOutputs(Net):
    """Outputs kept for the end of the epoch."""

    def prepare(self) -> None:
        self.outputs: list[Tensor] = []

    def leak(self, batch, loss):
        self.outputs.append(batch[0].repeat(10, 1))

    def on_train_epoch_end(self) -> None:
        self.outputs.clear()


class MetricWithValidation(Net):
    """One metric that is reset each epoch, and one that grows in validation and is reset."""

    def prepare(self) -> None:
        self.scores, self.valid = CatMetric(), CatMetric()

    def leak(self, batch, loss):
        self.scores.update(batch[0].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.valid.update(batch[0].repeat(100, 1).flatten())

    def on_validation_epoch_end(self) -> None:
        self.valid.reset()

    def on_train_epoch_end(self) -> None:
        self.scores.reset()


class Fragments(Net):
    """Tensors of random sizes with random lifetimes."""

    def prepare(self) -> None:
        self.random, self.alive = random.Random(0), [torch.empty(0)] * 30

    def leak(self, batch, loss):
        place = self.random.randrange(30)
        self.alive[place] = torch.ones(self.random.randrange(1000, 60_000))


class Compiled(Net):
    """A compiled network that is recompiled for a few shapes."""

    def prepare(self) -> None:
        self.compiled = [torch.compile(self.layer, backend="eager", dynamic=False)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = 1 + self.global_step % 4
        return nn.functional.mse_loss(self.compiled[0](batch[0][:rows]), batch[1][:rows])


CLEAN: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "growing shapes": (Curriculum, {}),
    "validation and metrics": (MetricWithValidation, {"val_check_interval": 10}),
    "outputs of an epoch": (EpochOutputs, {}),
    "loader that warms up": (WarmLoader, {}),
    "fragments": (Fragments, {}),
    "compile": (Compiled, {}),
}
