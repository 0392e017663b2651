"""The check of splits, with different kinds of first batches."""

import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_opt as lo
from lightning_opt.batching.comparison import LOG_PARAMETERS
from tests.batching.nets import LinearNet
from tests.helpers.models import assert_same_weights
from tests.helpers.processes import launch
from tests.helpers.trainers import MemoryLogger, quiet_trainer


class Lengths(LinearNet):
    """A loss over tokens. From some batch on, samples have different numbers of them.

    Args:
        kind: ``"tokens"`` for a mean over them, ``"sum"``, or ``"samples"`` for a mean of means.
        padded: The first batch with samples of different lengths.
    """

    def __init__(self, kind: str = "tokens", padded: int = 0) -> None:
        super().__init__(lr=0.01)
        self.kind, self.padded = kind, padded
        self.share = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, mask = batch
        losses = (self.layer(x).squeeze(-1) - 1).square() * mask
        self.log("share", self.share, on_step=True, on_epoch=True)
        if self.kind == "samples":
            loss = (losses.sum(1) / mask.sum(1)).mean()
        else:
            loss = losses.sum() / (mask.sum() if self.kind == "tokens" else 1)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        batches = []
        for number in range(8):
            lengths = torch.full((8, 1), 8)
            if number >= self.padded:
                lengths = torch.randint(1, 9, (8, 1), generator=generator)
            x = torch.randn(8, 8, 4, generator=generator)
            batches.append((x, (torch.arange(8) < lengths).float()))
        return DataLoader(batches, batch_size=None)


def count_tokens(batch: Any) -> Tensor:
    return batch[1].sum()


def warned(net: LightningModule, micro: lo.MicroBatching, **settings: Any) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", "MicroBatching: the parts of a batch")
        warnings.filterwarnings("ignore", ".*sync_dist")
        quiet_trainer(callbacks=[micro], **settings).fit(net)
    return any("not add up to its gradient" in str(warning.message) for warning in caught)


class Noisy(Lengths):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, mask = batch
        return super().training_step((x + torch.randn_like(x), mask), batch_idx)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_mean_over_tokens_warns_whenever_lengths_differ(precision):
    micro = lo.MicroBatching(4)
    for padded in (0, 3):  # also for a second model, and at the fourth batch
        assert warned(Lengths(padded=padded), micro, precision=precision)
    assert not warned(Lengths("samples"), micro, precision=precision)
    assert not warned(Noisy("samples"), micro, precision=precision)


def test_rounding_of_16_bit_losses_is_no_difference():
    net, micro = Lengths("samples"), lo.MicroBatching(2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "MicroBatching logs")
        quiet_trainer(callbacks=[micro], precision="bf16-true").fit(net)


def warned_with_padding_on_rank_1() -> bool:
    net = Lengths(padded=100 * (os.environ["RANK"] == "0"))
    return warned(net, lo.MicroBatching(4), strategy="ddp", devices=2)


@pytest.mark.distributed
def test_difference_on_another_rank_warns_on_the_first():
    assert launch(warned_with_padding_on_rank_1)[0]


def assert_same_run(
    make: Callable[[], LightningModule], micro: Callback, keys: list[str], **close: float
) -> None:
    nets, loggers = [make(), make()], [MemoryLogger(), MemoryLogger()]
    for net, logger, callbacks in zip(nets, loggers, ([], [micro]), strict=True):
        quiet_trainer(callbacks=callbacks, logger=logger).fit(net)
    assert_same_weights(nets[1], nets[0], rtol=0.0, atol=1e-6)
    for key in keys:
        assert loggers[1].series(key) == pytest.approx(loggers[0].series(key), **close)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("tokens", {"loss": "mean_over_tokens", "count": count_tokens}),
        ("sum", {"loss": "sum"}),
    ],
)
def test_each_loss_is_exact_if_named(kind, settings):
    keys, close = ["loss_step", "share_step"], {"rel": 1e-5, "abs": 1e-7}
    assert_same_run(lambda: Lengths(kind), lo.MicroBatching(3, **settings), keys, **close)


def test_mean_and_maximum_are_logged_exactly_beside_a_loss_that_is_a_sum():
    class Logs(Lengths):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("mean", batch[0].mean())
            self.log("top", batch[0].max(), False, True, True, False, "max")
            return super().training_step(batch, batch_idx)

    keys = ["mean", "top"]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "MicroBatching: a split batch logs the mean")
        assert_same_run(lambda: Logs("sum"), lo.MicroBatching(3, loss="sum"), keys, rel=1e-5)


class Labels(LinearNet):
    """A mean over labels, of which only the first samples of each batch have any."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.layer(batch["x"]).flatten(0, 1)
        loss = nn.functional.cross_entropy(scores, batch["labels"].flatten())
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        batches = []
        for number in (2, 5):
            labels = torch.randint(0, 3, (8, 6), generator=generator)
            labels[number:] = -100
            batches.append({"x": torch.randn(8, 6, 4, generator=generator), "labels": labels})
        return DataLoader(batches, batch_size=None)


@pytest.mark.parametrize("kind", [int, Tensor.float])
def test_parts_without_tokens_weigh_nothing(kind):
    def count(batch: Any) -> Any:
        return kind((batch["labels"] != -100).sum())

    micro = lo.MicroBatching(3, loss="mean_over_tokens", count=count)
    assert_same_run(lambda: Labels(4, 3), micro, ["loss"])


def test_impossible_check_warns_with_the_reason():
    class Random(Lengths):
        def training_step(self, batch, batch_idx):
            x, mask = batch
            noise = np.random.rand(*x.shape)  # noqa: NPY002
            return super().training_step((x * torch.tensor(noise).float(), mask), batch_idx)

    np.random.seed(0)  # noqa: NPY002 - some draws happen to be alike
    with pytest.warns(UserWarning, match=r"not possible to check.*random numbers from outside"):
        quiet_trainer(callbacks=[lo.MicroBatching(4)]).fit(Random("samples"))


@pytest.mark.parametrize("callback", [lo.MicroBatching(4), lo.Accumulation(2)])
def test_buffer_that_each_step_assigns_is_named(callback):
    class Queue(Lengths):
        def __init__(self) -> None:
            super().__init__("samples")
            self.register_buffer("queue", torch.arange(1.0, 33.0))

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx) * self.queue[0]
            self.queue = torch.cat([self.queue[len(batch[0]) :], self.queue[: len(batch[0])]])
            return loss

    with pytest.warns(UserWarning, match=r"training_step changes \['queue'\], or because of state"):
        quiet_trainer(callbacks=[callback]).fit(Queue())


class Sparse(LightningModule):
    """Has sparse gradients, a backward pass of its own, and a hook that updates a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, 2, sparse=True)
        self.factor = nn.Parameter(torch.ones(2))
        self.updates = 0
        self.factor.register_post_accumulate_grad_hook(self.update)

    def update(self, parameter: Tensor) -> None:
        self.updates += 1
        parameter.data.sub_(0.1 * parameter.grad)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.table(batch[0]) * self.factor).square().mean().detach()

    def backward(self, loss: Tensor) -> None:
        rows = torch.arange(4)
        (self.table(rows) * self.factor).square().mean().mul(loss).backward()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.table.parameters(), lr=0.1)


def test_check_runs_the_own_backward_pass_without_updates_in_hooks():
    net = Sparse()
    loader = DataLoader(torch.utils.data.TensorDataset(torch.arange(8)), batch_size=4)
    quiet_trainer(callbacks=[lo.MicroBatching(2)]).fit(net, loader)
    assert net.updates == 4  # two parts of two batches


def test_positional_arguments_of_log_are_all_known():
    assert tuple(inspect.signature(LightningModule.log).parameters)[3:] == LOG_PARAMETERS
