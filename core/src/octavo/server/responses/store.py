"""Stored responses: an SQLite file, or memory of this process, with limits of size and age.

A record is bytes with an owner; what they hold is not looked at. All work is done on one thread of the store's own, so
that a slow disk holds up no stream. One server has a file to itself: it is locked while that runs.

The least recently used records go first. A record counts as used when it is read or written, also as an earlier part of
a conversation that goes on.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from octavo.errors import ConfigError
from octavo.server.errors import store_failed

log = logging.getLogger("octavo.server")

VERSION = 1
"""Of the tables, kept in the file as `user_version`."""

TABLES = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, used REAL NOT NULL, size INTEGER NOT NULL,
    finished INTEGER NOT NULL, response BLOB NOT NULL, input BLOB NOT NULL, events BLOB
) WITHOUT ROWID;
CREATE INDEX responses_used ON responses (used);
"""
COLUMNS = "id, owner, previous, finished, response, input, events"
SETTINGS = ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON")
"""secure_delete: a response that is deleted leaves nothing to read in the file."""

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One response. previous: id of the one it goes on from. finished: False while a background run may still write.

    response, input, events: as the API gives them out, encoded.
    """

    id: str
    owner: str
    previous: str | None
    finished: bool
    response: bytes
    input: bytes
    events: bytes | None = None

    @property
    def size(self) -> int:
        return len(self.response) + len(self.input) + len(self.events or b"") + 200  # the rest of the row, about


class ResponseStore:
    """Records by owner and id. path: None keeps them in memory. max_age: seconds after the last use.

    Raises ConfigError for a file that cannot be used. Methods raise ApiError (500) when the disk is full or the file is
    damaged; the store goes on, and works again when its disk does.
    """

    def __init__(self, path: str | None, *, max_bytes: int, max_age: float) -> None:
        self.max_bytes = max_bytes
        self.max_age = max_age
        self._connection, self._size = open_database(path)
        # No thread is started before the first use.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="response-store")

    async def put(self, record: Record) -> None:
        """Write a record, in the place of one with the same id. Makes room by dropping others."""
        await self._run(lambda: self._put(record))

    async def get(self, owner: str, id: str) -> Record | None:
        """The owner's record, or None."""
        return await self._run(lambda: self._get(owner, id))

    async def conversation(self, owner: str, id: str) -> list[Record]:
        """The record and all that it goes on from, oldest first. Ends short of one that is gone."""
        return await self._run(lambda: self._conversation(owner, id))

    async def delete(self, owner: str, id: str) -> bool:
        """Whether there was such a record."""
        return await self._run(lambda: self._delete(owner, id))

    def close(self) -> None:
        """Write out everything and free the file."""
        self._thread.shutdown()
        self._connection.close()

    async def _run(self, work: Callable[[], Result]) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise store_failed(str(error)) from error

    def _put(self, record: Record) -> None:
        if record.size > self.max_bytes:
            raise store_failed(
                f"the response has {record.size} bytes, the store takes {self.max_bytes} (--response-store-max-bytes)"
            )
        values = (
            record.id,
            record.owner,
            record.previous,
            record.finished,
            record.response,
            record.input,
            record.events,
            time.time(),
            record.size,
        )
        with self._connection:
            freed = self._drop("id = ?", record.id) + self._drop("used < ?", time.time() - self.max_age)
            while self._size - freed + record.size > self.max_bytes:
                freed += self._drop("id = (SELECT id FROM responses ORDER BY used LIMIT 1)")
            self._connection.execute(
                f"INSERT INTO responses ({COLUMNS}, used, size) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values
            )
        self._size += record.size - freed

    def _drop(self, where: str, *values: str | float) -> int:
        """Delete records and say how many bytes they had."""
        (size,) = self._connection.execute(f"SELECT total(size) FROM responses WHERE {where}", values).fetchone()
        self._connection.execute(f"DELETE FROM responses WHERE {where}", values)
        return int(size)

    def _get(self, owner: str, id: str) -> Record | None:
        now = time.time()
        row = self._connection.execute(
            f"SELECT {COLUMNS} FROM responses WHERE id = ? AND owner = ? AND used >= ?", (id, owner, now - self.max_age)
        ).fetchone()
        if row is None:
            return None
        try:
            with self._connection:
                self._connection.execute("UPDATE responses SET used = ? WHERE id = ?", (now, id))
        except sqlite3.OperationalError as error:  # reading must go on when the disk is full
            log.warning("the response store cannot be written: %s", error)
        id, owner, previous, finished, response, input, events = row
        return Record(
            id=id,
            owner=owner,
            previous=previous,
            finished=bool(finished),
            response=response,
            input=input,
            events=events,
        )

    def _conversation(self, owner: str, id: str) -> list[Record]:
        records: list[Record] = []
        next_id: str | None = id
        while next_id is not None and (record := self._get(owner, next_id)) is not None:
            records.append(record)
            next_id = record.previous
        return records[::-1]

    def _delete(self, owner: str, id: str) -> bool:
        with self._connection:
            freed = self._drop("id = ? AND owner = ?", id, owner)
        self._size -= freed
        return freed > 0


def open_database(path: str | None) -> tuple[sqlite3.Connection, int]:
    """A connection to the file, which is made if it is missing, and the size of its records. Raises ConfigError naming
    the flag."""
    connection = None
    try:
        connection = sqlite3.connect(path or ":memory:", timeout=1.0, check_same_thread=False)
        for setting in SETTINGS:
            connection.execute(f"PRAGMA {setting}")
        connection.execute("BEGIN EXCLUSIVE")  # takes the lock for good
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            for statement in filter(str.strip, TABLES.split(";")):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {VERSION}")
        elif version != VERSION:
            raise ConfigError(f"--response-store {path}: its version is {version}, this server reads {VERSION}")
        connection.commit()
        (size,) = connection.execute("SELECT total(size) FROM responses").fetchone()
    except (sqlite3.Error, ConfigError) as error:
        if connection is not None:
            connection.close()
        if isinstance(error, ConfigError):
            raise
        hint = "is another server using it?" if "locked" in str(error) else "choose another file, or move this away"
        raise ConfigError(f"--response-store {path}: {error}; {hint}") from None
    return connection, int(size)
