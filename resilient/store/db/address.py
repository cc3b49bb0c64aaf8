"""Database addresses: what people may write, and the message when nothing answers there.

A message never repeats the address as it was written: it may hold a password.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from resilient.core.base.errors import MissingExtra, SetupError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

BUSY_TIMEOUT: Final = 30.0  # seconds a SQLite writer waits for another process
_DRIVERS: Final = {"sqlite": ("pysqlite", "aiosqlite"), "postgresql": ("psycopg",)}
_TCP: Final = {  # seconds, and milliseconds; libpq's names (PostgreSQL's documentation, 34.1.2)
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
_HOST_AND_PORT: Final = re.compile(r"([^:/]+):(\d+)")  # an IPv6 address or a socket's directory has no port here
_PARAMETERS: Final = re.compile(r"\?(?=[\w.-]+=)")
_UNESCAPED: Final = (
    "the database address has an @ behind the one that ends user and password: write %40 for each @ that belongs to the"
    " password (and %2F for /, %3A for :, %3F for ?)"
)
_MIXED: Final = (
    "several hosts are written in one of two forms, not in both: ?host=a,b&port=5432,5433 (PostgreSQL's) or"
    " ?host=a:5432&host=b:5433 (SQLAlchemy's)"
)
_KNOWS_USER_TIMEOUT: Final = 120_000  # libpq's first version with tcp_user_timeout
_EXAMPLES: Final = "sqlite:///app.db or postgresql://user:password@host/name"
_SECRETS: Final = ("password", "secret")  # in the name of a parameter: libpq takes passwords there too
_OF_THE_DISK: Final = ("disk I/O error", "unable to open", "readonly database")  # "disk is full" says it itself
_LITTLE: Final = 64 * 2**20  # bytes; SQLite needs some for its log and its index of that
_HINTS: Final = {
    "resolve host": " (is the host's name right?)",
    "not a database": " (correct the address)",
    "Connection refused": " (is the server running, and is the port right?)",
    "No such file or directory": " (is the server running?)",
    "does not exist": " (create it, or correct the address)",
    "password": " (correct the user or the password)",
    "too many clients": " (run fewer workers and programs, or raise max_connections)",
    "too many connections": " (run fewer workers and programs, or raise the limit)",
    "remaining connection slots": " (run fewer workers and programs, or raise max_connections)",
    "read-only transaction": " (this is a standby, or a server that was set read-only: use the primary's address)",
    "session is read-only": " (this is a standby, or a server that was set read-only: use the primary's address)",
    "not enough space": " (make room)",
    "No space left": " (make room)",
    "disk is full": " (make room)",
    "unable to open": " (does its directory exist, and may this user write to it?)",
    "statement timeout": " (raise statement_timeout of this user: ALTER ROLE ... SET statement_timeout)",
    "is locked": f" (another process has been writing for {BUSY_TIMEOUT:.0f} s)",
}


def checked(target: str | URL) -> URL:
    """The address, with the path of a SQLite file made absolute.

    Raises `SetupError` (or its `MissingExtra`) for one that can never work.
    """
    try:
        url = make_url(target)
        is_readable = b"\0" not in str(target).encode()  # half a character has no bytes
    except (ArgumentError, ValueError):
        is_readable = False
    if not is_readable:
        raise SetupError(f"that is not a database address: write {_EXAMPLES}")
    if url.drivername == "postgres":
        url = url.set(drivername="postgresql")
    _known_driver(url.get_backend_name(), url.drivername.partition("+")[2])
    if url.get_backend_name() != "sqlite" and _splits_a_password(target, url):
        raise SetupError(_UNESCAPED)
    if url.get_backend_name() == "sqlite":
        plain = url.database and url.database != ":memory:" and not url.database.startswith("file:")
        name = str(Path(url.database or "").absolute()) if plain else url.database
        return url.set(drivername="sqlite", database=name)
    return _with_hosts(url)


def _splits_a_password(target: str | URL, url: URL) -> bool:
    """Whether an ``@`` stands behind the one that ends user and password: it is likely the password's own.

    Then the rest of the password is taken for a host or a name, and would be shown.
    """
    behind = f"{url.host or ''}/{url.database or ''}"
    if isinstance(target, str):
        behind += _PARAMETERS.split(_behind_user(target.partition("://")[2]))[0]
    return "@" in behind


def _behind_user(place: str) -> str:
    """What stands behind the ``@`` that ends user and password, as SQLAlchemy reads it: a user may hold one, too."""
    end = next((i for i, sign in enumerate(place) if sign in ":/"), len(place))
    at = place.find("@", end) if place[end : end + 1] == ":" else -1
    at = place.rfind("@", 0, end) if at < 0 else at
    return "" if at < 0 else place[at + 1 :]


def _with_hosts(url: URL) -> URL:
    """Several hosts in libpq's form (``host=a,b&port=1,2``), which everybody reads; SQLAlchemy's is rewritten.

    Raises `SetupError` for a mixture of both.
    """
    query_host, ports = url.query.get("host"), url.query.get("port")
    several = isinstance(query_host, tuple)
    hosts = list(query_host) if isinstance(query_host, tuple) else (query_host or "").split(",")
    split = [_HOST_AND_PORT.fullmatch(host) for host in hosts]
    if not several and not (len(hosts) > 1 and any(split)):
        if isinstance(ports, tuple):
            raise SetupError(_MIXED)
        return url
    if ports is not None or not several:
        raise SetupError(_MIXED)
    query = {"host": ",".join(one[1] if one else host for one, host in zip(split, hosts, strict=True))}
    if any(split):
        query["port"] = ",".join(one[2] if one else "5432" for one in split)
    return url.difference_update_query(["host"]).update_query_dict(query)


def without_threshold(url: URL) -> tuple[URL, dict[str, Any]]:
    """Take ``?prepare_threshold=none`` (or a number) out of the address: psycopg wants a number or None, no text.

    A PgBouncer in transaction mode before 1.21 loses prepared statements; ``none`` prepares none.
    """
    value = url.query.get("prepare_threshold")
    if value is None:
        return url, {}
    if value != "none" and not (isinstance(value, str) and value.isascii() and value.isdecimal()):
        raise SetupError("prepare_threshold in the database address must be a number or 'none'")
    threshold = None if value == "none" else int(value)
    return url.difference_update_query(["prepare_threshold"]), {"prepare_threshold": threshold}


def for_listening(target: str | URL) -> URL:
    """The address for LISTEN and NOTIFY, written like any other. Raises `SetupError`."""
    url, _ = without_threshold(checked(target))
    if url.get_backend_name() != "postgresql":
        raise SetupError(f"listen_url is an address of the PostgreSQL server itself, not of {url.get_backend_name()}")
    return url.set(drivername="postgresql+psycopg")


def shown(url: URL) -> str:
    """An address for people: without its passwords."""
    hidden = {name: "..." for name in url.query if _is_secret(name)}
    return url.update_query_dict(hidden).render_as_string(hide_password=True)


def _is_secret(name: str) -> bool:
    return any(word in name.lower() for word in _SECRETS)


def connect_args(url: URL) -> dict[str, Any]:
    """Arguments of our connections beside the address, unless that or libpq's environment has them.

    The encoding is always UTF-8: without it the driver reads texts of an SQL_ASCII database as bytes. The others bound
    how long a host may be gone unnoticed: 11 s on an idle connection, 10 s on one that waits, 5 s on a new one.
    """
    arguments: dict[str, Any] = {"client_encoding": "utf8"} | _TCP
    if _libpq_version() < _KNOWS_USER_TIMEOUT:
        del arguments["tcp_user_timeout"]
    if "PGCONNECT_TIMEOUT" in os.environ:
        del arguments["connect_timeout"]
    return {name: value for name, value in arguments.items() if name not in url.query}


def _libpq_version() -> int:
    try:
        from psycopg import pq  # noqa: PLC0415 - the extra may be missing
    except ImportError:
        return 0
    return pq.version()


def of_engine(engine: Engine | AsyncEngine) -> URL:
    """The address of an engine that was handed over. Raises `SetupError` for a driver that cannot serve."""
    _known_driver(engine.url.get_backend_name(), engine.dialect.driver)
    return engine.url


def _known_driver(backend: str, driver: str) -> None:
    if backend not in _DRIVERS:
        raise SetupError(f"{backend!r} databases are not supported: use {_EXAMPLES}")
    if driver not in ("", *_DRIVERS[backend]):
        raise SetupError(f"driver {driver!r} is not supported: use {_DRIVERS[backend][0]!r} ({backend}://...)")
    if backend == "postgresql":
        try:
            import psycopg  # noqa: F401, PLC0415 - the extra may be missing
        except ImportError:
            raise MissingExtra("PostgreSQL needs psycopg: pip install 'resilient-engine[postgres]'") from None


def reason(error: DBAPIError, url: URL) -> str:
    """The driver's message in one line, without the password, and what to do about it."""
    lines = str(error.orig).strip().splitlines() or [type(error.orig).__name__]
    message = lines[0].removeprefix("connection failed: ")
    secrets = [str(url.password or ""), *(str(value) for name, value in url.query.items() if _is_secret(name))]
    for secret in filter(None, secrets):  # where it stands as a word: a password "a" is no reason to mask each letter
        message = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "***", message)
    hint = next((hint for sign, hint in _HINTS.items() if sign in message), "")
    if url.get_backend_name() == "sqlite" and any(sign in message for sign in _OF_THE_DISK):
        return message + (_place(url.database or "") or hint)
    return message + hint


def _place(name: str) -> str:
    """What may be wrong with the place of a SQLite file: SQLite's own messages tell no full disk from a broken one."""
    path = Path(name.removeprefix("file:").partition("?")[0]).absolute()
    folder = path.parent
    try:
        if path.is_dir():  # as container runtimes make one where the file to be mounted does not exist
            return " (it is a folder: correct the address, or the mount)"
        free = shutil.disk_usage(folder).free
        is_read_only = os.name == "posix" and bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError as error:
        return f" (its folder {folder} cannot be looked at: {error.strerror})"
    if is_read_only:
        remedy = "it is read-only: mount it for writing"
    elif not os.access(folder, os.W_OK):
        remedy = "this user may not write there: change that, or the address"
    elif free < _LITTLE:
        remedy = "make room"
    else:
        remedy = "it may be written to: look at the disk's health, the file's rights and the system's log"
    return f" ({free / 2**20:,.0f} MB are free in {folder}: {remedy})"


def loses_statements(error: DBAPIError) -> bool:
    """Whether a pooler gave a statement to a session that has not prepared it, or has prepared it before."""
    return getattr(error.orig, "sqlstate", None) in ("26000", "42P05")
