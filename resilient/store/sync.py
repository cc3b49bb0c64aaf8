"""Cursors of sync streams. A cursor is only written over the version it was read with.

A stream of a resource may have parts, one for each set of parameters, each with its own cursor. A reset writes like
everybody else, so a checkpoint under way notices it.

May use: `db`, `jobs`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import sqlalchemy as sa

from resilient.core.sync.stream import Cursor, CursorInfo
from resilient.store.db.dialect import JSON, TIME, Dialect
from resilient.store.db.tables import metadata
from resilient.store.jobs.filters import matches
from resilient.store.jobs.insert import json_param

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

Place = tuple[str, str, str]  # resource key, stream, part
CURSOR: Final = metadata.tables["resilient_cursor"]
_COLUMNS: Final = (
    "version, pass_id, is_full, full_pass, swept_pass, position, pages, records, rejected, full_at, completed_at,"
    " error, expected"
)
_TYPES: Final[dict[str, Any]] = {"position": JSON, "full_at": TIME, "completed_at": TIME}
_AT: Final = " WHERE resource_key = :resource_key AND stream = :stream AND part = :part"


class Where(NamedTuple):
    """Which cursors: those of a stream, of the resources that a pattern matches, of one part; None: of all."""

    stream: str | None = None
    pattern: str | None = None
    part: str | None = None

    def conditions(self, d: Dialect) -> list[sa.ColumnElement[bool]]:
        """For SQLAlchemy."""
        columns = (("stream", self.stream), ("part", self.part))
        pattern = [] if self.pattern is None else [matches(CURSOR.c.resource_key, self.pattern, d)]
        return [CURSOR.c[name] == value for name, value in columns if value is not None] + pattern


def read(c: Connection, d: Dialect, place: Place) -> tuple[Cursor, datetime]:
    """The cursor of a stream, and the time; a stream that was never read is at its beginning."""
    now = d.now(c)
    row = d.run(c, f"SELECT {_COLUMNS} FROM {{cursor}}{_AT}", _at(place), **_TYPES).first()
    return Cursor() if row is None else _cursor(row), now


def decisions_since(c: Connection, d: Dialect, place: Place, job: UUID, execution: int) -> list[str]:
    """What was decided about each execution of a running job, beginning with the one that wrote this cursor.

    ``execution`` is the number of that one (0: nobody noted it). Empty if another job wrote the cursor, if the job's
    progress was cleared (a retry or a replacement clears it), or if an execution has no row in the history: then nobody
    knows whether the operation is the same.
    """
    if execution < 1:
        return []
    rows = d.run(
        c,
        "SELECT {attempt}.decision, {attempt}.execution, {job}.executions"
        " FROM {cursor} JOIN {job} ON {job}.id = {cursor}.job_id"
        " JOIN {attempt} ON {attempt}.job_id = {job}.id AND {attempt}.execution >= :execution"
        " WHERE {cursor}.resource_key = :resource_key AND {cursor}.stream = :stream AND {cursor}.part = :part"
        " AND {job}.id = :job AND {job}.progress IS NOT NULL",
        {**_at(place), "job": d.id(job), "execution": execution},
    ).all()
    if not rows or not {row.execution for row in rows}.issuperset(range(execution, rows[0].executions)):
        return []
    return [row.decision for row in rows]


def write_if_unmoved(
    c: Connection, d: Dialect, place: Place, cursor: Cursor, job: UUID | None, now: datetime, *, keep_job: bool = False
) -> bool:
    """Save a cursor over the version it was made from; False if another writer was faster.

    ``keep_job``: the row keeps the id of the job that read the latest page; ``job`` is not written.
    """
    values = {
        **_at(place), "version": cursor.version, "pass_id": cursor.pass_id, "is_full": cursor.full,
        "full_pass": cursor.full_pass, "swept_pass": cursor.swept_pass, "position": json.dumps(cursor.to_json()),
        "pages": cursor.pages, "records": cursor.records, "rejected": cursor.rejected, "full_at": cursor.full_at,
        "completed_at": cursor.completed_at, "error": cursor.error, "expected": cursor.expected,
        "job_id": None if job is None else d.id(job), "now": now,
    }  # fmt: skip
    position, job_id = (
        json_param(d, "position", "json"),
        "CAST(:job_id AS uuid)" if d.is_postgresql else ":job_id",
    )
    if keep_job:
        job_id = "job_id"
    if cursor.version:
        done = d.run(
            c,
            "UPDATE {cursor} SET version = version + 1, pass_id = :pass_id, is_full = :is_full, full_pass = :full_pass,"
            f" swept_pass = :swept_pass, position = {position}, pages = :pages, records = :records,"
            " rejected = :rejected, full_at = :full_at, completed_at = :completed_at, error = :error,"
            f" expected = :expected, job_id = {job_id}, updated_at = :now{_AT} AND version = :version RETURNING 1",
            values,
        )
    else:
        done = d.run(
            c,
            f"INSERT INTO {{cursor}} (resource_key, stream, part, {_COLUMNS}, job_id, created_at, updated_at)"
            " VALUES (:resource_key, :stream, :part, 1, :pass_id, :is_full, :full_pass, :swept_pass,"
            f" {position}, :pages, :records, :rejected, :full_at, :completed_at, :error, :expected, {job_id},"
            " :now, :now)"
            " ON CONFLICT DO NOTHING RETURNING 1",
            values,
        )
    return done.first() is not None


def list_cursors(c: Connection, d: Dialect, where: Where) -> list[CursorInfo]:
    """Every cursor that fits, ordered by stream, resource and part."""
    order = (CURSOR.c.stream, CURSOR.c.resource_key, CURSOR.c.part)
    return [_info(row) for row in d.execute(c, sa.select(CURSOR).where(*where.conditions(d)).order_by(*order))]


def reset(c: Connection, d: Dialect, where: Where, why: str) -> int:
    """Let the next pass of each that fits be a full one; returns how many there were.

    One statement, however many accounts: SQLite has one writer. An empty position is the beginning.
    """
    start = {"is_full": True, "position": {}, "error": why, "job_id": None}
    change = sa.update(CURSOR).values(version=CURSOR.c.version + 1, updated_at=d.now(c), **start)
    return d.execute(c, change.where(*where.conditions(d))).rowcount


def forget(c: Connection, d: Dialect, where: Where) -> int:
    """Delete cursors, as if the streams had never been read; returns how many there were.

    The passes of one that is read again are numbered from 1 (`docs/sync.md` says what that means for rows that stay).
    """
    return d.execute(c, sa.delete(CURSOR).where(*where.conditions(d))).rowcount


def _at(place: Place) -> dict[str, str]:
    return dict(zip(("resource_key", "stream", "part"), place, strict=True))


def _cursor(row: Any) -> Cursor:
    return Cursor.from_json(
        row.position or {}, version=row.version, pass_id=row.pass_id, full=bool(row.is_full), full_pass=row.full_pass,
        swept_pass=row.swept_pass, pages=row.pages, records=row.records, rejected=row.rejected, full_at=row.full_at,
        completed_at=row.completed_at, error=row.error, expected=row.expected,
    )  # fmt: skip


def _info(row: Any) -> CursorInfo:
    return CursorInfo(row.resource_key, row.stream, row.part, _cursor(row), row.updated_at)
