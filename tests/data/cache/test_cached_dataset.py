"""CachedDataset and cached(): items, memory, versions, private folders, errors."""

import gc
import multiprocessing
import os
import pickle
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset

import lightning_opt as lo
from lightning_opt.data.cache import caching
from lightning_opt.data.encoding import decode, encode
from lightning_opt.data.randomness import same
from tests.data.datasets import Batched, Counting, Lazy, Noisy, Numbers, Stream
from tests.helpers.fork_server import PRELOAD

MB = 2**20
STORAGES = ["memory", "disk"]


def cached_dataset(dataset, storage="memory", tmp_path=None, max_bytes=MB, **settings):
    if storage == "disk":
        settings = {"folder": str(tmp_path), "key": "v1", **settings}
    return lo.CachedDataset(dataset, max_bytes, storage=storage, **settings)


# --- bytes --------------------------------------------------------------------------------------


ITEMS = [
    torch.randn(3, 4),
    torch.randn(100, 4)[::7, 1:3],
    torch.randn(2, 3).t(),
    torch.tensor(3),
    torch.empty(0, 5, dtype=torch.int16),
    torch.randn(3).to(torch.bfloat16),
    torch.randn(3, dtype=torch.complex64).conj(),
    torch.tensor([True, False]),
    torch.tensor([float("nan"), float("inf")]),
    torch.randn(2, requires_grad=True),
    np.arange(6.0).reshape(2, 3)[:, ::2],
    np.array(["a", None], dtype=object),
    b"bytes",
    {"a": [1, (2.5, "text", None)], 3: {4, 5}},
    1 + 2j,
]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: type(item).__name__)
def test_items_are_decoded_unchanged(item):
    back = decode(encode(item))
    assert same(item, back)
    assert not isinstance(item, torch.Tensor) or item.requires_grad == back.requires_grad


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged, torch.sparse_coo])
def test_nested_and_sparse_items_are_cached(layout):
    item = torch.eye(3).to_sparse()
    if layout is not torch.sparse_coo:
        item = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    assert same(cached_dataset([item, torch.ones(2)])[0], item)
    assert not same(item, 2 * item)


def test_view_is_stored_without_its_storage():
    whole = torch.randn(1000, 1000)
    assert len(encode(whole[0])) < 5000


# --- items --------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
@settings(max_examples=15)
@given(data=st.data())
def test_random_access_equals_a_dictionary(storage, tmp_path_factory, data):
    """Items are correct and the limit is kept for every order, limit and policy."""
    policy = data.draw(st.sampled_from(["lru", "keep"]))
    max_bytes = max(1, data.draw(st.integers(0, 6)) * 3 * 4096)
    dataset = Counting(10, width=2000)
    reference = {index: dataset[index] for index in range(10)}
    cache = cached_dataset(
        dataset,
        storage,
        tmp_path_factory.mktemp("cache"),
        max_bytes=max_bytes,
        policy=policy,
    )
    lookups = 0
    for indices in data.draw(st.lists(st.lists(st.integers(-10, 9), max_size=6), max_size=8)):
        items = cache.__getitems__(indices) if len(indices) > 1 else [cache[i] for i in indices]
        for index, item in zip(indices, items, strict=True):
            assert same(item, reference[index % 10])
        lookups += len(indices)
        counts = cache.statistics()
        assert counts["bytes"] <= max_bytes
        assert counts["items"] * 8000 <= max_bytes
        assert counts["hits"] + counts["misses"] == lookups
        assert policy == "lru" or counts["evictions"] == 0


@pytest.mark.parametrize("storage", STORAGES)
def test_changed_item_changes_neither_cache_nor_dataset(storage, tmp_path):
    dataset = [{"x": torch.zeros(3), "y": [1]}]
    cache = cached_dataset(dataset, storage, tmp_path)
    for _ in range(3):
        item = cache[0]
        assert item == {"x": item["x"], "y": [1]}
        assert not item["x"].any()
        item["x"] += 1
        item["y"].append(2)
    assert cache.statistics()["hits"] == (2 if storage == "memory" else 3)
    assert not dataset[0]["x"].any()
    assert dataset[0]["y"] == [1]


def test_missing_items_of_a_batch_are_fetched_together():
    cache = cached_dataset(Batched())
    cache[3]
    items = cache.__getitems__([1, 3, 5])
    assert [item["y"][2][0] for item in items] == [1, 3, 5]
    assert cache.dataset.batches[-1] == [1, 5]


def test_equal_indices_share_one_item():
    cache = cached_dataset(Numbers())
    for index in (3, np.int64(3), torch.tensor(3)):
        cache[index]
    assert cache.statistics()["misses"] == 1


def test_report_contains_hits_and_bytes_and_a_pickled_copy_no_items():
    cache = cached_dataset(Counting(width=9000))
    cache[0], cache[0]
    row = cache.report().rows[0]
    assert row["hit rate"] == 0.5
    assert row["bytes"] > 0
    assert len(pickle.dumps(cache)) < 30_000  # without the items
    cache.clear()
    assert cache.statistics()["bytes"] == 0


# --- workers ------------------------------------------------------------------------------------


def read(dataset, epochs=2, **settings):
    generator = torch.Generator().manual_seed(4)
    loader = DataLoader(dataset, batch_size=3, shuffle=True, generator=generator, **settings)
    return [batch for _ in range(epochs) for batch in loader]


@pytest.mark.parametrize(
    ("storage", "method", "persistent"),
    [
        ("memory", "fork", False),
        ("memory", "forkserver", True),
        ("disk", "fork", False),
    ],
)
def test_loaders_with_workers_share_one_cache(storage, method, persistent, tmp_path):
    # "forkserver" pickles the dataset as "spawn" does, and need not import torch each time.
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    workers = {"num_workers": 2, "persistent_workers": persistent}
    expected = read(Counting(), **workers)
    cache = cached_dataset(Counting(), storage, tmp_path)
    actual = read(cache, multiprocessing_context=method, **workers)
    assert same([batch["y"] for batch in actual], [batch["y"] for batch in expected])
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(actual, expected, strict=True))
    counts = cache.statistics()
    compared = 0 if storage == "memory" else 3  # items that the constructor fetched and stored
    assert counts["hits"] == 24 + compared  # includes epochs with new workers
    assert counts["misses"] == 24 - compared
    assert counts["items"] == 24


def test_uncollated_items_arrive_from_a_worker():
    loader = DataLoader(cached_dataset(Numbers()), batch_size=None, num_workers=1)
    assert [item.item() for item in loader] == list(range(24))


@pytest.fixture
def separate_folders(monkeypatch):
    """Separate these folders from those of parallel tests."""
    monkeypatch.setattr(caching, "MEMORY_PREFIX", f"{caching.MEMORY_PREFIX}{os.getpid()}_")


def folders():
    return set(Path("/dev/shm").glob(f"{caching.MEMORY_PREFIX}*"))


def test_memory_folder_is_private_per_object_and_freed_with_it(separate_folders):
    before = folders()
    cache, other = cached_dataset(Numbers()), cached_dataset(Numbers())
    cache[0]
    assert other.statistics()["items"] == 0
    mine = folders() - before
    assert {folder.stat().st_mode & 0o777 for folder in mine} == {0o700}
    assert {folder.stat().st_uid for folder in mine} == {os.getuid()}
    read(cache, num_workers=1)
    assert len(mine) == 2
    assert mine <= folders()  # a worker that ends removes nothing
    del cache, other
    gc.collect()
    assert not mine & folders()


def test_without_shared_memory_a_temporary_folder_is_used_and_own_leftovers_removed(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != Path("/dev/shm"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    leftover = tmp_path / f"{caching.MEMORY_PREFIX}x"
    leftover.mkdir()
    (leftover / "lock").touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: leftover.stat().st_uid + 1)
        cached_dataset(Numbers())
        assert leftover.exists()
    cache = cached_dataset(Numbers())
    assert not leftover.exists()
    assert cache[3].item() == cache[3].item() == 3
    assert cache.statistics()["hits"] == 1


def hold_cache(pipe):
    before = folders()
    cache = lo.CachedDataset(Numbers(), MB)
    pipe.send([str(folder) for folder in folders() - before])
    time.sleep(600)
    cache[0]


def test_leftovers_of_killed_processes_are_removed_and_live_caches_stay(
    monkeypatch, separate_folders
):
    """Process ids are not used: the other process may be in another container."""

    def no_such_process(pid, signal):
        raise ProcessLookupError

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    other = context.Process(target=hold_cache, args=(sender,), daemon=True)
    other.start()
    (folder,) = map(Path, receiver.recv())
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", no_such_process)
        cached_dataset(Numbers())
        assert folder.exists()
    other.kill()
    other.join()
    cached_dataset(Numbers())
    assert not folder.exists()


# --- on disk ------------------------------------------------------------------------------------


def test_later_run_finds_items_of_the_same_key_and_class_only(tmp_path):
    cached_dataset(Counting(), "disk", tmp_path)[5]
    for dataset, key, hits in (
        (Counting(), "v1", 1),
        (Counting(), "v2", 0),
        (Counting(), "v 3", 0),
        (Counting(), "v/3", 0),
        (Batched(), "v1", 0),
    ):
        cache = cached_dataset(dataset, "disk", tmp_path, key=key)
        assert same(cache[5], Counting()[5])
        assert cache.statistics()["hits"] == hits


def test_disk_folder_is_created_private_and_raises_if_others_can_write(tmp_path, monkeypatch):
    cached_dataset(Numbers(), "disk", tmp_path / "a" / "b")[0]
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
        with pytest.raises(ValueError, match="another user"):
            cached_dataset(Numbers(), "disk", tmp_path)
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match="Every user"):
        cached_dataset(Numbers(), "disk", tmp_path)


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "draw",
    [
        lambda: float(torch.rand(()) < 1e-6),  # items differ too rarely to be noticed
        np.random.rand,
        random.random,
        np.random.default_rng(0).random,
    ],
    ids=["torch", "numpy", "python", "own"],
)
def test_random_items_raise_unless_allowed(draw):
    dataset = Noisy(draw)
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    with pytest.raises(ValueError, match=r"is random: .* allow_random"):
        lo.CachedDataset(dataset, MB)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002
    cache = lo.CachedDataset(dataset, MB, allow_random=True)
    assert torch.equal(cache[3], cache[3])


def test_checks_of_items_leave_no_file_open(tmp_path):
    dataset = Lazy()
    cached_dataset(Subset(dataset, range(5)))
    cached_dataset(Subset(dataset, range(5)), "disk", tmp_path)
    assert dataset.handle is None


def test_dataset_without_index_and_unpicklable_items_raise():
    for dataset in (Stream(), 3):
        with pytest.raises(TypeError, match="map-style"):
            lo.CachedDataset(dataset, MB)
    with pytest.raises(TypeError, match="cannot be cached"):
        lo.CachedDataset([lambda: 1], MB, allow_random=True)[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_bytes": 0}, "max_bytes"),
        ({"policy": "lfu"}, "policy"),
        ({"storage": "cloud"}, "storage"),
        ({"storage": "disk", "folder": "x"}, "needs key="),
        ({"folder": "x"}, "need storage="),
        ({"key": "x"}, "need storage="),
        ({"max_bytes": 2**60}, "free in /dev/shm"),
    ],
)
def test_invalid_arguments_raise(settings, message):
    for make in (lo.CachedDataset, lambda _, **rest: lo.cached(abs, **rest)):
        with pytest.raises(ValueError, match=message):
            make(Numbers(), **{"max_bytes": MB, **settings})


# --- functions ----------------------------------------------------------------------------------


calls: list[tuple] = []


def distance(a, b, power=1):
    calls.append((a, b))
    return (a - b).abs().pow(power).sum()


def test_function_is_computed_once_for_equal_arguments():
    calls.clear()
    function = lo.cached(distance, MB)
    a, b = torch.randn(5), torch.randn(5)
    assert function.__name__ == "distance"
    for _ in range(2):
        assert function(a.clone(), b) == distance(a, b)
        assert function(a, b, power=2) == distance(a, b, 2)
    assert len(calls) == 2 + 4
    assert function.statistics()["hits"] == 2


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=30))
def test_symmetric_pairs_are_computed_once(pairs):
    seen = []

    def length(a, b):
        seen.append(frozenset((a, b)))
        return abs(a - b)

    function = lo.cached(length, MB, symmetric=True)
    assert [function(a, b) for a, b in pairs] == [abs(a - b) for a, b in pairs]
    assert len(seen) == len(set(seen))


def test_arguments_of_other_type_or_order_are_separate_items():
    function = lo.cached(lambda a, b=0: (type(a).__name__, a, b), MB)
    for arguments in [(1,), (1.0,), (True,), ("1",), (1, 2), (2, 1), (torch.tensor(1),)]:
        assert function(*arguments)[0] == type(arguments[0]).__name__
    assert function.statistics()["hits"] == 0
    with pytest.raises(TypeError, match="two positional"):
        lo.cached(distance, MB, symmetric=True)(1)
    with pytest.raises(TypeError, match="callable"):
        lo.cached(3, MB)


def test_error_is_not_cached():
    divisors = [0]
    function = lo.cached(lambda: 1 // divisors[0], MB)
    with pytest.raises(ZeroDivisionError):
        function()
    divisors[0] = 1
    assert function() == 1


def test_two_datasets_under_one_key_raise(tmp_path):
    """For example the training and the validation data of one class."""
    train, validation = ([torch.tensor(start + i) for i in range(9)] for start in (0, 100))
    settings = {"storage": "disk", "key": "v1", "folder": str(tmp_path)}
    cached = lo.CachedDataset(train, MB, **settings)
    with pytest.raises(ValueError, match="its own key="):
        lo.CachedDataset(validation, MB, **settings)
    again = lo.CachedDataset(train, MB, **settings)
    assert [int(again[i]) for i in range(9)] == [int(cached[i]) for i in range(9)]
