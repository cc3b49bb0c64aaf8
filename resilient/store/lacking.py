"""Accounts without usable credentials: never connected, or with secrets that no key at hand opens.

Their gate is shut, so that their jobs wait parked, uncharged, and whoever connects them, or has the key, opens it. Who
shuts it looks again under the lock of the resource row, which connecting takes last: an account that was connected at
the same moment is not shut out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.core.alerts import of_credentials
from resilient.core.tokens import NOT_CONNECTED, UNREADABLE
from resilient.store import alerts, connections, gates
from resilient.store.grants import read

if TYPE_CHECKING:
    from collections.abc import Collection
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.store.dialect import Dialect


def shut_unconnected(c: Connection, d: Dialect, key: str, *, tell: bool) -> bool:
    """No connection: the account waits for one; False if it has one meanwhile. ``tell``: write the alert, too."""
    before = gates.auth_of(c, d, key)
    gates.set_auth(c, d, key, NOT_CONNECTED)
    if connections.find(c, d, key) is not None:
        gates.set_auth(c, d, key, before)
        return False
    if tell and before != NOT_CONNECTED:
        alerts.record(c, d, [of_credentials(key, NOT_CONNECTED, d.now(c))], d.now(c), lasting=True)
    return True


def shut_unreadable(c: Connection, d: Dialect, key: str, grant_id: UUID, version: int, *, tell: bool) -> bool:
    """Its secrets cannot be opened here: the account waits for who can; False if they changed meanwhile."""
    before = gates.auth_of(c, d, key)
    gates.set_auth(c, d, key, UNREADABLE)
    grant = read(c, d, grant_id)
    if grant is None or grant.version != version:
        gates.set_auth(c, d, key, before)
        return False
    if tell and before != UNREADABLE:
        alerts.record(c, d, [of_credentials(key, UNREADABLE, d.now(c))], d.now(c), lasting=True)
    return True


def shut(c: Connection, d: Dialect, auth: str, after: str, limit: int) -> list[str]:
    """The next accounts whose gate is shut for this reason, by key."""
    rows = d.run(
        c,
        "SELECT key FROM {resource} WHERE auth = :auth AND key > :after_key ORDER BY key LIMIT :limit",
        {"auth": auth, "after_key": after, "limit": limit},
    )
    return [row[0] for row in rows]


def open_if_shut(c: Connection, d: Dialect, key: str, auth: str) -> None:
    """It has what it lacked."""
    if gates.auth_of(c, d, key) == auth:
        gates.set_auth(c, d, key, "ok")


def sealed_with(c: Connection, d: Dialect) -> dict[str, int]:
    """How many grants are encrypted with each key of the ring, by its id."""
    rows = d.run(
        c,
        "SELECT key_id, count(*) FROM {grant} WHERE secrets IS NOT NULL AND key_id IS NOT NULL GROUP BY key_id",
    )
    return {row[0]: int(row[1]) for row in rows}


def unreadable(sealed: dict[str, int], known: Collection[str]) -> int:
    """How many of them nobody with these keys can open."""
    return sum(count for key_id, count in sealed.items() if key_id not in known)
