"""Connections: which grant a resource uses, people on a provider's consent page, accounts without usable credentials.

An account has no usable credentials if it was never connected, or if no key of the workers opens its secrets. Its gate
is shut then: its jobs wait parked, uncharged, until somebody connects the account or adds the key. A worker that shuts
the gate checks again under the lock of the resource row, which connecting takes last: an account that is connected at
the same moment stays open.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from resilient.core.accounts.tokens import EMPTY, MISSING_KEY, NOT_CONNECTED, UNREADABLE, USABLE
from resilient.core.alerts.rules import of_credentials
from resilient.core.base.bounds import OPEN_CONSENTS
from resilient.core.base.errors import FailureKind
from resilient.core.base.resource_key import check
from resilient.store import alerts
from resilient.store.accounts import grants
from resilient.store.db.dialect import JSON, TIME
from resilient.store.gates import controls as gates

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from datetime import datetime, timedelta
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.store.accounts.grants import Grant
    from resilient.store.db.dialect import Dialect


_GRANT: Final = ", ".join(f"g.{name}" for name in grants.TYPES)
_TYPES: Final = {name: type_ for name, type_ in grants.TYPES.items() if type_ is not None} | {"details": JSON}


@dataclass(frozen=True, slots=True)
class Bound:
    """A resource and its grant."""

    resource_key: str
    grant: Grant
    details: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    seal: str | None = None  # see `engine/accounts/seals.py`


def find(c: Connection, d: Dialect, key: str) -> Bound | None:
    """The connection of a resource, if there is one."""
    return next(iter(_select(c, d, "n.resource_key = :key", {"key": key})), None)


def lock(c: Connection, d: Dialect, key: str) -> Bound | None:
    """The connection of a resource, if there is one, with its grant locked."""
    return lock_all(c, d, {key}).get(key)


def lock_all(c: Connection, d: Dialect, keys: Collection[str]) -> dict[str, Bound]:
    """The existing connections of these resources, by key, with their grants locked.

    If a resource was bound to another grant before its own was locked, that grant is locked, too.
    """
    locked: set[UUID] = set()
    while True:
        rows = [bound for key in sorted(keys) if (bound := find(c, d, key)) is not None]
        missing = {bound.grant.id for bound in rows} - locked
        if not missing:
            return {bound.resource_key: bound for bound in rows}
        for id_ in sorted(missing):
            grants.lock(c, d, id_)
        locked |= missing


def give_up(c: Connection, d: Dialect, key: str) -> Grant | None:
    """`grants.give_up` of the grant that a resource uses now: it may have used another one until just before."""
    bound = lock(c, d, key)
    return None if bound is None else grants.give_up(c, d, bound.grant.id)


def find_all(c: Connection, d: Dialect, *, under: str | None, state: str | None, after: str, limit: int) -> list[Bound]:
    """The next connections in key order behind ``after``: of a provider (``under``), with grants in one state."""
    where, params = "n.resource_key > :after_key", {"after_key": after, "limit": limit}
    if under is not None:
        where += " AND n.resource_key >= :low AND n.resource_key < :high"
        params |= {"low": f"{under}/", "high": f"{under}0"}  # 0 is the character after /
    if state is not None:
        where += " AND g.state = :state"
        params["state"] = state
    return _select(c, d, where, params)


def of_grant(c: Connection, d: Dialect, id_: UUID) -> list[Bound]:
    """The connections that use a grant."""
    return _select(c, d, "n.grant_id = :id", {"id": d.id(id_)})


def set_seal(c: Connection, d: Dialect, key: str, seal: str | None) -> None:
    """Write the seal of a connection; the caller has locked its grant."""
    d.run(c, "UPDATE {connection} SET seal = :seal WHERE resource_key = :key", {"key": key, "seal": seal})


def _select(c: Connection, d: Dialect, where: str, params: Mapping[str, Any]) -> list[Bound]:
    rows = d.run(
        c,
        f"SELECT n.resource_key, n.details, n.seal, {_GRANT} FROM {{connection}} n"
        f" JOIN {{grant}} g ON g.id = n.grant_id WHERE {where} ORDER BY n.resource_key"
        + (" LIMIT :limit" if "limit" in params else ""),
        params,
        **_TYPES,
    )
    return [Bound(row[0], grants.of_row(row[3:]), row[1] or {}, row[2]) for row in rows]


def bind(
    c: Connection,
    d: Dialect,
    key: str,
    grant_id: UUID,
    details: Mapping[str, str],
    auth: str,
    *,
    seal: str | None = None,
) -> None:
    """Let a resource use a grant from now on; ``auth`` is written to its gate."""
    _insert(
        c, d, key, grant_id, details, seal,
        "UPDATE SET grant_id = excluded.grant_id, details = excluded.details, seal = excluded.seal,"
        " updated_at = excluded.updated_at",
    )  # fmt: skip
    gates.set_auth(c, d, key, auth)


def bind_if_new(
    c: Connection, d: Dialect, key: str, grant_id: UUID, details: Mapping[str, str], *, seal: str | None = None
) -> bool:
    """Connect a resource that has no connection, and open its gate; False if it has one by now."""
    made = _insert(c, d, key, grant_id, details, seal, "NOTHING")
    if made:
        gates.set_auth(c, d, key, "ok")
    return made


def _insert(
    c: Connection,
    d: Dialect,
    key: str,
    grant_id: UUID,
    details: Mapping[str, str],
    seal: str | None,
    otherwise: str,
) -> bool:
    check(key)
    json_ = "CAST(:details AS json)" if d.is_postgresql else ":details"
    row = d.run(
        c,
        "INSERT INTO {connection} (resource_key, grant_id, details, seal, created_at, updated_at)"
        f" VALUES (:key, :grant_id, {json_}, :seal, :now, :now) ON CONFLICT (resource_key) DO {otherwise} RETURNING 1",
        {
            "key": key,
            "grant_id": d.id(grant_id),
            "details": json.dumps(dict(details)),
            "seal": seal,
            "now": d.now(c),
        },
    ).first()
    return row is not None


# -- on the way through a consent page -----------------------------------------------------------------------


def expect(c: Connection, d: Dialect, id_: str, key: str, secrets: str, until: datetime) -> None:
    """Note that somebody was sent to the provider; delete expired notes, and an account's oldest beyond the bound."""
    now = d.now(c)
    d.run(c, "DELETE FROM {authorization} WHERE expires_at < :now", {"now": now})
    d.run(
        c,
        "INSERT INTO {authorization} (id, resource_key, secrets, expires_at) VALUES (:id, :key, :secrets, :until)",
        {"id": id_, "key": key, "secrets": secrets, "until": until},
    )
    oldest = d.chosen(
        "SELECT id FROM {authorization} WHERE resource_key = :key AND id <> :id ORDER BY expires_at DESC, id"
        " LIMIT 1000 OFFSET :others {skip_locked}"
    )
    values = {"key": key, "id": id_, "others": OPEN_CONSENTS.value - 1}
    d.run(c, f"DELETE FROM {{authorization}} WHERE id {oldest}", values)


def arrived(c: Connection, d: Dialect, id_: str, lasts: timedelta) -> tuple[str, str, bool, datetime] | None:
    """Use up an expected return, once: (resource key, secrets, whether it is in time, now); None if there is none.

    Its row stays without secrets, for ``lasts``, until its account is connected: see `end_return`.
    """
    row = d.run(
        c,
        "SELECT resource_key, secrets, expires_at FROM {authorization} WHERE id = :id AND secrets <> '' {row_lock}",
        {"id": id_},
        expires_at=TIME,
    ).first()
    if row is None:
        return None
    now = d.now(c)
    values = {"id": id_, "until": now + lasts}
    d.run(c, "UPDATE {authorization} SET secrets = '', expires_at = :until WHERE id = :id", values)
    return row[0], row[1], row[2] >= now, now


def end_return(c: Connection, d: Dialect, id_: str) -> bool:
    """Delete the row of a return that has arrived; False if it is gone, as after an erasure of its account."""
    return d.run(c, "DELETE FROM {authorization} WHERE id = :id AND secrets = ''", {"id": id_}).rowcount > 0


# -- accounts without usable credentials -------------------------------------------------------------------------------


def shut_unconnected(c: Connection, d: Dialect, key: str, *, tell: bool) -> bool:
    """Shut the gate of an account without a connection; False if it has one by now, or the gate is shut already.

    ``tell``: write the alert, too.
    """
    before = gates.lock_auth(c, d, key)
    if before == NOT_CONNECTED or find(c, d, key) is not None:
        return False
    gates.set_auth(c, d, key, NOT_CONNECTED)
    if tell:
        alerts.record(c, d, [of_credentials(key, NOT_CONNECTED, d.now(c))], d.now(c), lasting=True)
    return True


def shut_unreadable(c: Connection, d: Dialect, key: str, grant_id: UUID, version: int, *, tell: bool) -> bool:
    """Shut the gate of an account whose secrets no key here opens; False if they changed, or their grant is dead."""
    before = gates.lock_auth(c, d, key)
    grant = grants.read(c, d, grant_id)
    if grant is None or grant.version != version or grant.state not in USABLE:
        return False
    gates.set_auth(c, d, key, UNREADABLE)
    if tell and before != UNREADABLE:
        alerts.record(c, d, [of_credentials(key, UNREADABLE, d.now(c))], d.now(c), lasting=True)
    return True


def note_left(c: Connection, d: Dialect, key: str, error: str) -> None:
    """Note that a worker without the key leaves an account to others, unless another transaction locks its row."""
    d.run(
        c,
        "UPDATE {resource} SET last_error = :error, last_error_kind = :kind, last_error_code = :code,"
        " last_error_at = :now WHERE key = (SELECT key FROM {resource} WHERE key = :key {skip_locked})",
        {"key": key, "error": error, "kind": FailureKind.UNDECODABLE.value, "code": MISSING_KEY, "now": d.now(c)},
    )


def shut(c: Connection, d: Dialect, auth: str, after: str, limit: int) -> list[str]:
    """The next accounts whose gate is shut for this reason, by key."""
    rows = d.run(
        c,
        "SELECT key FROM {resource} WHERE auth = :auth AND key > :after_key ORDER BY key LIMIT :limit",
        {"auth": auth, "after_key": after, "limit": limit},
    )
    return [row[0] for row in rows]


def sealed_with(c: Connection, d: Dialect) -> dict[str, int]:
    """How many grants are encrypted with each key of the ring, by its id."""
    rows = d.run(
        c,
        "SELECT key_id, count(*) FROM {grant} WHERE secrets IS NOT NULL AND key_id IS NOT NULL GROUP BY key_id",
    )
    return {row[0]: int(row[1]) for row in rows}


def unreadable(sealed: dict[str, int], key_ids: Collection[str]) -> int:
    """How many of these grants none of these keys opens."""
    return sum(count for key_id, count in sealed.items() if key_id not in key_ids)
