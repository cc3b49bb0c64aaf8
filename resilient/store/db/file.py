"""The file of a SQLite database: how it is opened, and how it is noticed that it was moved, deleted or replaced.

SQLite goes on with the file that it opened, wherever that is now, and other processes open what the path names: neither
would see what the other commits, and a deleted file is lost when its last connection closes. So each connection that
leaves its pool is compared with the path. Writes made before the change is noticed are lost. The same is true of its
write-ahead log (-wal), and a log that is left beside another file spoils that one.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
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
_TRIES: Final = 10  # to empty a log that others write


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


def is_missing(file: Path) -> bool:
    """Whether there is certainly no such file: a folder that this user may not enter does not tell."""
    try:
        return look_at(file) is None
    except DatabaseUnreachable:
        return False


class _Guard:
    """Compares the connections of one engine with their file, and with its write-ahead log.

    ``record.info`` of a connection has the ``place`` of its file, the ``log`` beside it and, once there is one, the
    ``log_place``. A log belongs to the file that it was begun for: beside another one SQLite would write it into that.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._latest: Place | None = None  # of the file that was opened last
        self._log: Place | None = None  # of the log that was used last
        self._lost: Place | None = None  # of a log that was moved or deleted while it was in use

    def before_connect(self, _dialect: Any, record: Any, *_: Any) -> None:
        """Refuse to connect if the file is gone, or has no log or a strange one: SQLite would make one, or use it.

        Raises `DatabaseUnreachable`.
        """
        record.info["before"] = place = look_at(self._file)
        wal = record.info["log"] = Path(f"{os.path.realpath(self._file)}-wal")  # where SQLite has it, behind a link
        if self._latest is None:
            return
        if place is None:
            raise self._gone()
        log_place = look_at(wal)
        if self._lost not in (None, log_place) and place == self._latest:
            raise self._without_log()
        if log_place is not None and log_place == self._log and place != self._latest:
            raise self._beside_old_log(wal)

    def connected(self, _connection: Any, record: Any) -> None:
        """Note the file that was opened; none if the path changed meanwhile, so that the connection is not used."""
        place, before = look_at(self._file), record.info.pop("before", None)
        if place is None or before not in (None, place):
            record.info["place"] = None
            return
        if self._latest not in (None, place):
            log.warning("the file %s was replaced while it was open: it is opened anew", self._file)
        record.info["place"] = self._latest = place
        self._lost = None

    def checked_out(self, connection: Any, record: Any, _proxy: Any) -> None:
        """Compare a connection with the path.

        Raises `DisconnectionError` if the file was replaced, so that the pool opens another connection, and
        `DatabaseUnreachable` if it or its log is gone.
        """
        place, info = look_at(self._file), record.info
        if place is None:
            raise self._gone()
        before, log_place = info.get("log_place"), look_at(info["log"])
        if info.get("place") != place:
            if before is not None and before == log_place:
                _leave(connection, info)
            raise DisconnectionError("its file was replaced")
        if before != log_place:
            if before is not None:
                self._lost = before
                _write_log_back(connection)
                raise self._without_log()
            info["log_place"] = self._log = log_place

    def _gone(self) -> DatabaseUnreachable:
        return DatabaseUnreachable(
            f"the database {self._file} is gone: it was moved or deleted while it was open (put it back, or end every"
            " program that has it open and begin with a new one)"
        )

    def _without_log(self) -> DatabaseUnreachable:
        return DatabaseUnreachable(
            f"the write-ahead log (-wal) of the database {self._file} was moved or deleted while it was open: end every"
            " program that has it open (a worker by SIGTERM, twice if it waits) without killing it, so that what was"
            " committed is written to the file, and start them anew"
        )

    def _beside_old_log(self, wal: Path) -> DatabaseUnreachable:
        return DatabaseUnreachable(
            f"the database {self._file} was replaced while it was open, and beside it lies the write-ahead log of the"
            f" one before, which would spoil it: end every program that has it open, move {wal.name} and its -shm to"
            " the old file (or delete them), and start anew"
        )


def _write_log_back(connection: Any) -> bool:
    """Write all of the log into the file that the connection has open, and empty it; whether that was done."""
    with contextlib.suppress(sqlite3.Error):
        return bool(connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0)
    return False


def _leave(connection: Any, info: dict[str, Any]) -> None:
    """Take the log away from beside a file that replaced that of the connection, as SQLite does after its last use.

    Under the lock of the file that was replaced: another process that had it open has not begun a new log meanwhile.
    What is left is refused by `_Guard.before_connect`.
    """
    name = str(info["log"]).removesuffix("-wal")
    if look_at(Path(name)) == info["place"]:
        return  # a link leads elsewhere now, and the log is beside its file
    for _ in range(_TRIES):
        if not _write_log_back(connection):
            return
        with contextlib.suppress(sqlite3.Error, OSError):
            connection.execute("BEGIN IMMEDIATE")
            is_same = look_at(info["log"]) == info["log_place"]
            if is_same and info["log"].stat().st_size:  # another process has committed since
                connection.execute("ROLLBACK")
                continue
            for end in ("-wal", "-shm") if is_same else ():
                Path(name + end).unlink(missing_ok=True)
        return


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
