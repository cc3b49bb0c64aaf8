"""Sealed payloads in the rows: found by their first characters, and written anew under another key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from resilient.core.jobs.views import START
from resilient.store.db.dialect import ID

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from resilient.store.db.dialect import Dialect

WINDOW: Final = 2_000  # rows looked at in one transaction
_FIRST: Final = UUID(int=0)


class SealedRow(NamedTuple):
    """A job's payload, or that of a step's undo (``step``: its name)."""

    id: UUID
    step: str | None
    kind: str
    text: str


def under_other_keys(c: Connection, d: Dialect, key_id: str, after: UUID | None) -> tuple[list[SealedRow], UUID | None]:
    """The sealed payloads of the next window of jobs under other keys than this; None: it was the last window."""
    edge = d.run(
        c,
        "SELECT id FROM {job} WHERE id > :after_id ORDER BY id LIMIT 1 OFFSET :size",
        {"after_id": d.id(after or _FIRST), "size": WINDOW - 1},
        id=ID,
    ).first()
    last = None if edge is None else edge[0]
    upto = "" if last is None else " AND id <= :last_id"
    rows = d.run(
        c,
        f"SELECT id, kind, {_text(d, 'payload')} AS text FROM {{job}} WHERE id > :after_id{upto}"
        f" AND {_other(_text(d, 'payload'))} ORDER BY id",
        {"after_id": d.id(after or _FIRST), **({} if last is None else {"last_id": d.id(last)}), **_likes(key_id)},
        id=ID,
    )
    return [SealedRow(row.id, None, row.kind, row.text) for row in rows], last


def undos_under_other_keys(c: Connection, d: Dialect, key_id: str) -> list[SealedRow]:
    """The sealed payloads of undos under other keys than this, of `WINDOW` steps at most."""
    rows = d.run(
        c,
        f"SELECT workflow_id, name, undo_kind, {_text(d, 'undo_payload')} AS text FROM {{step}}"
        f" WHERE {_other(_text(d, 'undo_payload'))} ORDER BY workflow_id, name LIMIT :limit",
        {**_likes(key_id), "limit": WINDOW},
        workflow_id=ID,
    )
    return [SealedRow(row.workflow_id, row.name, row.undo_kind, row.text) for row in rows]


def write(c: Connection, d: Dialect, row: SealedRow, text: str) -> bool:
    """Put the same payload under another key; False if the row has another one meanwhile."""
    table, column, where = ("job", "payload", "id = :id")
    params = {"id": d.id(row.id), "old": row.text, "new": text}
    if row.step is not None:
        table, column, where = "step", "undo_payload", "workflow_id = :id AND name = :step"
        params["step"] = row.step
    new = "CAST(:new AS json)" if d.is_postgresql else ":new"
    sql = f"UPDATE {{{table}}} SET {column} = {new} WHERE {where} AND {_text(d, column)} = :old"
    return bool(d.run(c, sql, params).rowcount)


def _text(d: Dialect, column: str) -> str:
    return f"CAST({column} AS text)" if d.is_postgresql else column


def _other(text: str) -> str:
    return f"{text} LIKE :sealed AND {text} NOT LIKE :current AND {text} NOT LIKE :edited"


def _likes(key_id: str) -> dict[str, str]:
    """As the engine wrote it, and as an edit does: with a space."""
    return {"sealed": f"{START}:%", "current": f'{START}:"{key_id}:%', "edited": f'{START}: "{key_id}:%'}
