"""What `resilient doctor` asks the database: facts, no judgement (`engine/inspect/doctor.py` judges).

Cheap on a big and busy database: catalogues, estimates and samples, never a count of jobs. The texts of other
people's statements are not read: they may hold anybody's data.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from resilient.core.accounts.tokens import LEFT_LATELY, MISSING_KEY
from resilient.core.base.errors import DatabaseUnreachable, FailureKind
from resilient.core.jobs.records import SEALED_KEY
from resilient.store.db.address import connect_args, reason
from resilient.store.db.dialect import TIME, Dialect
from resilient.store.gates import turns
from resilient.store.inspect import workers
from resilient.store.schedules import ticks as schedules

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any

    from sqlalchemy import Connection
    from sqlalchemy.engine import URL

_SETTINGS: Final = (
    "autovacuum",
    "fsync",
    "max_connections",
    "server_encoding",
    "superuser_reserved_connections",
    "reserved_connections",
    "synchronous_commit",
    "track_counts",
)
_PRAGMAS: Final = ("journal_mode", "synchronous")
_SAMPLE: Final = 1000  # ready jobs looked at for their kinds
_LATE: Final = timedelta(minutes=5)  # a schedule that did not tick for so long: workers may just be replaced
_REMEMBERED: Final = timedelta(days=1)  # how long a silent worker is reported


@dataclass(frozen=True, slots=True)
class Session:
    """Somebody's transaction on this server that has been open for a while."""

    pid: int
    application: str
    state: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock of a table against everybody; ``granted``: else it waits for others, and who comes now waits behind it."""

    table: str
    granted: bool
    session: Session


@dataclass(frozen=True, slots=True)
class Server:
    """PostgreSQL, or SQLite's library and file."""

    version: tuple[int, ...]
    now: datetime
    settings: dict[str, str]  # PostgreSQL's settings, SQLite's pragmas
    sessions: int = 0
    hidden: int = 0  # sessions of other users that this one may not look into
    long: list[Session] = field(default_factory=list)
    idle_slots: list[str] = field(default_factory=list)  # unused replication slots that hold back vacuum
    prepared: list[str] = field(default_factory=list)  # forgotten prepared transactions
    standby: bool = False  # it takes no writes
    read_only: bool = False  # its sessions begin so, by a setting; a standby too
    locked: list[Lock] = field(default_factory=list)  # of our tables, against every reader
    allowed: int = 0  # connections that this user may have, or all users in this database; 0: as many as the server has

    @property
    def room(self) -> int:
        """How many connections programs may have at once; 0: unknown."""
        most = int(self.settings.get("max_connections", 0))
        kept = (self.settings.get(name, "0") for name in ("superuser_reserved_connections", "reserved_connections"))
        most -= sum(map(int, kept))
        return min(most, self.allowed) if self.allowed else most


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A worker by its last heartbeat."""

    id: str
    host: str
    pid: int
    kinds: frozenset[str]
    code_version: str
    silent: float  # seconds
    stopping: bool
    resources: tuple[str, ...] = ()  # patterns of what it serves; none: everything
    loop_lag: float | None = None  # seconds: the longest that its event loop stood still lately


@dataclass(frozen=True, slots=True)
class Contents:
    """Our own tables."""

    rows: dict[str, tuple[int, int]]  # live and dead rows, as PostgreSQL estimates them
    unvacuumed: list[str]  # tables whose autovacuum somebody turned off
    beside_alembic: bool  # an application's own version table stands beside ours
    workers: list[WorkerSeen]
    waiting: frozenset[tuple[str, str]]  # kinds and resource keys in a sample of the ready jobs
    stranded: int  # keys with a ready job and no turn
    overdue: Sequence[tuple[str, datetime]] = ()  # schedules that should have ticked, and since when
    keyless: int = 0  # jobs that wait for the key of their payload, in a sample of those that are due next
    keyless_accounts: Sequence[str] = ()  # that workers passed over lately because they lack a key


def server(c: Connection, d: Dialect, long: float = 60.0) -> Server:
    """Facts of the server; transactions that are open for ``long`` seconds are listed."""
    version = tuple(int(part) for part in c.dialect.server_version_info or ())
    if not d.is_postgresql:
        pragmas = {name: str(c.exec_driver_sql(f"PRAGMA {name}").scalar()) for name in _PRAGMAS}
        return Server(version, datetime.now(UTC), pragmas)
    settings = d.run(c, f"SELECT name, setting FROM pg_settings WHERE name IN {_SETTINGS}").all()
    sessions, hidden = d.run(
        c,
        "SELECT count(*) FILTER (WHERE backend_type = 'client backend' OR backend_type IS NULL),"
        " count(*) FILTER (WHERE backend_type IS NULL) FROM pg_stat_activity",
    ).one()
    return Server(
        version,
        d.run(c, "SELECT clock_timestamp() AS now", now=TIME).scalar_one(),
        {row.name: row.setting for row in settings},
        sessions,
        hidden,
        _long(c, d, long),
        _names(
            c,
            d,
            "SELECT slot_name FROM pg_replication_slots WHERE NOT active"
            " AND (xmin IS NOT NULL OR catalog_xmin IS NOT NULL) ORDER BY 1",
        ),
        _names(
            c,
            d,
            "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
            " AND prepared < clock_timestamp() - interval '1 minute' ORDER BY 1",
        ),
        *_writes(c, d),
        locked=_locked(c, d),
        allowed=_allowed(c, d),
    )


def _long(c: Connection, d: Dialect, seconds: float) -> list[Session]:
    """Long transactions, the longest first: any snapshot in the database keeps vacuum from removing dead turns."""
    rows = d.run(
        c,
        "SELECT pid, application_name, state, extract(epoch FROM clock_timestamp() - xact_start)"
        " FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()"
        " AND xact_start < clock_timestamp() - make_interval(secs => :seconds) ORDER BY xact_start LIMIT 5",
        {"seconds": seconds},
    )
    return [Session(pid, application or "", state or "", float(age)) for pid, application, state, age in rows]


def _locked(c: Connection, d: Dialect) -> list[Lock]:
    """Tables of ours that nobody can read, for a second at least: a change of the table, VACUUM FULL, LOCK."""
    rows = d.run(
        c,
        "SELECT r.relname, l.granted, l.pid, a.application_name, a.state, extract(epoch FROM clock_timestamp()"
        " - a.xact_start) FROM pg_locks l JOIN pg_class r ON r.oid = l.relation LEFT JOIN pg_stat_activity a"
        " ON a.pid = l.pid WHERE l.locktype = 'relation' AND l.mode = 'AccessExclusiveLock'"
        " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND r.relname LIKE"
        " 'resilient~_%' ESCAPE '~'"
        " AND (a.xact_start IS NULL OR a.xact_start < clock_timestamp() - interval '1 second')"
        " ORDER BY l.granted DESC, a.xact_start, r.relname LIMIT 10",
    )
    return [
        Lock(table, granted, Session(pid, application or "", state or "", float(age or 0)))
        for table, granted, pid, application, state, age in rows
    ]


def _writes(c: Connection, d: Dialect) -> tuple[bool, bool]:
    """Whether it is a standby, and whether sessions begin read-only."""
    standby, read_only = d.run(c, "SELECT pg_is_in_recovery(), current_setting('transaction_read_only') = 'on'").one()
    return bool(standby), bool(read_only)


def _allowed(c: Connection, d: Dialect) -> int:
    """How many connections this user, or this database, may have (0: no limit)."""
    allowed = d.run(
        c,
        "SELECT min(n) FROM (SELECT rolconnlimit AS n FROM pg_roles"
        " WHERE rolname = current_user UNION ALL SELECT datconnlimit FROM pg_database"
        " WHERE datname = current_database()) AS found WHERE n >= 0",
    ).scalar_one()
    return int(allowed or 0)


def _names(c: Connection, d: Dialect, template: str) -> list[str]:
    return [str(name) for (name,) in d.run(c, template)]


def contents(c: Connection, d: Dialect) -> Contents:
    """Facts of our own tables, which must be there."""
    now = d.now(c)
    rows = workers.alive(c, d, now, _REMEMBERED)
    tables = sa.inspect(c).get_table_names(schema=d.schema)
    waiting = (
        "SELECT DISTINCT kind, resource_key FROM"
        f" (SELECT kind, resource_key FROM {{job}} WHERE state = 'ready' LIMIT {_SAMPLE}) AS j"
    )
    return Contents(
        _estimates(c, d) if d.is_postgresql else {},
        _names(c, d, _UNVACUUMED) if d.is_postgresql else [],
        "alembic_version" in tables,
        [_seen(row, now) for row in rows],
        frozenset((kind, key) for kind, key in d.run(c, waiting)),
        len(turns.stranded(c, d)),
        schedules.overdue(c, d, now - _LATE),
        int(d.run(c, _KEYLESS, {"code": SEALED_KEY}).scalar_one()),
        _left(c, d, now),
    )


_KEYLESS: Final = (
    "SELECT count(*) FROM (SELECT last_error_code FROM {job} WHERE state = 'scheduled'"
    f" ORDER BY run_at, id LIMIT {_SAMPLE}) AS j WHERE last_error_code = :code"
)


def _left(c: Connection, d: Dialect, now: datetime) -> list[str]:
    params = {"kind": FailureKind.UNDECODABLE.value, "code": MISSING_KEY, "since": now - LEFT_LATELY}
    return list(d.run(c, _LEFT, params).scalars())


_LEFT: Final = (  # no index has these columns: all rows are read
    "SELECT key FROM {resource} WHERE last_error_kind = :kind AND last_error_code = :code AND last_error_at >= :since"
    " AND (last_success_at IS NULL OR last_success_at <= last_error_at)"
    f" ORDER BY key LIMIT {_SAMPLE}"
)
_BUSY: Final = "('{job}'::regclass, '{turn}'::regclass, '{resource}'::regclass, '{rate_limit}'::regclass)"
_UNVACUUMED: Final = (
    f"SELECT oid::regclass FROM pg_class WHERE oid IN {_BUSY}"
    " AND EXISTS (SELECT FROM pg_options_to_table(reloptions) WHERE option_name = 'autovacuum_enabled'"
    " AND NOT option_value::boolean)"
)


def _estimates(c: Connection, d: Dialect) -> dict[str, tuple[int, int]]:
    rows = d.run(
        c,
        "SELECT relname, n_live_tup, n_dead_tup FROM pg_stat_all_tables WHERE relid IN " + _BUSY,
    )
    return {name: (live, dead) for name, live, dead in rows}


def _seen(row: Any, now: datetime) -> WorkerSeen:
    return WorkerSeen(
        row.id,
        row.host,
        row.pid,
        frozenset(row.kinds or ()),
        row.code_version,
        (now - row.seen_at).total_seconds(),
        bool(row.stopping),
        tuple(row.resources or ()),
        row.loop_lag,
    )


def hearers(url: URL) -> frozenset[str] | None:
    """The applications whose sessions are on the server at this address; None if no NOTIFY reaches a LISTEN there.

    It has a second for that; a pooler in transaction mode swallows it. Raises `DatabaseUnreachable`.
    """
    engine = sa.create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT", connect_args=connect_args(url))
    try:
        with engine.connect() as listening, engine.connect() as telling:
            listening.exec_driver_sql("LISTEN resilient_doctor")
            telling.exec_driver_sql("NOTIFY resilient_doctor")
            driver: Any = listening.connection.driver_connection
            if not any(driver.notifies(timeout=1.0, stop_after=1)):
                return None
            names = telling.exec_driver_sql(
                "SELECT DISTINCT application_name FROM pg_stat_activity WHERE datname = current_database()"
            )
            return frozenset(names.scalars())
    except DBAPIError as error:
        raise DatabaseUnreachable(reason(error, engine.url)) from None
    finally:
        engine.dispose()


def filesystem_of(path: Path, mounts: str) -> str:
    """The type of the filesystem that holds ``path``, by the text of /proc/mounts (fstab(5)); empty if unknown."""
    best, filesystem = -1, ""
    for fields in (line.split(" ") for line in mounts.split("\n") if line):
        point = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), fields[1])
        if path.is_relative_to(point) and len(point) >= best:
            best, filesystem = len(point), fields[2]
    return filesystem


_ESCAPED: Final = re.compile(r"\\([0-7]{3})")  # a space in a folder's name is \040
