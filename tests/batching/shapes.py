"""Batches and training steps of many shapes, each as its users write it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torchmetrics
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

WIDTH, CLASSES, LENGTH = 6, 3, 5


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Record:
    x: Tensor
    y: Tensor
    scale: float = 1.0


class Rows(Mapping[str, Tensor]):
    """Like a TensorDict: a mapping whose tensors are sliced together, with a ``batch_size``."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.batch_size = next(iter(tensors.values())).shape[:1]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return self.tensors[index]
        return Rows({name: tensor[index] for name, tensor in self.tensors.items()})

    def __iter__(self) -> Any:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class Step(LightningModule):
    """A classifier that runs out of memory above ``fits`` samples. Subclasses replace ``loss``."""

    def __init__(self, fits: int = 10**9) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fits = fits
        self.build()

    def build(self) -> None:
        self.layer = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.samples(batch) > self.fits:
            raise torch.OutOfMemoryError("planted")
        return self.loss(batch)

    def samples(self, batch: Any) -> int:
        return len(batch[0])

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.layer(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Keyed(Step):
    def samples(self, batch: Any) -> int:
        return len(batch["y"])

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch["x"], batch["y"]))


class Attributes(Step):
    def samples(self, batch: Any) -> int:
        return len(batch.y)

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch.x, batch.y))


class Items(Step):
    """Batches are lists of samples."""

    def samples(self, batch: Any) -> int:
        return len(batch)

    def loss(self, batch: Any) -> Tensor:
        losses = [
            F.cross_entropy(self.layer(x.mean(tuple(range(x.ndim - 1)))), torch.as_tensor(y))
            for x, y in batch
        ]
        return torch.stack(losses).mean()


class Detector(Step):
    def loss(self, batch: Any) -> Tensor:
        images, targets = batch
        losses = [
            (self.layer(image.mean((0, 1))).mean() - target["boxes"].mean()).square()
            + target["image_id"] * 0.01 * self.layer.bias.sum()
            for image, target in zip(images, targets, strict=True)
        ]
        return torch.stack(losses).mean()


class Tokens(Step):
    """The loss is a mean over labelled tokens."""

    def samples(self, batch: Any) -> int:
        return len(batch["labels"])

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.layer(batch["x"]).flatten(0, 1), batch["labels"].flatten())


class LanguageModel(Tokens):
    """A model of ``transformers`` with dropout, as its users call it."""

    def build(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2)
        self.model = GPT2LMHeadModel(config)

    def loss(self, batch: Any) -> Tensor:
        return self.model(**batch).loss


class Packed(Step):
    def build(self) -> None:
        super().build()
        self.rnn = nn.GRU(WIDTH, WIDTH)

    def samples(self, batch: Any) -> int:
        return len(batch[1])

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.layer(self.rnn(x)[1][0]), y)


class TimeFirst(Packed):
    """The first dimension of the inputs is time."""

    def samples(self, batch: Any) -> int:
        return batch[0].shape[1]


class LabelledTimes(TimeFirst):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.layer(self.rnn(x)[0]).flatten(0, 1), y.flatten())


class Contrastive(Step):
    """Like SimCLR: two noisy views of each sample against all others."""

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        views = [self.layer(x + 0.1 * torch.randn_like(x)) for _ in range(2)]
        return F.cross_entropy(views[0] @ views[1].T, torch.arange(len(x)))


class Mixup(Step):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        share, other = torch.rand(()), torch.randperm(len(x))
        scores = self.layer(share * x + (1 - share) * x[other])
        return share * F.cross_entropy(scores, y) + (1 - share) * F.cross_entropy(scores, y[other])


class HardExamples(Step):
    def loss(self, batch: Any) -> Tensor:
        losses = F.cross_entropy(self.layer(batch[0]), batch[1], reduction="none")
        return losses.topk(max(1, len(losses) // 2)).values.mean()


class Teacher(Step):
    """A moving average of the weights is written in the step."""

    def build(self) -> None:
        super().build()
        self.teacher = copy.deepcopy(self.layer).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for mean, own in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
            mean.mul_(0.9).add_(own, alpha=0.1)

    def loss(self, batch: Any) -> Tensor:
        self.follow()
        return super().loss(batch) + (self.layer(batch[0]) - self.teacher(batch[0])).pow(2).mean()


class HiddenTeacher(Teacher):
    """Keeps its teacher in a list, so that checkpoints do not include it."""

    def build(self) -> None:
        super().build()
        self.hidden = [self._modules.pop("teacher")]

    @property
    def teacher(self) -> nn.Module:
        return self.hidden[0]


class MomentumContrast(Teacher):
    """Like MoCo: queries against a queue of the keys of earlier samples."""

    def build(self) -> None:
        super().build()
        self.register_buffer("queue", torch.randn(32, CLASSES))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def loss(self, batch: Any) -> Tensor:
        self.follow()
        x, _ = batch
        query, key = self.layer(x), self.teacher(x)
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().T], 1)
        start = int(self.pointer)
        self.queue[start : start + len(x)] = key
        self.pointer.fill_((start + len(x)) % len(self.queue))
        return F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))


class Environment:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.state = torch.zeros(WIDTH)

    def step(self, action: int) -> Tensor:
        self.state = (self.state + 0.1 * (action + 1)).sin()
        return self.state


class Playing(Step):
    """Each step plays one round and stores it, as DQN does."""

    def build(self) -> None:
        super().build()
        self.environment, self.replay = Environment(), []

    def loss(self, batch: Any) -> Tensor:
        state = self.environment.step(int(self.layer(self.environment.state).argmax()))
        self.replay.append(state)
        return super().loss(batch) + self.layer(state).square().mean()


class Normalized(Step):
    def build(self) -> None:
        super().build()
        self.norm = nn.BatchNorm1d(WIDTH)

    def loss(self, batch: Any) -> Tensor:
        return super().loss((self.norm(batch[0]), batch[1]))


class Spectral(Step):
    """Its older and newer spectral norms run twice per step."""

    def build(self) -> None:
        older, newer = nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm
        self.layer = nn.Sequential(older(nn.Linear(WIDTH, 8)), newer(nn.Linear(8, CLASSES)))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.layer(2 * batch[0]).square().mean()


class Accuracy(Step):
    """Logs a macro average and a root, which are no means over samples."""

    def build(self) -> None:
        super().build()
        self.metric = torchmetrics.classification.MulticlassAccuracy(CLASSES, average="macro")

    def loss(self, batch: Any) -> Tensor:
        self.metric(self.layer(batch[0]), batch[1])
        self.log("accuracy", self.metric)
        loss = super().loss(batch)
        self.log("root", loss.sqrt())
        return loss


class Longest(Keyed):
    """Cuts inputs to the longest sample, though the mask is as wide as that of the batch."""

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"][:, : int(batch["lengths"].max())]
        return F.cross_entropy(self.layer((x * batch["mask"].unsqueeze(-1)).mean(1)), batch["y"])


class Graphs(Step):
    def samples(self, batch: Any) -> int:
        return batch.num_graphs

    def loss(self, batch: Any) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        return super().loss((global_mean_pool(batch.x, batch.batch), batch.y))


# --- samples, and how they are put together ------------------------------------------------------


def points(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, WIDTH, generator=generator)
    return list(zip(x, torch.randint(0, CLASSES, (count,), generator=generator), strict=True))


def sequences(count: int, lengths: int = LENGTH) -> list[Any]:
    """Return pairs of a sequence and its label; at least one sequence has full length."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for number in range(count):
        length = 2 + (7 * number + 2) % (lengths - 1)
        x = torch.randn(length, WIDTH, generator=generator)
        found.append((x, torch.randint(0, CLASSES, (), generator=generator)))
    return found


def pictures(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(3, 4, WIDTH, generator=generator), n % CLASSES) for n in range(count)]


def keyed(samples: list[Any]) -> dict[str, Tensor]:
    x, y = default_collate(samples)
    return {"x": x, "y": y}


def encoding(samples: list[Any]) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding(keyed(samples))


def detection(samples: list[Any]) -> Any:
    """Return images and targets of different sizes, as torchvision's references do."""
    images = [image[:, : 2 + y] for image, y in samples]
    targets = [
        {"boxes": image.sum() + torch.arange(4.0).repeat(1 + y, 1), "image_id": y}
        for image, y in samples
    ]
    return tuple(images), tuple(targets)


def padded(samples: list[Any]) -> dict[str, Tensor]:
    """Return sequences padded to the longest, with labels for the first tokens."""
    x = nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
    labels = torch.full(x.shape[:2], -100)
    for row, (sequence, y) in enumerate(samples):
        labels[row, : len(sequence)] = (y + torch.arange(len(sequence))) % CLASSES
    return {"x": x, "labels": labels}


def tokenized(samples: list[Any]) -> dict[str, Tensor]:
    labels = padded(samples)["labels"]
    return {
        "input_ids": labels.clamp(min=0),
        "attention_mask": (labels != -100).long(),
        "labels": labels,
    }


def packed(samples: list[Any]) -> Any:
    ordered = sorted(samples, key=lambda sample: -len(sample[0]))
    return pack_sequence([x for x, _ in ordered]), torch.stack([y for _, y in ordered])


def with_time_first(samples: list[Any]) -> Any:
    x = torch.stack(
        [x.expand(LENGTH, -1) * torch.arange(1.0, LENGTH + 1)[:, None] for x, _ in samples], 1
    )
    return x, torch.stack([y.expand(LENGTH) for _, y in samples], 1)


def labelled_with_time_first(samples: list[Any]) -> Any:
    x, y = with_time_first(samples)
    return x, y[0]


def cut_to_the_longest(samples: list[Any]) -> Any:
    x = nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
    lengths = torch.tensor([len(x) for x, _ in samples])
    return {
        "x": x,
        "mask": torch.arange(x.shape[1]) < lengths[:, None],
        "lengths": lengths,
        "y": torch.stack([y for _, y in samples]),
    }


def graphs(samples: list[Any]) -> Any:
    from torch_geometric.data import Batch, Data

    return Batch.from_data_list([Data(x=x, y=y.reshape(1)) for x, y in samples])


class Shape(NamedTuple):
    step: type[Step]
    samples: Callable[[int], list[Any]] = points
    collate: Callable[[list[Any]], Any] = default_collate
    settings: dict[str, Any] = {}


def count_labels(batch: Any) -> Tensor:
    return (batch["labels"] != -100).sum()


PER_TOKEN = {"loss": "mean_over_tokens", "count": count_labels}

SHAPES = {
    "tensors": Shape(Step),
    "dict": Shape(Keyed, collate=keyed),
    "BatchEncoding": Shape(Keyed, collate=encoding),
    "NamedTuple": Shape(Attributes, collate=lambda items: Pair(*default_collate(items))),
    "dataclass": Shape(Attributes, collate=lambda items: Record(*default_collate(items))),
    "TensorDict": Shape(Keyed, collate=lambda items: Rows(keyed(items))),
    "list of (image, class)": Shape(Items, pictures, list),
    "list of (sequence, class)": Shape(Items, sequences, list),
    "detection: lists of images and targets": Shape(Detector, pictures, detection),
    "graphs (torch_geometric)": Shape(Graphs, sequences, graphs),
    "packed sequences": Shape(Packed, sequences, packed),
    "time first, one label per sequence": Shape(TimeFirst, points, labelled_with_time_first),
    "time first, one label per time": Shape(LabelledTimes, points, with_time_first),
    "cut to the longest sample": Shape(Longest, sequences, cut_to_the_longest),
    "padded labels, default loss": Shape(Tokens, sequences, padded),
    "padded labels, mean_over_tokens": Shape(Tokens, sequences, padded, PER_TOKEN),
    "GPT-2 with dropout, padded labels": Shape(LanguageModel, sequences, tokenized),
    "contrastive, augmented in the step": Shape(Contrastive),
    "mixup": Shape(Mixup),
    "hard-example mining": Shape(HardExamples),
    "teacher": Shape(Teacher),
    "teacher in a list": Shape(HiddenTeacher),
    "MoCo": Shape(MomentumContrast),
    "reinforcement learning": Shape(Playing),
    "BatchNorm": Shape(Normalized),
    "spectral_norm": Shape(Spectral),
    "macro accuracy and roots logged": Shape(Accuracy),
}
