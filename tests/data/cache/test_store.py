"""Store: killed writers, damaged files, forks, eviction, and one limit for all processes."""

import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_opt.data.cache.store import EMPTY_PAGES, PAGE_BYTES, Store

fork = multiprocessing.get_context("fork")


def content(name: str) -> bytes:
    """Return the data stored under a name: 200 KB, so that writing takes a while."""
    return random.Random(name).randbytes(200_000)


def write_forever(file: Path, max_bytes: int, seed: int) -> None:
    store, order = Store(file, max_bytes), random.Random(seed)
    while True:
        name = str(order.randrange(40))
        if (found := store.get(name)) is None:
            store.put(name, content(name))
        elif found != content(name):
            os._exit(3)


@pytest.mark.parametrize("rounds", [12])
def test_killed_writers_leave_no_corrupt_item(tmp_path, rounds):
    file, max_bytes = tmp_path / "a.sqlite", 20 * 204_800
    order, in_the_middle = random.Random(0), 0
    for seed in range(rounds):
        writers = [
            fork.Process(target=write_forever, args=(file, max_bytes, 2 * seed + i))
            for i in range(2)
        ]
        for writer in writers:
            writer.start()
        time.sleep(order.uniform(0.02, 0.08))
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
            assert writer.exitcode == -signal.SIGKILL  # not 3: it never read corrupt data
        journal = file.with_name(f"{file.name}-journal")
        in_the_middle += journal.exists() and journal.stat().st_size > 0
        store = Store(file, max_bytes)
        found = {str(i): store.get(str(i)) for i in range(40)}
        assert all(data in (None, content(name)) for name, data in found.items())
        assert file.stat().st_size <= max_bytes + EMPTY_PAGES * PAGE_BYTES
        with sqlite3.connect(file) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert in_the_middle > 0, "no writer was killed in the middle of writing"
    assert sum(data is not None for data in found.values()) > 5


def damage_an_item(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    whole[whole.index(content("a")[5000:5050])] ^= 1
    file.write_bytes(whole)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: 7 * PAGE_BYTES])


def overwrite(file: Path) -> None:
    file.write_bytes(random.Random(0).randbytes(20 * PAGE_BYTES))


def tear_the_index(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    whole[PAGE_BYTES : 3 * PAGE_BYTES] = bytes([255]) * 2 * PAGE_BYTES
    file.write_bytes(whole)


@pytest.mark.parametrize("damage", [damage_an_item, cut, overwrite, tear_the_index])
def test_damaged_item_is_a_miss_and_can_be_stored_again(damage, tmp_path):
    file = tmp_path / "a.sqlite"
    Store(file, 10**6).put("a", content("a"))
    damage(file)
    for _ in range(2):
        store = Store(file, 10**6)
        assert store.get("a") is None
        assert store.get("b") is None
    for _ in range(2):  # the first may only find the file unreadable
        store.put("a", content("a"))
    assert store.get("a") == content("a")


def fill(file: Path, max_bytes: int, start: int) -> None:
    store = Store(file, max_bytes)
    for number in range(start, start + 60):
        store.put(str(number), bytes(9000))


def test_several_writers_stay_within_one_limit(tmp_path):
    file, max_bytes = tmp_path / "a.sqlite", 20 * 12_288
    writers = [fork.Process(target=fill, args=(file, max_bytes, 40 * i)) for i in range(3)]
    for writer in writers:
        writer.start()
    store, most = Store(file, max_bytes), 0
    while any(writer.is_alive() for writer in writers):
        most = max(most, file.stat().st_size if file.exists() else 0)
    assert all(writer.exitcode == 0 for writer in writers)
    assert most <= max_bytes + EMPTY_PAGES * PAGE_BYTES
    assert 10 * 12_288 < store.statistics()["bytes"] <= max_bytes
    assert 10 < store.statistics()["items"] <= max_bytes // 9000


def test_lru_evicts_the_least_recently_used_and_keep_evicts_nothing(tmp_path):
    for policy, expected in (("lru", "013"), ("keep", "012")):
        store = Store(tmp_path / policy, 17 * PAGE_BYTES, policy)
        for name in "012":
            store.put(name, bytes(5 * PAGE_BYTES))
        assert store.get("0")
        assert store.get("1")
        store.put("3", bytes(5 * PAGE_BYTES))
        assert "".join(name for name in "0123" if store.get(name)) == expected


def test_keep_evicts_only_other_versions(tmp_path):
    file, room = tmp_path / "a.sqlite", 8 * 6 * PAGE_BYTES
    old = Store(file, room, version="old")
    for number in range(7):
        old.put(str(number), bytes(5 * PAGE_BYTES))
    new = Store(file, room, "keep", version="new")
    for number in range(20):
        new.put(str(number), bytes(5 * PAGE_BYTES))
    assert old.statistics()["items"] == 0
    kept = [number for number in range(20) if new.get(str(number))]
    assert kept == list(range(len(kept)))
    assert len(kept) >= 7
    assert old.get("3") is None  # another version has an item of this name


def counting(connect: Any, counted: list[int]) -> Any:
    def connected(*args: Any, **settings: Any) -> sqlite3.Connection:
        database = connect(*args, **settings)

        def count() -> None:
            counted[0] += 1

        database.set_progress_handler(count, 1)
        return database

    return connected


def test_cost_of_a_miss_does_not_depend_on_the_number_of_items(tmp_path, monkeypatch):
    """Counted in steps of SQLite's virtual machine."""

    def steps(items: int) -> int:
        store = Store(tmp_path / str(items), items * 300, "keep")
        for number in range(2 * items):  # full, and over
            store.put(f"{number:09}", bytes(200))
        assert store.statistics()["items"] > items / 2
        counted = [0]
        with monkeypatch.context() as patch:
            patch.setattr(sqlite3, "connect", counting(sqlite3.connect, counted))
            again = Store(store.file, store.max_bytes, "keep")
            for _ in range(2):  # the first put finds the cache full
                assert again.get("other") is None
                assert again.put("other", bytes(200)) == 0
        return counted[0]

    assert steps(2000) < 1.3 * steps(100)


def test_full_keep_cache_tries_to_insert_a_size_only_once(tmp_path, monkeypatch):
    store = Store(tmp_path / "a.sqlite", 8 * PAGE_BYTES, "keep")
    for name in "012":
        store.put(name, bytes(5 * PAGE_BYTES))
    inserts = []
    monkeypatch.setattr(Store, "_insert", lambda *arguments: inserts.append(arguments))
    assert store.put("3", bytes(5 * PAGE_BYTES)) == 0
    assert not inserts
    store.clear()
    store.put("3", bytes(5 * PAGE_BYTES))
    assert inserts


def test_store_works_on_both_sides_of_a_fork(tmp_path):
    store = Store(tmp_path / "a.sqlite", 10**6)
    store.put("a", content("a"))

    def child() -> None:
        assert store.get("a") == content("a")
        store.put("b", content("b"))

    process = fork.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert store.get("b") == content("b")


def test_item_above_the_limit_is_not_stored(tmp_path):
    store = Store(tmp_path / "a.sqlite", PAGE_BYTES)
    assert store.put("a", bytes(PAGE_BYTES + 1)) == 0
    assert store.get("a") is None
    assert store.statistics() == {"bytes": 0, "items": 0}


def test_removed_folder_causes_only_misses(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    store = Store(folder / "a.sqlite", 10**6)
    store.put("a", content("a"))
    shutil.rmtree(folder)
    assert store.put("b", content("b")) == 0
    assert store.get("b") is None
    assert store.statistics()["items"] <= 1


def test_unwritable_place_stores_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "a.sqlite", 10**6)
    assert store.put("a", b"a") == 0
    assert store.get("a") is None
    assert store.statistics() == {"bytes": 0, "items": 0}
