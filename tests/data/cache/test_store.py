"""Store: killed writers, forks, eviction, and one limit for all processes."""

import multiprocessing
import os
import pickle
import random
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lightning_opt.data.cache.store import PAGESIZE, Store, close
from lightning_opt.data.encoding import MISSING, decode, encode

fork = multiprocessing.get_context("fork")


def content(name: str) -> bytes:
    """Return the data stored under a name: 200 KB, so that writing takes a while."""
    return random.Random(name).randbytes(200_000)


def put(store: Store, name: str, item: Any) -> int:
    return store.put({name: encode(item)})


def get(store: Store, name: str) -> Any:
    found = store.get(name, decode)
    return None if found is MISSING else found


def file_bytes(folder: Path) -> int:
    return (folder / "data.mdb").stat().st_blocks * 512


def write_forever(folder: Path, max_bytes: int, seed: int, done: Any) -> None:
    store, order = Store(folder, max_bytes), random.Random(seed)
    while True:
        done.value += 1
        name = str(order.randrange(40))
        if (found := get(store, name)) is None:
            put(store, name, content(name))
        elif found != content(name):
            os._exit(3)


def test_killed_writers_leave_no_corrupt_item(tmp_path):
    max_bytes, order = 20 * 220_000, random.Random(0)
    for seed in range(8):
        done = [fork.RawValue("i", 0) for _ in range(2)]
        writers = [
            fork.Process(target=write_forever, args=(tmp_path, max_bytes, 2 * seed + i, done[i]))
            for i in range(2)
        ]
        for writer in writers:
            writer.start()
        enough = order.randrange(20, 60)
        while sum(one.value for one in done) < enough and all(one.is_alive() for one in writers):
            time.sleep(0.001)
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
            assert writer.exitcode == -signal.SIGKILL  # not 3: it never read corrupt data
        store = Store(tmp_path, max_bytes)
        found = {str(i): get(store, str(i)) for i in range(40)}
        assert all(data in (None, content(name)) for name, data in found.items())
        assert store.statistics()["bytes"] <= max_bytes
        assert file_bytes(tmp_path) <= 1.125 * max_bytes + (5 << 20)
    assert sum(data is not None for data in found.values()) > 5


def test_file_that_is_no_cache_raises(tmp_path):
    put(Store(tmp_path, 10**6), "a", content("a"))
    close(tmp_path)
    (tmp_path / "data.mdb").write_bytes(random.Random(0).randbytes(20 * PAGESIZE))
    with pytest.raises(ValueError, match="delete this folder"):
        Store(tmp_path, 10**6)


ITEM = 2 * PAGESIZE + 800
"""Bytes of an item that needs three pages with its name."""


def fill(folder: Path, max_bytes: int, start: int) -> None:
    store = Store(folder, max_bytes)
    for number in range(start, start + 60):
        put(store, str(number), bytes(ITEM))


def test_several_writers_stay_within_one_limit(tmp_path):
    max_bytes = 40 * 3 * PAGESIZE
    writers = [fork.Process(target=fill, args=(tmp_path, max_bytes, 40 * i)) for i in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    found = Store(tmp_path, max_bytes).statistics()
    assert max_bytes / 2 < found["bytes"] <= max_bytes
    assert 20 < found["items"] <= max_bytes // ITEM


def test_lru_evicts_the_least_recently_used_and_keep_evicts_nothing(tmp_path):
    for policy, expected in (("lru", "034"), ("keep", "012")):
        (tmp_path / policy).mkdir()
        # As in a worker.
        store = pickle.loads(pickle.dumps(Store(tmp_path / policy, 24 * PAGESIZE, policy)))
        for name in "012":
            put(store, name, bytes(5 * PAGESIZE))
        assert all(get(store, name) for name in "010")
        for name in "34":
            put(store, name, bytes(5 * PAGESIZE))
        put(store, "larger than the limit", bytes(24 * PAGESIZE))
        assert "".join(name for name in "01234" if get(store, name)) == expected


def test_removed_folder_loses_only_its_items(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    put(Store(folder, 10**6), "a", content("a"))
    shutil.rmtree(folder)
    folder.mkdir()
    store = Store(folder, 10**6)
    assert get(store, "a") is None
    put(store, "b", content("b"))
    assert get(store, "b") == content("b")


def test_network_file_system_raises(tmp_path, monkeypatch):
    mount = SimpleNamespace(mountpoint=str(tmp_path), fstype="nfs4")
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: [mount])
    with pytest.raises(ValueError, match="network file system"):
        Store(tmp_path, 10**6)
