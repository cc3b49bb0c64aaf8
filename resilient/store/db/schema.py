"""The version of the tables: bringing a database to it, and refusing to work on another.

Rules:

- An upgrade is one transaction. Several processes may start it at once: one works, the others wait for it and
  find nothing to do (PostgreSQL: an advisory lock; SQLite: BEGIN IMMEDIATE).
- It waits at most `LOCK_TIMEOUT` for a table that a long transaction uses, because everybody else would wait
  behind it.
- Revisions get ``op`` as an argument. Alembic's own ``op`` and ``context`` are globals of the process: taking
  them would break an application that calls `resilient.alembic.upgrade` in the middle of its own Alembic run,
  and threads.
- Revisions name tables without a schema; ``schema=`` is applied to the connection while they run.
- A revision named ``0008_since_0007`` lets code that needs 0007 work on: a process of the version before may start anew
  while the others are replaced. Without ``_since_`` all older code is refused (docs/upgrading.md).
- The version stands in a table of our own, so that it never meets the application's ``alembic_version``.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from resilient.core.base.errors import DatabaseUnreachable, SchemaOutdated, SchemaTooNew, SetupError
from resilient.store.db.address import reason, shown
from resilient.store.db.file import look_at
from resilient.store.db.tables import metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory
    from sqlalchemy import Connection

    from resilient.store.db.database import Database
    from resilient.store.db.dialect import Dialect

VERSION_TABLE: Final = "resilient_alembic_version"
HOME: Final = Path(__file__).parent / "migrations"
LOCK_TIMEOUT: Final = 5  # seconds a change of a table may wait for a transaction that uses it
_TURN_TIMEOUT: Final = 300  # seconds to wait for another process that is upgrading
_LOCK: Final = 0x7265_7369_6C69_656E  # "resilien"; advisory locks are numbers, private to one database
_OLDEST_POSTGRESQL: Final = (13,)
_SINCE: Final = re.compile(r"\d{1,9}_since_(?P<oldest>\d{1,9})", re.ASCII)  # of a revision that older code can work on
_REVISION: Final = re.compile(r'^revision\b[^=\n]* = "(?P<revision>\w+)"', re.ASCII | re.MULTILINE)
_OLDEST_SQLITE: Final = (3, 38)  # RETURNING, and JSON's arrows


# -- from a Database -----------------------------------------------------------------------------------------


async def upgrade(database: Database) -> list[str]:
    """Create or bring up to date the tables; returns the revisions that were applied, oldest first."""
    return await database.transaction(apply)


def upgrade_sync(database: Database) -> list[str]:
    """`upgrade` for synchronous callers."""
    return database.transaction_sync(apply)


async def current(database: Database) -> str | None:
    """The revision the database is at; None without tables."""
    _existing(database)
    return await database.transaction(revision)


def current_sync(database: Database) -> str | None:
    """As `current`, without a loop."""
    _existing(database)
    return database.transaction_sync(revision)


async def check(database: Database) -> None:
    """Raise unless this code can work on that database.

    Raises `DatabaseUnreachable`, `SchemaOutdated` (also without tables) or `SchemaTooNew`.
    """
    _existing(database)
    await database.transaction(verify)


def check_sync(database: Database) -> None:
    """`check` for synchronous callers."""
    _existing(database)
    database.transaction_sync(verify)


def head() -> str:
    """The revision this code needs: of the newest file. Alembic is an eighth of the imports of a start."""
    newest = max((HOME / "versions").glob("[0-9]*.py"))
    name = _REVISION.search(newest.read_text(encoding="utf-8"))
    if name is None:
        raise SetupError(f"{newest} names no revision: install resilient-engine anew")
    return name["revision"]


# -- inside a transaction ------------------------------------------------------------------------------------


def apply(c: Connection, d: Dialect, target: str = "head") -> list[str]:
    """Apply what is missing up to ``target``, in the caller's transaction; returns the revisions."""
    _supported(c, d)
    if target == "head" and revision(c, d) == head():
        return []
    scripts = _scripts()
    try:
        with _alone(c, d):
            if _is_ahead(c, revision(c, d), scripts):
                return []
            return _run(c, d, lambda rev, _: scripts._upgrade_revs(target, rev))  # noqa: SLF001 - as alembic.command
    except DBAPIError as error:
        raise _explained(c, d, error) or error from None


def revert(c: Connection, d: Dialect, target: str = "base") -> list[str]:
    """Go back to ``target``; ``base`` drops the tables and every job in them."""
    scripts = _scripts()
    try:
        with _alone(c, d):
            return _run(c, d, lambda rev, _: scripts._downgrade_revs(target, rev))  # noqa: SLF001 - as above
    except DBAPIError as error:
        raise _explained(c, d, error) or error from None


def empty(c: Connection, d: Dialect) -> None:
    """Delete every row and leave the tables; does nothing where there are none."""
    if revision(c, d) is None:
        return
    for table in reversed(metadata.sorted_tables):  # what refers to others goes first
        d.execute(c, sa.delete(table))


def revision(c: Connection, d: Dialect) -> str | None:
    """The revision the database is at; None without tables."""
    if not sa.inspect(c).has_table(VERSION_TABLE, schema=d.schema):
        return None
    table = sa.table(VERSION_TABLE, sa.column("version_num", sa.String), schema=d.schema)
    return c.execute(sa.select(table.c.version_num)).scalar_one_or_none()


def verify(c: Connection, d: Dialect) -> None:
    """`check`, in the caller's transaction."""
    _supported(c, d)
    present, needed = revision(c, d), head()
    if present == needed or _is_ahead(c, present, _scripts()):
        return
    if present is None:
        where = f" in schema {d.schema!r}" if d.schema else ""
        raise SchemaOutdated(
            f"the database {_address(c)} has no tables of resilient{where}:"
            f" run `{d.upgrade_with}`, or correct the address"
        )
    raise SchemaOutdated(
        f"the tables in {_address(c)} are at revision {present}, this code needs {needed}: run `{d.upgrade_with}`"
    )


def _run(c: Connection, d: Dialect, plan: Callable[[Any, Any], Any]) -> list[str]:
    """Carry out the revisions that ``plan`` gives; returns their names."""
    from alembic.operations import Operations  # noqa: PLC0415 - see `_scripts`

    done: list[str] = []
    context = _context(
        c,
        d,
        fn=plan,
        on_version_apply=(lambda *, step, **_: done.append(step.up_revision_id),),
    )
    context.run_migrations(op=Operations(context))
    return done


def _context(c: Connection, d: Dialect, **options: Any) -> MigrationContext:
    from alembic.migration import MigrationContext  # noqa: PLC0415 - see `_scripts`

    own = {"version_table": VERSION_TABLE, "version_table_schema": d.schema}
    return MigrationContext.configure(c, opts={**own, **options})


def _scripts() -> ScriptDirectory:
    from alembic.script import ScriptDirectory  # noqa: PLC0415 - an eighth of the engine's imports: only where needed

    return ScriptDirectory(str(HOME))


@contextmanager
def _alone(c: Connection, d: Dialect) -> Iterator[None]:
    """Keep other upgrades out, and direct statements to the schema; afterwards the connection is as before."""
    if not d.is_postgresql:
        _begin(c)
    previous = _wait_for_others(c) if d.is_postgresql else None
    if d.schema:
        _create_schema(c, d.schema)
    before = c.get_execution_options().get("schema_translate_map")
    c.execution_options(schema_translate_map={None: d.schema} if d.schema else before)
    try:
        yield
    finally:
        c.execution_options(schema_translate_map=before)
    if previous is not None:
        c.execute(_SET_LOCK_TIMEOUT, {"lock_timeout": previous})


_SET_LOCK_TIMEOUT: Final = sa.text("SELECT set_config('lock_timeout', :lock_timeout, true)")


def _wait_for_others(c: Connection) -> str:
    previous: str = c.execute(sa.text("SELECT current_setting('lock_timeout')")).scalar_one()
    c.execute(_SET_LOCK_TIMEOUT, {"lock_timeout": f"{_TURN_TIMEOUT}s"})
    c.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    c.execute(_SET_LOCK_TIMEOUT, {"lock_timeout": f"{LOCK_TIMEOUT}s"})
    return previous


def _begin(c: Connection) -> None:
    """Begin a transaction. SQLite's driver begins none for DDL: half an upgrade would stay."""
    driver: Any = c.connection.driver_connection
    if not driver.in_transaction:
        c.exec_driver_sql("BEGIN IMMEDIATE")


def _create_schema(c: Connection, name: str) -> None:
    """Create the schema only if it is missing: IF NOT EXISTS would need the right to create schemas all the same."""
    if not sa.inspect(c).has_schema(name):
        c.execute(sa.schema.CreateSchema(name))


# -- what may be wrong ---------------------------------------------------------------------------------------


def _is_ahead(c: Connection, present: str | None, scripts: ScriptDirectory) -> bool:
    """Whether the tables are newer, and this code can work on them. Raises `SchemaTooNew` if it cannot."""
    if present is None or present in {script.revision for script in scripts.walk_revisions()}:
        return False
    since = _SINCE.fullmatch(present)
    if since is not None and int(head().partition("_")[0]) >= int(since["oldest"]):
        return True
    raise SchemaTooNew(
        f"the tables in {_address(c)} are at revision {present}, which this version does not know:"
        " deploy the newer version here, or correct the address"
    )


def _supported(c: Connection, d: Dialect) -> None:
    version = c.dialect.server_version_info or ()
    needed = _OLDEST_POSTGRESQL if d.is_postgresql else _OLDEST_SQLITE
    if version < needed:
        name = "PostgreSQL" if d.is_postgresql else "SQLite"
        numbers, least = ".".join(map(str, version)), ".".join(map(str, needed))
        raise SetupError(f"{name} {numbers} is too old: resilient needs {name} {least} or newer")


def _explained(c: Connection, d: Dialect, error: DBAPIError) -> SetupError | None:
    """The error with what a person can do about it; None if there is no advice."""
    state = getattr(error.orig, "sqlstate", None)
    if state == "55P03":
        return SetupError(
            f"the tables in {_address(c)} are in use by a long transaction, and nothing was changed:"
            f" run `{d.upgrade_with}` again when it has ended (`resilient doctor` names it)"
        )
    if state == "42501":
        return SetupError(
            f"the database user may not create tables in {_address(c)} ({reason(error, c.engine.url)}):"
            " grant it CREATE on the schema, or give it a schema of its own (schema=)"
        )
    return None


@contextmanager
def missing_tables_explained(c: Connection, d: Dialect) -> Iterator[None]:
    """Explain missing tables in a caller's transaction, where no check came before."""
    try:
        yield
    except DBAPIError as error:
        undefined = getattr(error.orig, "sqlstate", None) == "42P01" or "no such table: resilient_" in str(error.orig)
        if not undefined:
            raise
        raise SchemaOutdated(
            f"the database {_address(c)} has no tables of resilient: run `{d.upgrade_with}`, or call app.ready()"
            " (app.ready_sync()) when the program starts"
        ) from None


def _existing(database: Database) -> None:
    """Raise `DatabaseUnreachable` if no SQLite file is seen there: to open a mistyped path would create it."""
    path = database.disk
    if path is not None and look_at(path) is None:
        raise DatabaseUnreachable(
            f"the database file {path} does not exist: `{database.dialect.upgrade_with}` creates it; or correct the"
            " address"
        )


def _address(c: Connection) -> str:
    return shown(c.engine.url)
