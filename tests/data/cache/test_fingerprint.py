"""Fingerprints: what changes them and what does not."""

import functools
import multiprocessing
import os
import types

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from lightning_opt.data.cache.fingerprint import fingerprint
from tests.data.datasets import Counting, Unpicklable


class Files:
    def __init__(self, names, transform=None):
        self.names, self.transform = names, transform

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return self.names[index]


def scaled(factor):
    return lambda x: factor * x


def one():
    return TensorDataset(torch.arange(5.0))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Counting(), Counting(offset=1)),
        (Counting(), Counting(25)),
        (one(), TensorDataset(torch.arange(5.0).double())),
        (one(), TensorDataset(torch.tensor([0.0, 1, 2, 3, 5]))),
        (Subset(one(), [0, 1]), Subset(one(), [1, 0])),
        (Subset(one(), [0]), Subset(TensorDataset(torch.arange(1.0, 6)), [0])),
        (Files(["a"], lambda x: x + 1), Files(["a"], lambda x: x + 2)),
        (Files(["a"], scaled(1)), Files(["a"], scaled(2))),
        (lambda: 1, lambda: 2),
        (functools.partial(scaled, 1), functools.partial(scaled, 2)),
    ],
)
def test_another_dataset_has_another(first, second):
    assert fingerprint(first) != fingerprint(second)


def in_another_process(queue):
    queue.put(fingerprint(Files(["a"], Counting(3))))


def test_it_is_the_same_in_another_process():
    queue = multiprocessing.get_context("fork").Queue()
    process = multiprocessing.get_context("fork").Process(target=in_another_process, args=(queue,))
    process.start()
    assert queue.get(timeout=30) == fingerprint(Files(["a"], Counting(3)))
    process.join()


def test_changed_code_and_changed_items_change_it():
    def kind(value):
        def get(self, index):
            return index + value

        body = {"__module__": __name__, "__getitem__": get, "__len__": lambda self: 3}
        return types.new_class("Same", exec_body=lambda namespace: namespace.update(body))

    assert fingerprint(kind(1)()) == fingerprint(kind(1)())
    assert fingerprint(kind(1)()) != fingerprint(kind(2)())
    assert fingerprint(one(), [b"1"]) != fingerprint(one(), [b"2"])


def test_a_file_that_changes_changes_it(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("a")
    before = fingerprint(Files([str(file)]))
    assert fingerprint(Files([str(file)])) == before
    file.write_text("ab")
    assert fingerprint(Files([str(file)])) != before
    file.write_text("a")
    os.utime(file, ns=(1, 1))
    assert fingerprint(Files([str(file)])) != before


def test_what_cannot_be_pickled_wants_a_key():
    with pytest.raises(ValueError, match="key="):
        fingerprint(Unpicklable())
