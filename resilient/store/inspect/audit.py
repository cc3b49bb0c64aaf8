"""The audit: who changed what, why and when. Rows are added and settled, never changed otherwise.

Those older than `KEPT` are deleted, some at a time, when new ones are written.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.phrases import plain
from resilient.core.jobs.records import AuditInfo
from resilient.store.db.dialect import JSON, TIME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection

    from resilient.store.db.dialect import Dialect

KEPT: Final = timedelta(days=400)
PAGE_LIMIT: Final = 1_000
_LONGEST: Final = 2_000  # characters of a text
_BATCH: Final = 100


def begin(c: Connection, d: Dialect, *, who: str, via: str, action: str, subject: str, why: str | None) -> int:
    """Note a change before it is made; returns the row's number, for `settle`."""
    now = d.now(c)
    # Only the oldest by number are looked at: there is no index by time, and mostly none of them is old enough.
    oldest = d.chosen("SELECT id FROM {audit} ORDER BY id LIMIT :limit")
    old = d.chosen(f"SELECT id FROM {{audit}} WHERE at < :before AND id {oldest} ORDER BY id {{skip_locked}}")
    d.run(c, f"DELETE FROM {{audit}} WHERE id {old}", {"before": now - KEPT, "limit": _BATCH})
    values = {"who": who, "via": via, "action": action, "subject": subject, "why": why}
    texts = {name: None if text is None else plain(text)[:_LONGEST] for name, text in values.items()}
    number: int = d.run(
        c,
        "INSERT INTO {audit} (at, who, via, action, subject, why)"
        " VALUES (:now, :who, :via, :action, :subject, :why) RETURNING id",
        {"now": now, **texts},
    ).scalar_one()
    return number


def settle(c: Connection, d: Dialect, number: int, outcome: Mapping[str, Any]) -> None:
    """Note what a change brought."""
    document = "CAST(:outcome AS json)" if d.is_postgresql else ":outcome"
    values = {"id": number, "outcome": json.dumps(outcome)}
    d.run(c, f"UPDATE {{audit}} SET outcome = {document} WHERE id = :id AND outcome IS NULL", values)


def page(
    c: Connection, d: Dialect, *, who: str | None = None, subject: str | None = None, after: int | None, limit: int
) -> list[AuditInfo]:
    """The latest changes first, behind ``after``; of one person, of one subject."""
    where = ["1 = 1"]
    params: dict[str, Any] = {"limit": limit}
    for name, value in (("who", who), ("subject", subject)):
        if value is not None:
            where.append(f"{name} = :{name}")
            params[name] = value
    if after is not None:
        where.append("id < :number")
        params["number"] = after
    rows = d.run(
        c,
        f"SELECT id, at, who, via, action, subject, why, outcome FROM {{audit}} WHERE {' AND '.join(where)}"
        " ORDER BY id DESC LIMIT :limit",
        params,
        id=None, at=TIME, who=None, via=None, action=None, subject=None, why=None, outcome=JSON,
    )  # fmt: skip
    return [AuditInfo(*row) for row in rows]
