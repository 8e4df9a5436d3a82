"""What is alive and what it holds, written before it is made. SQLite, WAL, full sync.

A row appears before its sandbox does and goes after it, so that whatever a
killed daemon leaves behind is named here. All calls are blocking and made from
one worker thread.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from forkd.errors import Corrupt, NoSlot

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Record:
    id: str
    tag: str
    purpose: str  # sandbox | standby | parent
    state: str
    boot_id: str
    created_at_unix: int
    accel: str
    pid: int | None = None
    guest_port: int | None = None
    memory_limit_mib: int | None = None
    ttl_secs: int | None = None


_COLUMNS = ", ".join(f.name for f in fields(Record))
_MARKS = ", ".join("?" for _ in fields(Record))


class Journal:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA:
                raise Corrupt(f"{path} was written by a newer forkd (format {version})")
            self._db.execute(f"CREATE TABLE IF NOT EXISTS sandboxes ({_COLUMNS}, PRIMARY KEY (id))")
            self._db.execute(f"PRAGMA user_version={SCHEMA}")
        except sqlite3.DatabaseError as e:
            raise Corrupt(
                f"the journal {path} cannot be read: {e}", hint="move it aside only if no sandbox is running"
            ) from e

    def put(self, records: Iterable[Record]) -> None:
        """Write all, in one durable step."""
        try:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany(
                    f"INSERT OR REPLACE INTO sandboxes ({_COLUMNS}) VALUES ({_MARKS})", map(astuple, records)
                )
        except sqlite3.OperationalError as e:
            raise NoSlot(f"the journal cannot be written: {e}", hint="free some disk space") from e

    def forget(self, ids: Iterable[str]) -> None:
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("DELETE FROM sandboxes WHERE id = ?", ((i,) for i in ids))

    def all(self) -> list[Record]:
        return [Record(*row) for row in self._db.execute(f"SELECT {_COLUMNS} FROM sandboxes ORDER BY id")]

    def close(self) -> None:
        self._db.close()
