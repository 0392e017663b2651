"""CachedDataset and cached(): what they serve, what they hold, and where they refuse."""

import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, Subset

import lightning_opt as lo
from lightning_opt.data.cache import caching
from lightning_opt.data.encoding import decode, encode
from lightning_opt.data.randomness import same
from tests.data import datasets
from tests.data.datasets import Batched, Counting, Lazy, Numbers
from tests.helpers.processes import PRELOAD, launch

MB = 2**20
STORAGES = ["memory", "disk"]


def cached_dataset(dataset, storage="memory", tmp_path=None, max_bytes=MB, **settings):
    if storage == "disk":
        settings["folder"] = str(tmp_path)
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
    torch.eye(3).to_sparse(),
    np.arange(6.0).reshape(2, 3)[:, ::2],
    np.array(["a", None], dtype=object),
    b"bytes",
    {"a": [1, (2.5, "text", None)], 3: {4, 5}},
    1 + 2j,
]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: type(item).__name__)
def test_items_come_back_as_they_were(item):
    back = decode(encode(item))
    if isinstance(item, torch.Tensor) and item.is_sparse:
        item, back = item.to_dense(), back.to_dense()
    assert same(item, back)
    assert not isinstance(item, torch.Tensor) or item.requires_grad == back.requires_grad


def test_a_view_is_counted_by_itself():
    whole = torch.randn(1000, 1000)
    assert len(encode(whole[0])) < 5000


# --- what is served -----------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_random_access_equals_a_dictionary(storage, tmp_path_factory, data):
    """Whatever the order, the bound and the policy: items are right and the bound holds."""
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
    asked = 0
    for indices in data.draw(st.lists(st.lists(st.integers(-10, 9), max_size=6), max_size=8)):
        items = cache.__getitems__(indices) if len(indices) > 1 else [cache[i] for i in indices]
        for index, item in zip(indices, items, strict=True):
            assert same(item, reference[index % 10])
        asked += len(indices)
        counts = cache.statistics()
        assert counts["bytes"] <= max_bytes
        assert counts["items"] * 8000 <= max_bytes
        assert counts["hits"] + counts["misses"] == asked
        assert policy == "lru" or counts["evictions"] == 0


@pytest.mark.parametrize("storage", STORAGES)
def test_whoever_changes_an_item_changes_nothing_in_the_cache(storage, tmp_path):
    cache = cached_dataset([{"x": torch.zeros(3), "y": [1]}], storage, tmp_path)
    for _ in range(3):
        item = cache[0]
        assert item == {"x": item["x"], "y": [1]}
        assert not item["x"].any()
        item["x"] += 1
        item["y"].append(2)
    assert cache.statistics()["hits"] == 2


def test_batches_ask_for_what_is_missing_at_once():
    cache = cached_dataset(Batched())
    cache[3]
    items = cache.__getitems__([1, 3, 5])
    assert [item["y"][2][0] for item in items] == [1, 3, 5]
    assert cache.dataset.batches[-1] == [1, 5]


def test_one_key_for_equal_indices():
    cache = cached_dataset(Numbers())
    for index in (3, np.int64(3), torch.tensor(3)):
        cache[index]
    assert cache.statistics()["misses"] == 1


def test_report_names_hits_and_bytes():
    cache = cached_dataset(Counting(width=9000))
    cache[0], cache[0]
    row = cache.report().rows[0]
    assert row["hit rate"] == 0.5
    assert row["bytes"] > 0
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
def test_loaders_with_workers_see_the_same(storage, method, persistent, tmp_path):
    # "forkserver" pickles the dataset as "spawn" does, and need not import torch each time.
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    workers = {"num_workers": 2, "persistent_workers": persistent}
    expected = read(Counting(), **workers)
    cache = cached_dataset(Counting(), storage, tmp_path)
    actual = read(cache, multiprocessing_context=method, **workers)
    assert same([batch["y"] for batch in actual], [batch["y"] for batch in expected])
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(actual, expected, strict=True))
    counts = cache.statistics()
    assert counts["hits"] == counts["misses"] == 24  # one cache for all, which outlives workers
    assert counts["items"] == 24


def test_items_that_are_not_collated_leave_a_worker():
    loader = DataLoader(cached_dataset(Numbers()), batch_size=None, num_workers=1)
    assert [item.item() for item in loader] == list(range(24))


def test_pickles_without_its_items():
    cache = cached_dataset(Counting(width=10_000))
    cache[0]
    twin = pickle.loads(pickle.dumps(cache))
    assert len(pickle.dumps(cache)) < 30_000
    assert same(twin[0], cache[0])


def test_a_copy_has_the_same_items():
    cache = cached_dataset(Counting())
    cache[0]
    twin = pickle.loads(pickle.dumps(cache))
    twin[0]
    assert twin.statistics()["items"] == 1
    assert twin.dataset.fetches == cache.dataset.fetches


def folders():
    return set(Path("/dev/shm").glob(f"{caching.MARK}*"))


def test_memory_is_given_back():
    before = folders()
    cache = cached_dataset(Numbers())
    cache[0]
    (mine,) = folders() - before
    read(cache, num_workers=1)
    assert mine in folders()  # the end of a worker removes nothing
    del cache
    gc.collect()
    assert mine not in folders()


def test_where_shared_memory_cannot_be_written_the_temporary_folder_serves(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != Path("/dev/shm"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = cached_dataset(Numbers())
    assert cache[3].item() == cache[3].item() == 3
    assert cache.statistics()["hits"] == 1
    assert len(list(tmp_path.glob(f"{caching.MARK}*"))) == 1


def hold_for_ever(pipe):
    before = folders()
    cache = lo.CachedDataset(Numbers(), MB)
    pipe.send([str(folder) for folder in folders() - before])
    time.sleep(600)
    cache[0]


def test_memory_of_the_dead_is_swept_and_that_of_the_living_is_not(monkeypatch):
    """Whatever its process is called: in another container its number says nothing."""

    def nobody(pid, signal):
        raise ProcessLookupError  # as it is seen from there

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    other = context.Process(target=hold_for_ever, args=(theirs,), daemon=True)
    other.start()
    (folder,) = map(Path, ours.recv())
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", nobody)
        cached_dataset(Numbers())
        assert folder.exists()
    other.kill()
    other.join()
    cached_dataset(Numbers())
    assert not folder.exists()


def take(max_bytes: int, workers: int) -> tuple[int, int, dict[str, int]]:
    """Fill the cache in this process, read it in workers; return what they and the cache took."""
    before = memory_of_processes()
    cache = lo.CachedDataset(Counting(400, width=64 * 1024), max_bytes)  # 256 KB an item
    for index in range(400):
        cache[index]
    most = 0
    loader = DataLoader(cache, batch_size=None, num_workers=workers, shuffle=True)
    for place, _ in enumerate(loader):
        if place % 50 == 20:
            most = max(most, memory_of_processes())
    return most - before, size_of(cache), cache.statistics()


def memory_of_processes() -> int:
    """Bytes of this process and its children, what they share counted once."""
    process = psutil.Process()
    return sum(each.memory_full_info().pss for each in (process, *process.children()))


def size_of(cache) -> int:
    """Bytes of a cache in /dev/shm."""
    return sum(file.stat().st_size for file in cache._store.file.parent.glob("*"))


def test_memory_stays_within_the_bound_however_many_workers_read():
    (small, _, _), (large, held, statistics) = (take(bound * MB, 2) for bound in (1, 60))
    assert statistics["evictions"] > 100
    assert statistics["bytes"] <= 60 * MB
    assert 50 * MB < held <= 60 * MB + 64 * 1024
    # Copies on write would give each worker another 60 MB.
    assert large - small < 50 * MB


# --- versions -----------------------------------------------------------------------------------


def test_a_later_run_finds_the_items_of_the_same_dataset_only(tmp_path):
    first = cached_dataset(Counting(), "disk", tmp_path)
    for index in range(24):
        first[index]

    again = cached_dataset(Counting(), "disk", tmp_path)
    assert same(again[5], Counting()[5])
    assert again.statistics()["hits"] == 1

    other = cached_dataset(Counting(offset=1), "disk", tmp_path)
    assert same(other[5], Counting(offset=1)[5])
    assert other.statistics()["misses"] == 1


def test_a_key_takes_the_place_of_the_fingerprint(tmp_path):
    cached_dataset(Counting(), "disk", tmp_path, key="one")[0]
    for key, hits in (("one", 1), ("two", 0)):
        cache = cached_dataset(Counting(), "disk", tmp_path, key=key)
        cache[0]
        assert cache.statistics()["hits"] == hits


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["FromTorch", "FromNumpy", "FromPython", "FromItsOwn"])
def test_random_items_are_refused_unless_told(kind):
    dataset = getattr(datasets, kind)()
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    with pytest.raises(ValueError, match=r"is random: .* allow_random"):
        lo.CachedDataset(dataset, MB)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002
    cache = lo.CachedDataset(dataset, MB, allow_random=True)
    assert torch.equal(cache[3], cache[3])


def test_looking_at_items_leaves_no_file_open():
    dataset = Lazy()
    lo.CachedDataset(Subset(dataset, range(5)), MB)
    assert dataset.handle is None


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize("dataset", [Stream(), 3])
def test_what_has_no_index_is_refused(dataset):
    with pytest.raises(TypeError, match="map-style"):
        lo.CachedDataset(dataset, MB)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_bytes": 0}, "max_bytes"),
        ({"policy": "lfu"}, "policy"),
        ({"storage": "cloud"}, "storage"),
        ({"folder": "x"}, "folder"),
        ({"max_bytes": 2**60}, "free in /dev/shm"),
    ],
)
def test_arguments_out_of_range(settings, message):
    for make in (lo.CachedDataset, lambda _, **rest: lo.cached(abs, **rest)):
        with pytest.raises(ValueError, match=message):
            make(Numbers(), **{"max_bytes": MB, **settings})


def test_items_that_cannot_be_pickled_are_refused():
    with pytest.raises(TypeError, match="cannot be cached"):
        lo.CachedDataset([lambda: 1], MB, allow_random=True)[0]


# --- functions ----------------------------------------------------------------------------------


calls: list[tuple] = []


def distance(a, b, power=1):
    calls.append((a, b))
    return (a - b).abs().pow(power).sum()


def test_a_function_is_computed_once_for_equal_arguments():
    calls.clear()
    kept = lo.cached(distance, MB)
    a, b = torch.randn(5), torch.randn(5)
    assert kept.__name__ == "distance"
    for _ in range(2):
        assert kept(a.clone(), b) == distance(a, b)
        assert kept(a, b, power=2) == distance(a, b, 2)
    assert len(calls) == 2 + 4
    assert kept.statistics()["hits"] == 2


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=30))
def test_symmetric_pairs_are_computed_once(pairs):
    seen = []

    def length(a, b):
        seen.append(frozenset((a, b)))
        return abs(a - b)

    kept = lo.cached(length, MB, symmetric=True)
    assert [kept(a, b) for a, b in pairs] == [abs(a - b) for a, b in pairs]
    assert len(seen) == len(set(seen))


def test_unequal_types_and_orders_are_unequal_arguments():
    kept = lo.cached(lambda a, b=0: (type(a).__name__, a, b), MB)
    for arguments in [(1,), (1.0,), (True,), ("1",), (1, 2), (2, 1), (torch.tensor(1),)]:
        assert kept(*arguments)[0] == type(arguments[0]).__name__
    assert kept.statistics()["hits"] == 0
    with pytest.raises(TypeError, match="two positional"):
        lo.cached(distance, MB, symmetric=True)(1)
    with pytest.raises(TypeError, match="callable"):
        lo.cached(3, MB)


def test_an_error_is_not_kept():
    fails = iter([ValueError("no"), None])

    def fragile():
        if (error := next(fails)) is not None:
            raise error
        return 1

    kept = lo.cached(fragile, MB)
    with pytest.raises(ValueError, match="no"):
        kept()
    assert kept() == 1


def city_block(a, b):
    return (a - b).abs().sum()


def test_results_of_a_function_outlive_the_process_on_the_disk(tmp_path):
    for hits in (0, 1):
        kept = lo.cached(city_block, MB, storage="disk", folder=str(tmp_path))
        assert kept(torch.ones(2), torch.zeros(2)) == 2
        assert kept.statistics()["hits"] == hits
    assert list(Path(tmp_path).glob("*.sqlite"))


# --- ranks --------------------------------------------------------------------------------------


class AlikeAtTheEnds(Counting):
    """Has the same first, middle and last item whatever the offset."""

    def __getitem__(self, index: int) -> Any:
        at_the_ends = index in (0, self.length // 2, self.length - 1)
        return Counting(self.length, self.width, 0 if at_the_ends else self.offset)[index]


def read_a_part(bound: int, kind: str) -> tuple[int, int, Path]:
    """Read as a rank does; return what this process took, what the cache took, and its folder."""
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    before = psutil.Process().memory_full_info().uss
    offset = rank if kind in ("parts", "alike at the ends") else 0
    kind_of = AlikeAtTheEnds if kind == "alike at the ends" else Counting
    dataset = kind_of(400, offset=offset, width=64 * 1024)  # 256 KB an item
    if kind == "not to be pickled":
        dataset.lock = threading.Lock()
    cache = lo.CachedDataset(dataset, bound, allow_random=kind == "random", key="v1")
    for half in (rank, 1 - rank):  # each its own, and then the other's
        assert all(same(cache[index], dataset[index]) for index in range(half, 400, 2))
        torch.distributed.barrier()
    used = psutil.Process().memory_full_info().uss - before
    folder = cache._store.file.parent
    held = size_of(cache)
    assert cache.statistics()["bytes"] <= bound
    torch.distributed.barrier()
    del cache
    gc.collect()
    torch.distributed.barrier()
    assert not folder.exists(), "the last rank removes it"
    torch.distributed.destroy_process_group()
    return used, held, folder


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "caches"),
    [
        ("same", 1),
        ("parts", 2),
        ("alike at the ends", 2),
        ("not to be pickled", 2),
        ("random", 2),
    ],
)
def test_ranks_with_the_same_items_share_one_bound(kind, caches):
    """`max_bytes` is the machine's, and nobody gets the items of another's part."""
    ranks = launch(read_a_part, 60 * MB, kind)
    assert len({folder for _, _, folder in ranks}) == caches
    for used, held, _ in ranks:
        assert 50 * MB < held <= 60 * MB + 64 * 1024
        assert used < 30 * MB


def read_half(bound: int) -> dict[str, int]:
    rank, dataset = int(os.environ["RANK"]), Counting()
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    cache = lo.CachedDataset(dataset, bound)
    for half in (rank, 1 - rank):
        for index in range(half, 24, 2):
            cache[index]
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return cache.statistics()


@pytest.mark.distributed
def test_a_rank_finds_what_the_other_has_fetched():
    for statistics in launch(read_half, MB):
        assert (statistics["hits"], statistics["misses"]) == (12, 12)
        assert statistics["items"] == 24


SCRIPT = """
import os, subprocess, sys
import torch
import lightning_opt as lo
cache = lo.CachedDataset([torch.tensor(i) for i in range(8)], 2**20)
if "LOCAL_RANK" not in os.environ:  # as Lightning starts the other ranks: the same script, later
    cache[5]
    subprocess.run([sys.executable, __file__], env={**os.environ, "LOCAL_RANK": "1"}, check=True)
else:
    print(cache[5].item(), cache.statistics()["hits"])
"""


def test_ranks_that_the_first_one_starts_share_its_cache(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k not in (caching.RUN, "LOCAL_RANK")}
    command = [sys.executable, str(script)]
    environment["PYTHONPATH"] = str(Path(lo.__file__).parents[1])
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert run.stdout.split() == ["5", "1"]


def test_two_caches_of_one_process_share_nothing():
    first, second = cached_dataset(Numbers()), cached_dataset(Numbers())
    first[3]
    assert second.statistics()["items"] == 0
    second[3]
    assert second.statistics()["hits"] == 0
