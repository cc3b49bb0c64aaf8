"""The file of a SQLite database: how it is opened, and how it is noticed that it was moved, deleted or replaced.

SQLite goes on with the file that it opened, wherever that is now, and other processes open what the path names: neither
would see what the other commits, and a deleted file is lost when its last connection closes. So each connection that
leaves its pool is compared with the path. Writes made before the change is noticed are lost.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from sqlalchemy import event
from sqlalchemy.exc import DisconnectionError

from resilient.core.base.errors import DatabaseUnreachable
from resilient.core.base.loggers import logger
from resilient.store.db.address import BUSY_TIMEOUT

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.engine import URL

log = logger("database")
Place = tuple[int, int]


def look_at(file: Path) -> Place | None:
    """The device and inode that a path names; None if there is certainly no such file.

    Raises `DatabaseUnreachable` if that cannot be known: in a folder that this user may not enter, on a lost disk.
    """
    try:
        place = os.stat(file)  # noqa: PTH116 - for each transaction; `Path.stat` takes longer
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DatabaseUnreachable(
            f"the database {file} cannot be looked at ({error.strerror}): see to the rights of its folder, and the"
            " file system"
        ) from None
    return place.st_dev, place.st_ino


def place_of(file: Path) -> Place | None:
    """`look_at`, for whom it is the same why there is nothing to see."""
    with contextlib.suppress(DatabaseUnreachable):
        return look_at(file)
    return None


class _Guard:
    """Compares the connections of one engine with their file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._latest: Place | None = None  # of the file that was opened last

    def before_connect(self, _dialect: Any, record: Any, *_: Any) -> None:
        """Refuse to connect if the file is gone: SQLite would make an empty one. Raises `DatabaseUnreachable`."""
        record.info["before"] = place = look_at(self._file)
        if self._latest is not None and place is None:
            raise self._gone()

    def connected(self, _connection: Any, record: Any) -> None:
        """Note the file that was opened; none if the path changed meanwhile, so that the connection is not used."""
        place, before = look_at(self._file), record.info.pop("before", None)
        if place is None or before not in (None, place):
            record.info["place"] = None
            return
        if self._latest not in (None, place):
            log.warning("the file %s was replaced while it was open: it is opened anew", self._file)
        record.info["place"] = self._latest = place

    def checked_out(self, _connection: Any, record: Any, _proxy: Any) -> None:
        """Compare a connection with the path.

        Raises `DisconnectionError` if the file was replaced, so that the pool opens another connection, and
        `DatabaseUnreachable` if it is gone.
        """
        place = look_at(self._file)
        if place is None:
            raise self._gone()
        if record.info.get("place") != place:
            raise DisconnectionError("its file was replaced")

    def _gone(self) -> DatabaseUnreachable:
        return DatabaseUnreachable(
            f"the database {self._file} is gone: it was moved or deleted while it was open (put it back, or end every"
            " program that has it open and begin with a new one)"
        )


def guard(engine: Engine, file: Path) -> None:
    """Check each connection of this engine against its file."""
    one = _Guard(file)
    event.listen(engine, "do_connect", one.before_connect)
    event.listen(engine, "connect", one.connected)
    event.listen(engine, "checkout", one.checked_out)


# -- opening it ------------------------------------------------------------------------------------------------------


def is_in_memory(url: URL) -> bool:
    """Whether the database is in memory."""
    names = (None, "", ":memory:", "file::memory:")
    return url.database in names or url.query.get("mode") == "memory"


def path_of(url: URL) -> Path:
    """The file of an address, also of one in SQLite's form (``file:...?uri=true``)."""
    name = str(url.database)
    is_address = name.startswith("file:") and "uri" in url.query  # without it SQLite takes it for a file's name
    return Path(unquote(urlsplit(name).path) if is_address else name).absolute()


def make_private(file: Path) -> None:
    """Make a new file its owner's alone (0600), and so the -wal and -shm that SQLite makes beside it."""
    with contextlib.suppress(OSError):  # it exists; or the connection tells what is wrong
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def use_wal(connection: Any) -> None:
    """Turn to WAL. Processes that open a new file at once refuse each other this change, without the busy timeout."""
    deadline = time.monotonic() + BUSY_TIMEOUT
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return
