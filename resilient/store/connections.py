"""Connections: which grant a resource uses, and people on their way through a provider's consent page."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from resilient.core.resource_key import check
from resilient.core.tokens import EMPTY
from resilient.store import gates, grants
from resilient.store.dialect import JSON, TIME

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.store.dialect import Dialect
    from resilient.store.grants import Grant

_GRANT: Final = ", ".join(f"g.{name}" for name in grants.TYPES)
_TYPES: Final = {name: type_ for name, type_ in grants.TYPES.items() if type_ is not None} | {"details": JSON}


@dataclass(frozen=True, slots=True)
class Bound:
    """A resource and its grant."""

    resource_key: str
    grant: Grant
    details: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    seal: str | None = None  # see `engine/seals.py`


def find(c: Connection, d: Dialect, key: str) -> Bound | None:
    """The connection of a resource."""
    return next(iter(_select(c, d, "n.resource_key = :key", {"key": key})), None)


def find_all(c: Connection, d: Dialect, *, under: str | None, state: str | None, after: str, limit: int) -> list[Bound]:
    """Connections in key order, behind ``after``: those of a provider (``under``), in one state."""
    wanted, params = "n.resource_key > :after_key", {"after_key": after, "limit": limit}
    if under is not None:
        wanted += " AND n.resource_key >= :low AND n.resource_key < :high"
        params |= {"low": f"{under}/", "high": f"{under}0"}
    if state is not None:
        wanted += " AND g.state = :state"
        params["state"] = state
    return _select(c, d, wanted, params)


def of_grant(c: Connection, d: Dialect, id_: UUID) -> list[Bound]:
    """The connections that use a grant."""
    return _select(c, d, "n.grant_id = :id", {"id": d.id(id_)})


def set_seal(c: Connection, d: Dialect, key: str, seal: str | None) -> None:
    """Sign a connection as it is; the caller holds its grant."""
    d.run(c, "UPDATE {connection} SET seal = :seal WHERE resource_key = :key", {"key": key, "seal": seal})


def _select(c: Connection, d: Dialect, wanted: str, params: Mapping[str, Any]) -> list[Bound]:
    rows = d.run(
        c,
        f"SELECT n.resource_key, n.details, n.seal, {_GRANT} FROM {{connection}} n"
        f" JOIN {{grant}} g ON g.id = n.grant_id WHERE {wanted} ORDER BY n.resource_key"
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
    """This resource uses that grant from now on; ``auth`` is what its gate says then."""
    _insert(
        c, d, key, grant_id, details, seal,
        "UPDATE SET grant_id = excluded.grant_id, details = excluded.details, seal = excluded.seal,"
        " updated_at = excluded.updated_at",
    )  # fmt: skip
    gates.set_auth(c, d, key, auth)


def bind_if_new(
    c: Connection, d: Dialect, key: str, grant_id: UUID, details: Mapping[str, str], *, seal: str | None = None
) -> bool:
    """The same for a resource without a connection, whose gate opens; False if it has one, perhaps only just now."""
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
    """Somebody was sent to the provider; those who never came back are forgotten."""
    now = d.now(c)
    d.run(c, "DELETE FROM {authorization} WHERE expires_at < :now", {"now": now})
    d.run(
        c,
        "INSERT INTO {authorization} (id, resource_key, secrets, expires_at) VALUES (:id, :key, :secrets, :until)",
        {"id": id_, "key": key, "secrets": secrets, "until": until},
    )


def arrived(c: Connection, d: Dialect, id_: str) -> tuple[str, str, bool] | None:
    """Use up an expected return: (resource key, secrets, whether it came in time)."""
    row = d.run(
        c,
        "DELETE FROM {authorization} WHERE id = :id RETURNING resource_key, secrets, expires_at",
        {"id": id_},
        expires_at=TIME,
    ).first()
    return None if row is None else (row[0], row[1], row[2] >= d.now(c))
