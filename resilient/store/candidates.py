"""Ready jobs as the claim sees them: the best of each key, by the partial index made for it."""

from __future__ import annotations

from itertools import starmap
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.store.dialect import ID, JSON, TIME
from resilient.store.types import AnyText

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.store.dialect import Dialect


class ClaimedJob(NamedTuple):
    """A job as it was right before its claim: ``version`` is one less than the fence."""

    id: UUID
    version: int
    kind: str
    resource_key: str
    payload: str | None  # JSON
    payload_version: int
    priority: int
    expires_at: datetime | None
    attempts: int
    max_attempts: int | None
    executions: int
    deferrals: int
    rescues: int
    idempotency_key: str | None
    sent: Any
    tags: Mapping[str, str] | None
    once_more: bool
    ordering_key: str | None
    order_no: int | None
    followed: bool


CLAIM_COLUMNS: Final = ", ".join(ClaimedJob._fields).replace("payload,", "{payload} AS payload,")
_READY: Final = f"SELECT {CLAIM_COLUMNS} FROM {{job}} WHERE state = 'ready' AND resource_key = "
_BEST_FIRST: Final = " ORDER BY priority DESC, run_at, id"
_SQLITE_TYPES: Final = dict.fromkeys(ClaimedJob._fields) | {
    "id": ID,
    "payload": AnyText(),
    "expires_at": TIME,
    "sent": JSON,
    "tags": JSON,
}


def best_sql(key: str, also: str = "") -> str:
    """The best ``:per_key`` ready jobs of the resource that an expression names."""
    return _READY + key + also + _BEST_FIRST + " LIMIT :per_key"


def best_ready(
    c: Connection, d: Dialect, keys: Sequence[str], limit: int, kinds: Sequence[str] | None = None
) -> dict[str, list[ClaimedJob]]:
    """The best ``limit`` ready jobs of each key, best first; with ``kinds`` only of those."""
    found: dict[str, list[ClaimedJob]] = {}
    if not keys:
        return found
    params: dict[str, Any] = {"per_key": limit}
    also = ""
    if kinds is not None:
        also = f" AND kind IN (SELECT value FROM {d.array('kinds', 'text')})"
        params["kinds"] = d.pack_keys(kinds)
    if d.is_postgresql:
        rows = d.run(
            c,
            f"SELECT j.* FROM unnest(CAST(:keys AS text[])) AS k(key) CROSS JOIN LATERAL ({best_sql('k.key', also)}) j",
            {**params, "keys": d.pack_keys(keys)},
        )
        for row in starmap(ClaimedJob, rows):
            found.setdefault(row.resource_key, []).append(row)
        return found
    for key in keys:  # no LATERAL, and no round trip to save
        rows = d.run(c, best_sql(":key", also), {**params, "key": key}, **_SQLITE_TYPES)
        if jobs := list(starmap(ClaimedJob, rows)):
            found[key] = jobs
    return found
