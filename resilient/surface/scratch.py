"""Scratch databases: a place of its own for the demo and for each bench, gone afterwards.

A SQLite address gives a file in a new directory beside the one named (the same disk, so that durable
commits cost what they cost there); a PostgreSQL address gives a new schema in that database. Nothing that
was there before is touched.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy.engine import make_url

from resilient.core.base.errors import DatabaseUnreachable, SetupError
from resilient.store.db.address import checked, shown, without_threshold

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Scratch:
    """An empty place: ``url`` and ``schema`` as `resilient.Resilient` takes them."""

    url: str
    schema: str | None

    @property
    def is_sqlite(self) -> bool:
        """Whether this is a SQLite file."""
        return self.schema is None

    @property
    def path(self) -> Path:
        """The SQLite file."""
        return Path(make_url(self.url).database or "")

    @property
    def conninfo(self) -> str:
        """The address as libpq takes it."""
        return _conninfo(self.url)


@contextmanager
def scratch(url: str | None, purpose: str) -> Iterator[Scratch]:
    """An empty place in the database at ``url`` (None: a SQLite file in the temporary directory), deleted at the end.

    Raises `SetupError` for what is no address, `MissingExtra` without psycopg, `DatabaseUnreachable` if
    nobody answers.
    """
    place = _file if checked(url or "sqlite://").get_backend_name() == "sqlite" else _schema
    with _swept_when_terminated(), place(url or "sqlite://", purpose) as scratch_place:
        yield scratch_place


@contextmanager
def _swept_when_terminated() -> Iterator[None]:
    """SIGTERM ends it like Ctrl-C: by itself it would leave the place behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _file(url: str, purpose: str) -> Iterator[Scratch]:
    named = make_url(url).database
    beside = Path(named).resolve().parent if named and named != ":memory:" else None
    if beside is not None and not beside.is_dir():
        raise SetupError(f"the directory {beside} does not exist: create it, or name a file in another one")
    folder = Path(tempfile.mkdtemp(prefix=f"resilient-{purpose}-", dir=beside))
    try:
        yield Scratch(f"sqlite:///{folder / 'resilient.db'}", None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _schema(url: str, purpose: str) -> Iterator[Scratch]:
    name = f"resilient_{purpose}_{secrets.token_hex(4)}"
    with _connection(url) as c:
        c.execute(f'CREATE SCHEMA "{name}"')
    try:
        yield Scratch(url, name)
    finally:
        with _connection(url) as c:
            c.execute("SET client_min_messages = warning")
            c.execute(f'DROP SCHEMA "{name}" CASCADE')


@contextmanager
def _connection(url: str) -> Iterator[Any]:
    """An autocommit connection, closed at the end."""
    import psycopg  # noqa: PLC0415 - the extra may be missing, and then nobody comes here

    try:
        c = psycopg.connect(_conninfo(url), autocommit=True, connect_timeout=10)
    except psycopg.OperationalError as error:
        where = shown(make_url(url))
        raise DatabaseUnreachable(
            f"the database {where} does not answer ({type(error).__name__}): is it running, at this address?",
        ) from None
    with c:
        yield c


def _conninfo(url: str) -> str:
    address, _ = without_threshold(checked(url))
    return address.set(drivername="postgresql").render_as_string(hide_password=False)
