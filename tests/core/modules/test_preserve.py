"""The state changed by a step is restored, in every batch."""

import itertools
import random

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

from lightning_opt.core.modules.preserve import (
    ALWAYS_COPIED_BYTES,
    MAX_COPIED_ENTRIES,
    CannotUndoError,
    StepState,
    preserved,
    random_states,
)


class Meter:
    """An object of a user's class."""

    def __init__(self) -> None:
        self.total, self.values, self.mean = 0.0, [], torch.zeros(2)
        self.itself = self


class Frozen(dict):
    def __setitem__(self, key, value):
        raise TypeError("frozen")

    clear = update = __setitem__


class Counts(dict):
    pass


class Busy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.error = torchmetrics.MeanSquaredError()
        self.register_buffer("queue", torch.zeros(4))
        self.register_buffer("table", torch.zeros(ALWAYS_COPIED_BYTES))
        self.ema, self.mean, self.large = (
            torch.zeros(3),
            torch.zeros(3),
            torch.zeros(ALWAYS_COPIED_BYTES),
        )
        with torch.inference_mode():
            self.cache = torch.ones(2)
        self.sparse = torch.eye(3).to_sparse()
        self.draw, self.rng = torch.Generator(), random.Random(1)
        self.numpy, self.legacy = np.random.default_rng(1), np.random.RandomState(1)
        self.count, self.seen, self.options = 0, [], {"a": 1}
        self.meter, self.histogram = Meter(), np.zeros(3)
        self.outputs = {"train": [], "state": {"ema": torch.zeros(2)}}
        self.draws = ([torch.Generator()], np.random.default_rng(2))
        self.names, self.many = set(), [0] * (MAX_COPIED_ENTRIES + 1)
        self.register_buffer("first", None)
        self.teachers = [nn.BatchNorm1d(3)]  # not registered
        self.config, self.counts = Frozen(width=2), Counts(steps=1)
        self.hidden = torch.zeros(3)

    def forward(self, x):
        noise = torch.rand(()).item() + random.random() + np.random.rand()  # noqa: NPY002
        noise += torch.rand((), generator=self.draw).item() + self.rng.random()
        noise += self.numpy.random() + self.legacy.rand()
        self.norm(x)
        self.teachers[0](x)
        self.error(x[:, 0], x[:, 1])
        self.queue[0] += 1
        self.ema.mul_(0.9).add_(1)
        self.mean = self.mean + x.mean(dim=0)
        self.hidden = self.hidden.detach() + x.mean(dim=0) * self.norm.weight  # has a graph
        self.large.add_(1)
        self.count += 1
        self.seen.append(self.count)
        self.options["b"] = self.counts["steps"] = self.count
        self.late = True
        self.meter.total += 1.0
        self.meter.values.append(self.count)
        self.meter.mean += 1
        self.histogram[1] += 1
        self.names.add(self.count)
        self.many += [1, 2]
        self.first = x
        self.outputs["train"].append(x.sum())
        self.outputs["state"]["ema"].add_(1)
        noise += torch.rand((), generator=self.draws[0][0]).item() + self.draws[1].random()
        return noise


def state_of(module):
    tensors = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    metric = {name: getattr(module.error, name).clone() for name in module.error._defaults}
    tensors |= {name: getattr(module, name).clone() for name in ("ema", "mean", "large", "hidden")}
    tensors |= {"meter": module.meter.mean.clone(), "inner": module.outputs["state"]["ema"].clone()}
    tensors["histogram"] = torch.tensor(module.histogram)
    tensors |= {f"teacher {name}": b.clone() for name, b in module.teachers[0].named_buffers()}
    plain = (module.count, list(module.seen), dict(module.options), hasattr(module, "late"))
    plain = (*plain, module.meter.total, list(module.meter.values), len(module.outputs["train"]))
    plain = (*plain, set(module.names), len(module.many), module.first is None)
    plain = (*plain, dict(module.config), dict(module.counts), type(module.counts))
    return tensors, metric, (*plain, module.error._update_count, module.error._computed)


@pytest.mark.parametrize("batches", [0, 1, 3])
def test_state_is_restored_any_number_of_times(batches):
    module, x = Busy(), torch.randn(5, 3)
    before = StepState(module, torch.device("cpu"))
    for _ in range(batches):
        before.take()
        module(x)
        before.record_writes()
        before.clear()
    expected = state_of(module)
    before.take()
    noises = []
    for _ in range(2):
        noises.append(module(x))
        before.restore()
        torch.testing.assert_close(state_of(module)[:2], expected[:2], rtol=0.0, atol=0.0)
        assert state_of(module)[2] == expected[2]
    assert noises[0] == noises[1]


def test_uncopied_change_raises():
    module, x = Busy(), torch.randn(5, 3)
    before = StepState(module, torch.device("cpu"))
    before.take()
    module(x)
    before.record_writes()
    before.take()
    module.table += 1
    with pytest.raises(CannotUndoError, match="table"):
        before.restore()
    before.take()
    with torch.no_grad():
        module.norm.weight.mul_(2)
    with pytest.raises(CannotUndoError, match="parameters"):
        before.restore()
    before.take()
    before.parameters_change = True  # through ``.data``
    with pytest.raises(CannotUndoError, match="parameters"):
        before.restore()


def test_preserved_restores_gradients_modes_and_state():
    module, x = Busy(), torch.randn(5, 3)
    module(x)
    module.norm.weight.grad = gradient = torch.ones(3)
    expected = state_of(module)
    with preserved(module):
        assert module.norm.weight.grad is None
        noise = module(x)
        module.eval()
        module.norm.weight.requires_grad_(False)
    assert module.norm.weight.grad is gradient
    assert module.norm.weight.requires_grad
    assert module.training
    assert module.norm.training
    torch.testing.assert_close(state_of(module)[:2], expected[:2], rtol=0.0, atol=0.0)
    assert state_of(module)[2] == expected[2]
    assert module(x) == noise


class Replay:
    """A user's iterator with another method."""

    def __init__(self) -> None:
        self.items = [1]

    def __iter__(self):
        return self

    def __next__(self):
        return self.items.pop()

    def push(self, item):
        self.items.append(item)


def test_iterators_in_attributes_lose_no_items(tmp_path):
    module = Busy()
    module.replay = replay = Replay()
    module.used, module.unused = iter([1, 2, 3]), itertools.count()
    module.endless, unused = itertools.cycle("abc"), module.unused
    module.log_file = (tmp_path / "log").open("w")
    for taken in (2, 1):
        with preserved(module):
            module.log_file.write("step")
            module.replay.push(2)
            assert [next(module.replay) for _ in range(2)] == [2, 1]
            assert [next(module.used) for _ in range(taken)] == [1, 2][:taken]
            assert [next(module.endless) for _ in range(4)] == ["a", "b", "c", "a"]
    module.log_file.close()
    assert list(module.used) == [1, 2, 3]
    assert next(module.endless) == "a"
    assert (module.unused, module.replay, replay.items) == (unused, replay, [1])


def test_global_random_states_are_restored_with_the_second_number_of_a_pair():
    for draw in (random.random, lambda: random.gauss(0, 1), np.random.rand, np.random.randn):
        for _ in range(3):
            draw()
            undo = random_states([])
            python, numpy = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002
            for _ in range(2):
                for other in (random.random, np.random.randn, np.random.rand, draw):
                    other()
                for restore in undo:
                    restore()
                assert random.getstate() == python
                np.testing.assert_equal(np.random.get_state(legacy=False), numpy)  # noqa: NPY002
