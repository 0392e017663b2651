"""FileStore: processes killed in the middle of writing, damaged files, and a bound for all."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from lightning_opt.data.cache.cached_dataset import file_store
from lightning_opt.data.cache.file_store import BLOCK, HEADER, FileStore

fork = multiprocessing.get_context("fork")


def content(name: str) -> bytes:
    """Return what belongs under a name: 200 KB, so that writing takes a while."""
    return random.Random(name).randbytes(200_000)


def write_for_ever(folder: Path, max_bytes: int, seed: int) -> None:
    store, order = FileStore(folder, max_bytes), random.Random(seed)
    while True:
        name = str(order.randrange(40))
        if (found := store.get(name)) is None:
            store.put(name, content(name))
        elif found != content(name):
            os._exit(3)


def used(folder: Path) -> int:
    return sum(-(-file.stat().st_size // BLOCK) * BLOCK for file in folder.glob("*.item"))


def test_writers_killed_fifty_times_leave_no_corrupt_item(tmp_path):
    max_bytes = 20 * 204_800
    order, expected = random.Random(0), {str(i): content(str(i)) for i in range(40)}
    in_the_middle = 0
    for seed in range(25):
        writers = [
            fork.Process(target=write_for_ever, args=(tmp_path, max_bytes, 2 * seed + i))
            for i in range(2)
        ]
        for writer in writers:
            writer.start()
        time.sleep(order.uniform(0.01, 0.06))
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
            assert writer.exitcode == -signal.SIGKILL  # and not 3: it was never served rubbish
        in_the_middle += len(list(tmp_path.glob("*.part")))
        assert used(tmp_path) <= max_bytes
        store = FileStore(tmp_path, max_bytes)
        assert not list(tmp_path.glob("*.part"))  # of the dead
        assert store.used == used(tmp_path)
        for name, data in expected.items():
            assert store.get(name) in (None, data)
    assert in_the_middle > 5, "nobody was killed in the middle of writing"
    assert sum(store.get(name) is not None for name in expected) > 5


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-1],
        lambda whole: whole + b"x",
        lambda whole: whole[: HEADER.size],
        lambda whole: whole[:3],
        lambda whole: b"",
        lambda whole: bytes(len(whole)),
        lambda whole: whole[:100] + bytes([whole[100] ^ 1]) + whole[101:],
        lambda whole: b"other" + whole[5:],
    ],
)
def test_a_damaged_file_is_a_miss_and_is_removed(damage, tmp_path):
    store = FileStore(tmp_path, 10**6)
    store.put("a", content("a"))
    (file,) = tmp_path.glob("*.item")
    file.write_bytes(damage(file.read_bytes()))
    assert store.get("a") is None
    assert not file.exists()
    store.put("a", content("a"))
    assert store.get("a") == content("a")


def fill(folder: Path, max_bytes: int, start: int) -> None:
    store = FileStore(folder, max_bytes, durable=False)
    for number in range(start, start + 60):
        store.put(str(number), bytes(9000))


def test_several_writers_stay_within_one_bound(tmp_path):
    max_bytes = 20 * 12_288
    writers = [fork.Process(target=fill, args=(tmp_path, max_bytes, 40 * i)) for i in range(3)]
    for writer in writers:
        writer.start()
    store, most = FileStore(tmp_path, max_bytes), 0
    while any(writer.is_alive() for writer in writers):
        with store._lock():  # nothing is given up or set aside meanwhile
            most = max(most, used(tmp_path))
    assert all(writer.exitcode == 0 for writer in writers)
    assert 10 * 12_288 < most <= max_bytes
    assert 10 < len(store) <= 20


def test_space_of_a_writer_that_lives_counts(tmp_path):
    """What is set aside and not yet written is taken, also for who counts anew."""
    (tmp_path / f"x.{os.getpid()}.part").write_bytes(bytes(50_000))
    store = FileStore(tmp_path, 60_000)
    assert store.used == 53_248
    assert store.put("a", bytes(20_000)) == 0
    assert store.get("a") is None


def test_a_part_of_long_ago_is_rubbish(tmp_path):
    part = tmp_path / f"x.{os.getpid()}.part"
    part.write_bytes(bytes(50_000))
    os.utime(part, (0, 0))
    assert FileStore(tmp_path, 60_000).used == 0


def test_a_torn_total_is_counted_anew(tmp_path):
    store = FileStore(tmp_path, 10**6)
    store.put("a", bytes(100))
    (tmp_path / "total").write_text("")
    assert store.used == BLOCK


def test_too_large_an_item_is_not_stored(tmp_path):
    store = FileStore(tmp_path, BLOCK)
    assert store.put("a", bytes(BLOCK)) == 0
    assert store.get("a") is None
    assert store.used == 0


def test_a_full_disk_stores_nothing_and_breaks_nothing(tmp_path, monkeypatch):
    store = FileStore(tmp_path, 10**6)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(file_store.os, "fsync", full)
        store.put("a", bytes(100))
    assert store.get("a") is None
    assert store.used == 0
    assert not list(tmp_path.glob("*.part"))


def test_items_reach_the_disk_before_their_name_does(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr(file_store.os, "fsync", lambda descriptor: events.append("flushed"))
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda *args: events.append("named") or replace(*args))
    FileStore(tmp_path, 10**6).put("a", bytes(100))
    FileStore(tmp_path, 10**6, durable=False).put("b", bytes(100))
    assert events == ["flushed", "named", "named"]
