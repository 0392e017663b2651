"""What a step has changed is put back, in every batch and not only in the first."""

import random

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

from lightning_opt.core.undo import Before, CannotUndoError


class Busy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.error = torchmetrics.MeanSquaredError()
        self.register_buffer("queue", torch.zeros(4))
        self.register_buffer("table", torch.zeros(4))
        self.count, self.seen, self.options = 0, [], {"a": 1}

    def forward(self, x):
        noise = torch.rand(()).item() + random.random() + np.random.rand()  # noqa: NPY002
        self.norm(x)
        self.error(x[:, 0], x[:, 1])
        self.queue[0] += 1
        self.count += 1
        self.seen.append(self.count)
        self.options["b"] = self.count
        self.late = True
        return noise


def state_of(module):
    tensors = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    metric = {name: getattr(module.error, name).clone() for name in module.error._defaults}
    plain = (module.count, list(module.seen), dict(module.options), hasattr(module, "late"))
    return tensors, metric, (*plain, module.error._update_count, module.error._computed)


@pytest.mark.parametrize("batches", [0, 1, 3])
def test_everything_is_put_back_as_often_as_needed(batches):
    module, x = Busy(), torch.randn(5, 3)
    before = Before(module, torch.device("cpu"))
    for _ in range(batches):
        before.take()
        module(x)
        before.learn()
        before.forget()
    expected = state_of(module)
    before.take()
    noises = []
    for _ in range(2):
        noises.append(module(x))
        before.restore()
        torch.testing.assert_close(state_of(module)[:2], expected[:2], rtol=0.0, atol=0.0)
        assert state_of(module)[2] == expected[2]
    assert noises[0] == noises[1]


def test_what_cannot_be_put_back_is_an_error():
    module, x = Busy(), torch.randn(5, 3)
    before = Before(module, torch.device("cpu"))
    before.take()
    module(x)
    before.learn()
    before.take()
    module.table += 1
    with pytest.raises(CannotUndoError, match="table"):
        before.restore()
    before.take()
    with torch.no_grad():
        module.norm.weight.mul_(2)
    with pytest.raises(CannotUndoError, match="parameters"):
        before.restore()
