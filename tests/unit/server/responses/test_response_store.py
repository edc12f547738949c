"""Records in SQLite: owners, conversations, limits, and disks that fail."""

from __future__ import annotations

import sqlite3
import time

import pytest

from octavo.errors import ConfigError
from octavo.server.errors import ApiError
from octavo.server.responses.store import Record, ResponseStore

pytestmark = pytest.mark.anyio


def record(id, *, owner="a", previous=None, size=100, finished=True):
    return Record(
        id=id, owner=owner, previous=previous, finished=finished, response=b"r" * size, input=b"i", events=None
    )


@pytest.fixture
def open_store(tmp_path):
    stores = []

    def make(path="responses.db", *, max_bytes=10_000, max_age=1000.0):
        stores.append(ResponseStore(path and str(tmp_path / path), max_bytes=max_bytes, max_age=max_age))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


async def test_a_file_survives_a_restart_and_memory_does_not(open_store):
    for path, survives in (("responses.db", True), (None, False)):
        store = open_store(path)
        await store.put(record("r1", finished=False))
        assert await store.get("a", "r1") == record("r1", finished=False)
        store.close()
        found = await open_store(path).get("a", "r1")
        assert (found == record("r1", finished=False)) is survives


async def test_a_record_is_seen_by_its_owner_only(open_store):
    store = open_store(None)
    await store.put(record("r1"))
    assert await store.get("b", "r1") is None
    assert await store.conversation("b", "r1") == []
    assert not await store.delete("b", "r1")
    assert await store.delete("a", "r1")
    assert not await store.delete("a", "r1")


async def test_a_conversation_is_told_from_its_beginning(open_store):
    store = open_store(None)
    for id, previous in (("r1", None), ("r2", "r1"), ("r3", "r2"), ("x", "r1")):
        await store.put(record(id, previous=previous))
    assert [found.id for found in await store.conversation("a", "r3")] == ["r1", "r2", "r3"]
    await store.delete("a", "r1")
    assert [found.id for found in await store.conversation("a", "r3")] == ["r2", "r3"]


async def test_the_least_recently_used_records_make_room(open_store):
    each = record("r").size
    store = open_store(max_bytes=3 * each)
    for id in ("r1", "r2", "r3"):
        await store.put(record(id))
        time.sleep(0.002)
    await store.get("a", "r1")
    await store.put(record("r4"))
    left = [id for id in ("r1", "r2", "r3", "r4") if await store.get("a", id) is not None]
    assert left == ["r1", "r3", "r4"]
    for _ in range(10):  # writing one again takes its own place
        await store.put(record("r4"))
    assert await store.get("a", "r3") is not None
    with pytest.raises(ApiError, match="--response-store-max-bytes"):
        await store.put(record("r5", size=4 * each))


async def test_the_size_is_known_again_after_a_restart(open_store):
    each = record("r").size
    store = open_store(max_bytes=2 * each)
    await store.put(record("r1"))
    await store.put(record("r2"))
    store.close()
    store = open_store(max_bytes=2 * each)
    await store.put(record("r3"))
    assert [await store.get("a", id) is not None for id in ("r1", "r2", "r3")] == [False, True, True]


async def test_what_is_not_used_grows_too_old(open_store):
    store = open_store(None, max_age=0.05)
    await store.put(record("r1"))
    assert await store.get("a", "r1") is not None
    time.sleep(0.06)
    assert await store.get("a", "r1") is None
    await store.put(record("r2"))
    assert store._connection.execute("SELECT count(*) FROM responses").fetchone() == (1,)


async def test_a_full_disk_fails_a_write_and_nothing_else(open_store):
    store = open_store(max_bytes=10_000_000)
    await store.put(record("r1"))
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(ApiError, match="full") as caught:
        await store.put(record("r2", size=1_000_000))
    assert (caught.value.status, caught.value.body.error.code) == (500, "response_store_failed")
    assert await store.get("a", "r1") == record("r1")
    store._connection.execute("PRAGMA max_page_count = 1000000")
    await store.put(record("r2", size=1_000_000))
    assert await store.get("a", "r2") is not None


async def test_reading_goes_on_when_nothing_can_be_written(open_store, caplog):
    store = open_store()
    await store.put(record("r1"))
    store._connection.execute("PRAGMA query_only = ON")
    assert await store.get("a", "r1") == record("r1")
    assert "cannot be written" in caplog.text
    with pytest.raises(ApiError, match="store=false"):
        await store.put(record("r2"))


async def test_a_damaged_page_is_an_error_of_the_request(open_store, tmp_path):
    store = open_store()
    for number in range(200):
        await store.put(record(f"r{number}", size=3))
    root = store._connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'responses'").fetchone()[0]
    store.close()
    with (tmp_path / "responses.db").open("r+b") as file:
        file.seek((root - 1) * 4096)
        file.write(b"\xff" * 4096)
    with pytest.raises((ConfigError, ApiError), match=r"responses\.db|response store failed"):
        await open_store().get("a", "r1")


def test_a_file_that_cannot_be_used_is_refused_at_start(open_store, tmp_path):
    (tmp_path / "text.db").write_text("no database at all, but long enough to be looked at" * 20)
    with pytest.raises(ConfigError, match=r"--response-store .*text.db: file is not a database"):
        open_store("text.db")
    with pytest.raises(ConfigError, match="--response-store"):
        open_store("no/such/folder.db")
    with sqlite3.connect(tmp_path / "newer.db") as newer:
        newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(ConfigError, match="version is 99"):
        open_store("newer.db")


def test_two_servers_cannot_share_a_file(open_store):
    first = open_store()
    with pytest.raises(ConfigError, match="another server"):
        open_store()
    first.close()
    open_store()
