"""`resilient doctor`: what is wrong, or will be, with the database and the workers, and what to do about it.

Gathers the facts (`store/health.py`, this host); `checks.py` judges them.
"""

from __future__ import annotations

import asyncio
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.core.errors import DatabaseUnreachable, SchemaOutdated, SetupError
from resilient.engine import catalogue
from resilient.engine.checks import (
    Finding,
    check_contents,
    check_disk,
    check_facts,
    check_names,
    check_room,
    check_secrets,
    check_server,
    filesystem_of,
)
from resilient.store import health, lacking, schema

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from sqlalchemy.engine import URL

    from resilient.core.provider import Provider
    from resilient.store.database import Database
    from resilient.store.health import Server


async def examine(
    database: Database,
    *,
    listen_url: URL | None = None,
    providers: Iterable[Provider] = (),
    keys: Collection[str] | None = None,
    host_now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> list[Finding]:
    """Look at everything. Never raises for a database that is away, outdated or not ours to look into.

    ``providers``: those of the program, whose facts may be old; ``keys``: the ids of its keys for secrets.
    """
    names = check_names(catalogue.hidden_by(), catalogue.also_installed_by())
    facts = [*names, *check_facts(providers, host_now().date())]
    try:
        await schema.check(database)
        outdated = None
    except DatabaseUnreachable as error:
        remedy = "" if database.is_sqlite else "start it, or correct the address"  # of a file the message says it
        return [Finding("database", "fail", str(error), remedy), *facts]
    except SetupError as error:
        outdated = error
    before = host_now()
    server = await database.transaction(health.server)
    skew = (server.now - before).total_seconds(), (server.now - host_now()).total_seconds()
    found = [_database(database, server), *check_server(server, skew, sqlite=database.is_sqlite)]
    if database.is_sqlite:
        found += await asyncio.to_thread(_check_file, database)
    else:
        found.append(await asyncio.to_thread(_check_notify, database, listen_url))
    if outdated is not None:
        remedy = "resilient db upgrade" if isinstance(outdated, SchemaOutdated) else "deploy what fits"
        return [*found, Finding("schema", "fail", str(outdated), remedy), *facts]
    if not database.is_sqlite and not database.dialect.generic_plans:
        message = (
            "PostgreSQL chooses plans by itself (generic_plans=False): the first jobs of a new connection begin later"
        )
        found.append(Finding("plans", "ok", message))
    contents = await database.transaction(health.contents)
    if database.is_own:
        found += check_room(server, contents, database.connections.most)
    found += [Finding("schema", "ok", f"revision {schema.head()}"), *check_contents(contents)]
    if keys is not None:
        found += check_secrets(await database.transaction(lacking.sealed_with), keys)
    return [*found, *facts]


def _database(database: Database, server: Server) -> Finding:
    name = "SQLite" if database.is_sqlite else "PostgreSQL"
    return Finding("database", "ok", f"{name} {'.'.join(map(str, server.version))} at {database.address}")


def _check_notify(database: Database, listen_url: URL | None) -> Finding:
    url = listen_url or database.url.set(drivername="postgresql+psycopg")
    try:
        heard = health.notifies(url)
    except DatabaseUnreachable as error:
        message = f"LISTEN could not be tried: {error}"
        return Finding("notify", "warn", message, "give listen_url= an address workers can reach")
    if heard:
        return Finding("notify", "ok", "LISTEN and NOTIFY work: idle workers wake at once")
    return Finding(
        "notify",
        "warn",
        "NOTIFY does not reach LISTEN (PgBouncer in transaction mode?): idle workers find work by polling",
        "give listen_url= the address of PostgreSQL itself",
    )


def _check_file(database: Database) -> list[Finding]:
    if database.file is None:
        return []
    mounts = Path("/proc/mounts")
    table = mounts.read_text() if mounts.exists() else ""
    log = Path(f"{database.file}-wal")
    return list(
        check_disk(
            database.file,
            filesystem_of(database.file, table),
            shutil.disk_usage(database.file.parent).free,
            log.stat().st_size if log.exists() else 0,
        )
    )
