"""`resilient doctor`: what is wrong, or will be, with the database and the workers, and what to do about it.

`examine` gathers the facts (`store/inspect/health.py`, this host); the checks are functions from facts to findings.
A check reports only where a person can act: a finding that is always there would be read by nobody.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from resilient.core.base.errors import DatabaseUnreachable, SchemaOutdated, SetupError
from resilient.core.base.phrases import counted, moment, span
from resilient.core.base.resource_key import account, serves
from resilient.core.inspect.why import stands_still
from resilient.core.provider.facts import warning
from resilient.engine.ground.providers import also_installed_by, hidden_by
from resilient.store.accounts import connections
from resilient.store.accounts.secrets import HOW
from resilient.store.db import schema
from resilient.store.db.file import is_missing
from resilient.store.db.wake import listener_name
from resilient.store.inspect import health
from resilient.store.inspect.health import filesystem_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from datetime import date

    from sqlalchemy.engine import URL

    from resilient.core.provider.facts import Provider
    from resilient.store.db.database import Database
    from resilient.store.inspect.health import Contents, Server, WorkerSeen

Level = Literal["ok", "warn", "fail"]
SKEW: Final = 5.0  # seconds this host's clock may differ from the database's
LONG: Final = 300.0  # seconds a transaction may stay open
SILENT: Final = 30.0  # seconds after which a worker counts as gone
MOST_NAMED: Final = 5  # accounts in one line
DEAD_ROWS: Final = 10_000  # below that a bad ratio means nothing
NETWORK: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "ceph", "fuse.glusterfs"})


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``name`` is stable, for programs; ``remedy`` is empty if all is well."""

    name: str
    level: Level
    message: str
    remedy: str = ""


async def examine(
    database: Database,
    *,
    listen_url: URL | None = None,
    providers: Iterable[Provider] = (),
    keys: Collection[str] | None = None,
    host_now: Callable[[], datetime] = lambda: datetime.now(UTC),
    makes_tables: bool = False,
    own_table: bool = False,
) -> list[Finding]:
    """Run all checks. A database that is unreachable, outdated or closed to this user is a finding, not an error.

    ``providers``: those of the program, whose facts may be old; ``keys``: the ids of its keys for secrets;
    ``makes_tables``: whether the program makes them itself, and a file, when it is first used; ``own_table``: whether
    credentials are in a table of the program's own.
    """
    names = check_names(hidden_by(), also_installed_by())
    providers = list(providers)
    facts = [*names, *check_facts(providers, host_now().date()), *check_key(providers, keys, own_table=own_table)]
    disk = await asyncio.to_thread(_check_file, database)  # before the database is opened, which a full disk prevents
    try:
        await schema.check(database)
        outdated = None
    except DatabaseUnreachable as error:
        if makes_tables and database.file is not None and is_missing(database.file):
            message = f"there is no {database.file} yet: this program makes it, with its tables, when it is first used"
            return [Finding("database", "ok", message), *facts]
        remedy = "" if database.is_sqlite else "start it, or correct the address"  # a file's message has it
        return [Finding("database", "fail", str(error), remedy), *disk, *facts]
    except SetupError as error:
        outdated = error
    before = host_now()
    server = await database.transaction(health.server)
    skew = (server.now - before).total_seconds(), (server.now - host_now()).total_seconds()
    findings = [_database(database, server), *check_server(server, skew, sqlite=database.is_sqlite)]
    applications = None
    if not database.is_sqlite:
        notify, applications = await asyncio.to_thread(_check_notify, database, listen_url)
        findings.append(notify)
    findings += disk
    if outdated is not None:
        if makes_tables and isinstance(outdated, SchemaOutdated):
            message = "this program makes the tables, or brings them up to date, when it is first used"
            return [*findings, Finding("schema", "ok", message), *facts]
        remedy = f"`{database.dialect.upgrade_with}`" if isinstance(outdated, SchemaOutdated) else "deploy what fits"
        return [*findings, Finding("schema", "fail", str(outdated), remedy), *facts]
    if not database.is_sqlite and not database.dialect.generic_plans:
        message = (
            "PostgreSQL chooses plans by itself (generic_plans=False): the first jobs of a new connection begin later"
        )
        findings.append(Finding("plans", "ok", message))
    if not server.locked:  # else our tables cannot be read
        findings += await _examine_tables(database, server, applications, keys)
    return [*findings, *facts]


async def _examine_tables(
    database: Database, server: Server, applications: frozenset[str] | None, keys: Collection[str] | None
) -> list[Finding]:
    contents = await database.transaction(health.contents)
    findings = list(check_room(server, contents, database.connections.most)) if database.is_own else []
    present, needed = await schema.current(database), schema.head()
    newer = "" if present == needed else f", made by a newer version; this one needs {needed}"
    findings += [Finding("schema", "ok", f"revision {present}{newer}"), *check_contents(contents)]
    findings += check_listeners(contents, applications)
    if keys is not None:
        findings += check_secrets(await database.transaction(connections.sealed_with), keys)
    return findings


def _database(database: Database, server: Server) -> Finding:
    name = "SQLite" if database.is_sqlite else "PostgreSQL"
    return Finding("database", "ok", f"{name} {'.'.join(map(str, server.version))} at {database.address}")


def _check_notify(database: Database, listen_url: URL | None) -> tuple[Finding, frozenset[str] | None]:
    """Whether NOTIFY reaches LISTEN where programs listen; the applications connected there, None if unknown."""
    url = listen_url or database.url.set(drivername="postgresql+psycopg")
    try:
        applications = health.hearers(url)
    except DatabaseUnreachable as error:
        message = f"LISTEN could not be tried: {error}"
        return Finding("notify", "warn", message, "give listen_url= an address workers can reach"), None
    if applications is not None:
        return Finding("notify", "ok", "LISTEN and NOTIFY work: idle workers wake at once"), applications
    message = "NOTIFY does not reach LISTEN (PgBouncer in transaction mode?): idle workers find work by polling"
    return Finding("notify", "warn", message, "give listen_url= the address of PostgreSQL itself"), None


def check_listeners(contents: Contents, applications: frozenset[str] | None) -> Iterator[Finding]:
    """Whether the living workers listen on this server; ``applications``: those of its sessions, None if unknown."""
    if applications is None:
        return
    able = [worker for worker in contents.workers if worker.silent <= SILENT and not worker.stopping]
    if deaf := sorted(worker.id for worker in able if listener_name(worker.id) not in applications):
        yield Finding(
            "listeners",
            "warn",
            f"no LISTEN on this server comes from {_some(deaf)}, {len(deaf)} of"
            f" {counted(len(able), 'living worker', 'living workers')}: no NOTIFY from here wakes them, they poll",
            "give all programs one listen_url= (the same node of a cluster); a worker that only drains never listens",
        )


def _check_file(database: Database) -> list[Finding]:
    if database.file is None:
        return []
    file = Path(os.path.realpath(database.file))  # where SQLite puts the WAL, if a link leads there
    mounts = Path("/proc/mounts")
    table = mounts.read_text(errors="surrogateescape") if mounts.exists() else ""
    try:
        free, wal = shutil.disk_usage(file.parent).free, _size(Path(f"{file}-wal"))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        message = f"{file.parent} cannot be examined: {error.strerror}"
        return [Finding("folder", "fail", message, "give this user the right to read and write there")]
    findings = list(check_disk(file, filesystem_of(file, table), free, wal))
    if not os.access(file.parent, os.W_OK):
        message = f"{file.parent} takes no writes: it is mounted read-only, or this user may not write there"
        findings.append(Finding("folder", "fail", message, "mount it for writing, or give this user the right"))
    return findings


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # the last program to close a database deletes its WAL
        return 0


# -- the server ----------------------------------------------------------------------------------------------


def check_server(server: Server, skew: tuple[float, float], *, sqlite: bool) -> list[Finding]:
    """Settings, clock and other programs' transactions.

    ``skew``: seconds of the database's clock minus this host's, read before the query and after it.
    """
    if sqlite:
        return list(_check_pragmas(server.settings))
    return [
        *_check_standby(server),
        *_check_locks(server),
        _check_clock(skew),
        *_check_settings(server.settings),
        *_check_sessions(server),
        *_check_long(server),
    ]


def _check_standby(server: Server) -> Iterator[Finding]:
    if server.standby:
        yield Finding(
            "standby",
            "fail",
            "this is a standby: it takes no writes, so nothing can be enqueued or run",
            "give the primary's address, or all of them: ?host=a,b&port=5432,5432&target_session_attrs=read-write",
        )
    elif server.read_only:
        yield Finding(
            "read_only",
            "fail",
            "sessions take no writes here (default_transaction_read_only is on): workers wait, nothing can be enqueued",
            "find out who set it, and why: for the server, the database or the user (SHOW and \\drds in psql); then"
            " ALTER SYSTEM, ALTER DATABASE or ALTER ROLE ... RESET default_transaction_read_only",
        )


def _check_locks(server: Server) -> Iterator[Finding]:
    for lock in server.locked:
        session = lock.session
        who = f" of {session.application!r}" if session.application else ""
        what = "locks" if lock.granted else "waits to lock, so that everybody waits behind it,"
        yield Finding(
            "locked",
            "fail",
            f"session {session.pid}{who} {what} {lock.table} against everybody, its transaction open for"
            f" {span(session.seconds)}: workers and commands wait for it",
            f"wait until it ends, or end it: SELECT pg_terminate_backend({session.pid})",
        )


def check_room(server: Server, contents: Contents, connections: int) -> Iterator[Finding]:
    """Whether the server has room for the living workers; ``connections``: the most one worker opens."""
    alive = sum(worker.silent <= SILENT for worker in contents.workers)
    if server.room and max(alive, 1) * connections > server.room:
        yield Finding(
            "connection_budget",
            "warn",
            f"{counted(max(alive, 1), 'worker', 'workers')} of {connections} connections each may open"
            f" {max(alive, 1) * connections}, and the server has {server.room} for everybody",
            "raise max_connections (or the limit of the user or database), or lower Resilient(connections=...)",
        )


def _check_clock(skew: tuple[float, float]) -> Finding:
    low, high = min(skew), max(skew)
    off = max(low, -high, 0.0)  # the part that the time of the query cannot explain
    if off <= SKEW:
        return Finding("clock", "ok", f"this host and the database agree within {max(off, 0.1):.1f} s")
    return Finding(
        "clock",
        "warn",
        f"this host's clock is {span(off)} {'behind' if low > 0 else 'ahead of'} the database's",
        "set it (NTP): jobs go by the database's clock, what this host logs and signs does not",
    )


def _check_settings(settings: dict[str, str]) -> Iterator[Finding]:
    if settings.get("autovacuum") == "off" or settings.get("track_counts") == "off":
        yield Finding(
            "autovacuum",
            "fail",
            "autovacuum is off: dead rows pile up and claiming gets slower and slower",
            "set autovacuum = on and track_counts = on",
        )
    else:
        yield Finding("autovacuum", "ok", "autovacuum is on")
    off = [name for name in ("fsync", "synchronous_commit") if settings.get(name) == "off"]
    if off:
        yield Finding(
            "durability",
            "warn",
            f"{' and '.join(off)} {'is' if len(off) == 1 else 'are'} off: a crash of the server can lose jobs that were"
            " committed",
            f"set {' = on and '.join(off)} = on",
        )
    else:
        yield Finding("durability", "ok", "a commit survives a crash")
    if settings.get("server_encoding", "UTF8") != "UTF8":
        yield Finding(
            "encoding",
            "warn",
            f"the database stores text as {settings['server_encoding']}: payloads with other letters fail",
            "create the database with ENCODING 'UTF8'",
        )


def _check_sessions(server: Server) -> Iterator[Finding]:
    most = int(server.settings.get("max_connections", 0))
    if most and server.sessions > 0.9 * most:
        yield Finding(
            "connections",
            "warn",
            f"{server.sessions} of {most} connections are in use",
            "run fewer workers and programs, or raise max_connections",
        )
    if server.hidden:
        yield Finding(
            "privileges",
            "warn",
            f"{server.hidden} sessions of other users are hidden from us: a long transaction may be missing",
            "GRANT pg_monitor TO the database user",
        )


def _check_long(server: Server) -> Iterator[Finding]:
    long = [session for session in server.long if session.seconds >= LONG]
    for session in long:
        who = f" of {session.application!r}" if session.application else ""
        yield Finding(
            "long_transaction",
            "warn",
            f"session {session.pid}{who} has had a transaction open for {session.seconds / 60:.0f} minutes"
            f" ({session.state}): nothing deleted since can be cleaned up",
            f"end it there, or: SELECT pg_terminate_backend({session.pid})",
        )
    for gid in server.prepared:
        yield Finding(
            "long_transaction",
            "warn",
            f"the prepared transaction {gid!r} is waiting: nothing deleted since can be cleaned up",
            f"COMMIT PREPARED or ROLLBACK PREPARED {gid!r}",
        )
    for slot in server.idle_slots:
        yield Finding(
            "replication_slot",
            "warn",
            f"nobody reads the replication slot {slot!r}: it holds back cleaning up",
            f"SELECT pg_drop_replication_slot({slot!r}), if it is not needed",
        )
    if not long and not server.prepared:
        yield Finding("long_transaction", "ok", f"no transaction is older than {LONG / 60:.0f} minutes")


# -- SQLite --------------------------------------------------------------------------------------------------


def _check_pragmas(pragmas: dict[str, str]) -> Iterator[Finding]:
    if pragmas["journal_mode"] in ("wal", "memory"):
        yield Finding("wal", "ok", "readers do not wait for writers (WAL)")
    else:
        yield Finding(
            "wal",
            "warn",
            f"journal_mode is {pragmas['journal_mode']}: readers and writers lock each other out",
            "PRAGMA journal_mode=WAL on the engine handed to Resilient, or give it the address instead",
        )
    if int(pragmas["synchronous"]) >= 2:  # noqa: PLR2004 - 2 is FULL, 3 EXTRA
        yield Finding("durability", "ok", "a commit survives a power cut")
    else:
        yield Finding(
            "durability",
            "warn",
            "synchronous is less than FULL: a power cut can lose jobs that were committed",
            "PRAGMA synchronous=FULL on the engine handed to Resilient, or give it the address instead",
        )


def check_disk(file: Path, filesystem: str, free: int, log: int) -> Iterator[Finding]:
    """Whether the file's disk suits it; ``free`` and ``log`` (the WAL's size) in bytes."""
    if filesystem in NETWORK:
        yield Finding(
            "filesystem",
            "fail",
            f"{file} is on a network filesystem ({filesystem}): locks do not hold there, the file will break",
            "move it to a local disk, or use PostgreSQL",
        )
    if free < 256 * 2**20:
        yield Finding(
            "disk",
            "fail",
            f"only {free / 2**20:.0f} MB are free beside {file}",
            "make room, or prune finished jobs",
        )
    else:
        yield Finding("disk", "ok", f"{free / 2**30:.1f} GB are free beside {file}")
    if log > 2**30:
        yield Finding(
            "wal_size",
            "warn",
            f"the write-ahead log has grown to {log / 2**30:.1f} GB: some reader has been open all the time",
            "close programs that keep a transaction open on the file",
        )


# -- our own tables ------------------------------------------------------------------------------------------


def check_contents(contents: Contents) -> list[Finding]:
    """What the rows of our tables show: workers, the run queue, keys, schedules, vacuum, and an Alembic beside us."""
    return [
        *_check_workers(contents),
        _check_turns(contents),
        *_check_sealed(contents),
        *_check_keyless_accounts(contents),
        *_check_schedules(contents),
        *_check_rows(contents),
        *_check_neighbours(contents),
    ]


def _check_workers(contents: Contents) -> Iterator[Finding]:
    alive = [worker for worker in contents.workers if worker.silent <= SILENT]
    for worker in contents.workers:
        if worker.silent > SILENT:
            yield Finding(
                "lost_worker",
                "warn",
                f"worker {worker.id} (process {worker.pid} on {worker.host}) has been silent for {span(worker.silent)}",
                "look why it died; other workers take its jobs over when their lease ends",
            )
    yield from _check_loops(alive)
    able = [worker for worker in alive if not worker.stopping]
    kinds = {kind for worker in able for kind in worker.kinds}
    if not alive:
        level: Level = "fail" if contents.waiting else "warn"
        message = "no worker is alive" + (", and jobs are waiting" if contents.waiting else "")
        yield Finding("workers", level, message, "start one: `resilient worker`")
        return
    yield Finding("workers", "ok", f"{len(alive)} alive")
    if unknown := sorted({kind for kind, _ in contents.waiting} - kinds):
        yield Finding(
            "kinds",
            "warn",
            f"jobs of kind {', '.join(unknown)} are waiting, and no living worker knows that kind",
            "list the handler in Resilient(handlers=...) and deploy it, or cancel the jobs",
        )
    unserved = {
        account(key)
        for kind, key in contents.waiting
        if kind in kinds and not any(kind in worker.kinds and serves(key, worker.resources) for worker in able)
    }
    if unserved:
        yield Finding(
            "resources",
            "warn",
            f"jobs of {_some(sorted(unserved))} are waiting, and no living worker that has their kind"
            " serves that resource",
            "start a worker without --resource, or with one that fits",
        )
    if len(versions := sorted({worker.code_version for worker in alive})) > 1:
        yield Finding(
            "versions",
            "warn",
            f"workers run different versions: {', '.join(versions)}",
            "finish the deployment",
        )


def _check_loops(alive: Sequence[WorkerSeen]) -> Iterator[Finding]:
    for worker in alive:
        if stands_still(worker.loop_lag):
            yield Finding(
                "loop",
                "warn",
                f"the event loop of worker {worker.id} stood still for {span(worker.loop_lag or 0.0)}: its other jobs"
                " waited",
                "its log names the handler and its line: make it a plain def, or await its work",
            )


def _check_sealed(contents: Contents) -> Iterator[Finding]:
    if contents.keyless:
        yield Finding(
            "sealed",
            "warn",
            f"{counted(contents.keyless, 'job waits', 'jobs wait')} because workers met them that lack the key of their"
            " sealed payload",
            "give every worker the same RESILIENT_SECRETS; a key that is lost opens nothing: cancel these jobs",
        )


def _check_keyless_accounts(contents: Contents) -> Iterator[Finding]:
    if contents.keyless_accounts:
        number = counted(len(contents.keyless_accounts), "account is", "accounts are")
        yield Finding(
            "missing_key",
            "warn",
            f"{number} passed over by workers that lack the key of the credentials: {_some(contents.keyless_accounts)}",
            "give every worker all keys (RESILIENT_SECRETS) and start it again; if the key is lost, connect them again",
        )


def _check_schedules(contents: Contents) -> Iterator[Finding]:
    if contents.overdue:
        name, since = contents.overdue[0]
        others = f" (and {counted(len(contents.overdue) - 1, 'other')})" if len(contents.overdue) > 1 else ""
        yield Finding(
            "schedules",
            "warn",
            f"schedule {name} is due since {moment(since)}{others} and does not tick",
            "start a worker of the program that declares it; if none does any more: `resilient schedules remove NAME`",
        )


def _check_turns(contents: Contents) -> Finding:
    if not contents.stranded:
        return Finding("queue", "ok", "every resource with ready jobs is in line for the workers")
    return Finding(
        "queue",
        "fail",
        f"{counted(contents.stranded, 'resource')} with ready jobs fell out of the line for the workers",
        "workers mend this within a minute; if it comes back, report it as a bug",
    )


def _check_rows(contents: Contents) -> Iterator[Finding]:
    for table in contents.unvacuumed:
        yield Finding(
            "table_autovacuum",
            "fail",
            f"autovacuum was turned off for {table}",
            f"ALTER TABLE {table} RESET (autovacuum_enabled)",
        )
    for table, (live, dead) in contents.rows.items():
        if dead > DEAD_ROWS and dead > 5 * live:
            yield Finding(
                "dead_rows",
                "warn",
                f"{table} holds {dead} dead rows beside {live} live ones: claiming gets slower",
                f"look for a long transaction above; else VACUUM {table}",
            )


def _check_neighbours(contents: Contents) -> Iterator[Finding]:
    if contents.beside_alembic:
        yield Finding(
            "alembic",
            "ok",
            "an application's Alembic shares the schema: its env.py must pass"
            " include_name=resilient.alembic.include_name, or autogenerate proposes to drop these tables",
        )


# -- providers -----------------------------------------------------------------------------------------------


def check_secrets(sealed: Mapping[str, int], keys: Collection[str]) -> Iterator[Finding]:
    """Whether stored credentials can be read; ``sealed``: how many are encrypted with each key, by the key's id."""
    every, missing = sum(sealed.values()), sum(n for key_id, n in sealed.items() if key_id not in keys)
    if missing:
        yield Finding(
            "secrets",
            "fail",
            f"{missing} of {every} stored credentials are encrypted with a key that is not given here",
            "set RESILIENT_SECRETS (or Resilient(secrets=[...])) to the keys that the other processes have",
        )
    elif every:
        yield Finding("secrets", "ok", f"all {every} stored credentials can be read")


def _some(names: Sequence[str]) -> str:
    """The first of these names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


def check_key(providers: Iterable[Provider], keys: Collection[str] | None, *, own_table: bool) -> Iterator[Finding]:
    """Which providers' accounts cannot be connected, because no key is given to encrypt their credentials."""
    names = sorted(one.name for one in providers if one.auth and not one.anonymous)
    if names and keys is not None and not keys and not own_table:
        yield Finding(
            "secrets",
            "warn",
            f"no account of {_some(names)} can be connected: credentials are stored encrypted, and no key is given",
            HOW,
        )


def check_names(hidden_by: str, others: Sequence[str]) -> list[Finding]:
    """Whether the top-level package ``providers`` is ours: other programs like that name too."""
    remedy = "give that package another name, or install one of the two elsewhere"
    if hidden_by:
        message = f"{hidden_by} hides the package `providers` of resilient-engine: its providers cannot be imported"
        return [Finding("providers", "fail", message, remedy)]
    if others:
        message = f"{', '.join(others)} installs a package `providers` into the same place: files of both are mixed"
        return [Finding("providers", "warn", message, remedy)]
    return []


def check_facts(providers: Iterable[Provider], today: date) -> list[Finding]:
    """Which providers' facts are so old that somebody should compare them with the documentation."""
    remedy = "compare `resilient providers show {}` with its sources, override what has changed, and tell us"
    return [
        Finding("facts", "warn", message, remedy.format(provider.name))
        for provider in sorted(providers, key=lambda one: one.name)
        if (message := warning(provider, today))
    ]
