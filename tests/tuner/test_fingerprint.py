"""Fingerprints: what changes them and what does not."""

import functools
import importlib
import multiprocessing
import os
import subprocess
import sys
import types

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from lightning_opt.tuner.fingerprint import fingerprint
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


def test_changed_code_changes_it():
    def kind(value):
        def get(self, index):
            return index + value

        body = {"__module__": __name__, "__getitem__": get, "__len__": lambda self: 3}
        return types.new_class("Same", exec_body=lambda namespace: namespace.update(body))

    assert fingerprint(kind(1)()) == fingerprint(kind(1)())
    assert fingerprint(kind(1)()) != fingerprint(kind(2)())


def test_unpicklable_attribute_raises():
    with pytest.raises(ValueError, match="cannot be pickled"):
        fingerprint(Unpicklable())


OTHERS = """
import functools, threading
import numpy as np
import theirs
from theirs import taken
BASE = 1
WORDS = {"one", "two", "three"}
LOCK = threading.Lock()
def deeper(x, *, scale=1): return x + 1
def helper(x, more=1): return deeper(x) + more
@functools.lru_cache
def kept(x): return 5 * x
class Scaled:
    def __call__(self, x): return 3 * x
class Own(list):
    def __getitem__(self, i): return helper(i)
def first(x): return helper(x)
def second(x): return first(x) if x in {"a", "b", "c"} else first(x) + BASE
def third(x): return Scaled()(x)
def fourth(x): return theirs.other(x) + len(WORDS)
def fifth(x): return np.add(x, taken(x))
def sixth(x): return [kept(y) for y in x]
def seventh(x):
    with LOCK:
        return seventh(x - 1) if x else 0
"""
THEIRS = "def other(x): return x\ndef taken(x): return x\n"


def prints(folder, ours=("", ""), theirs=("", "")):
    """Return the fingerprints of what a module has whose text is changed."""
    (folder / "ours.py").write_text(OTHERS.replace(*ours))
    (folder / "theirs.py").write_text(THEIRS.replace(*theirs))
    for name in ("ours", "theirs"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    module = importlib.import_module("ours")
    names = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")
    things = {name: getattr(module, name) for name in names} | {"own": module.Own([1])}
    return {name: fingerprint(thing) for name, thing in things.items()}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in ("ours", "theirs"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("ours", "theirs", "changed"),
    [
        (("", ""), ("", ""), set()),
        (("x + 1\n", "x + 2\n"), ("", ""), {"first", "second", "own"}),  # helper of a helper
        (("more=1", "more=2"), ("", ""), {"first", "second", "own"}),
        (("scale=1", "scale=2"), ("", ""), {"first", "second", "own"}),
        (("BASE = 1", "BASE = 2"), ("", ""), {"second"}),
        (("3 * x", "4 * x"), ("", ""), {"third"}),
        (("5 * x", "6 * x"), ("", ""), {"sixth"}),
        (('"three"', '"four"'), ("", ""), {"fourth"}),
        (("", ""), ("other(x): return x", "other(x): return -x"), {"fourth"}),
        (("", ""), ("taken(x): return x", "taken(x): return -x"), {"fifth"}),
    ],
)
def test_what_a_function_calls_is_a_part_of_it(ours, theirs, changed, folder):
    before, after = prints(folder), prints(folder, ours, theirs)
    assert {name for name in before if before[name] != after[name]} == changed


def test_another_version_of_an_installed_package_changes_it(folder, monkeypatch):
    import numpy as np

    before = prints(folder)
    monkeypatch.setattr(np, "__version__", "0.0")
    after = prints(folder)
    assert {name for name in before if before[name] != after[name]} == {"fifth"}


def test_it_does_not_depend_on_the_seed_of_hashes(folder):
    prints(folder)
    code = "import ours; from lightning_opt.tuner.fingerprint import fingerprint as f; "
    code += "print(f(ours.second), f(ours.fourth))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
