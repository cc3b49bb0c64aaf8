"""Reading jobs: one, a page of many, a bounded count, the history of one.

A page is cut by id (uuid7: in the order of creation), never by OFFSET. Several states become one sub-select
each, merged: each then has its own partial index. Every count has a limit (`COUNT_LIMIT`).

What serves which question, seen with EXPLAIN over 1,000,000 jobs (`tests/store/test_queries_plans.py`):

- ready or running jobs of a resource, exact, below or by pattern: `resilient_job_ready`,
  `resilient_job_running`
- finished jobs of a state, alone or since a time: `resilient_job_finished`
- scheduled jobs by time: `resilient_job_due`
- tags on PostgreSQL: `resilient_job_tags`; on SQLite they are looked into one by one, after what else narrows
- ids: the primary key; the newest of all: the primary key, backwards
- anything else reads the rows of its state's index, or all of them if no state is named

SQLite checks no text, and its driver fails a whole query over one byte that is no UTF-8, quoting the value. So text is
read as bytes there (`readable_columns`), and what cannot be read is reported in its own row: nobody's data gets into an
error or a log. PostgreSQL takes JSON that Python's reader refuses (a number of 5,000 digits, lists 2,000 deep), and its
driver would fail the whole query, too: documents come as text there.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import sqlalchemy as sa
from sqlalchemy import ColumnElement, LargeBinary, TypeDecorator
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import UnaryExpression

from resilient.core.base.errors import InvalidInput, JobNotFound
from resilient.core.jobs.records import NOT_LOADED, AttemptInfo, Count, JobInfo
from resilient.core.jobs.states import JobState
from resilient.store.db import tables
from resilient.store.db.dialect import ID
from resilient.store.db.direct import direct
from resilient.store.jobs.filters import JOB, JobFilter, conditions, in_state

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from sqlalchemy import Connection
    from sqlalchemy.engine import Dialect as SADialect
    from sqlalchemy.types import TypeEngine

    from resilient.store.db.dialect import Dialect


Order: TypeAlias = Literal["newest", "oldest"]
COUNT_LIMIT: Final = 10_000
PAGE_LIMIT: Final = 10_000  # rows of one page; ask for the next one instead
ATTEMPT: Final[sa.Table] = tables.metadata.tables["resilient_attempt"]
_JOB_COLUMNS: Final = tuple(JobInfo.__slots__)
_LARGE: Final = frozenset({"payload", "progress", "result"})
_PLUS_ID: Final[ColumnElement[Any]] = UnaryExpression(JOB.c.id, operator=operators.custom_op("+"))
_ATTEMPT_COLUMNS: Final = tuple(AttemptInfo.__slots__)


def get(c: Connection, d: Dialect, id_: UUID) -> JobInfo | None:
    """One job, or None."""
    row = (
        d.execute(c, sa.select(*readable_columns(d, JOB, _JOB_COLUMNS)).where(JOB.c.id == id_)).mappings().one_or_none()
    )
    return None if row is None else _info(row)


def require(c: Connection, d: Dialect, id_: UUID) -> JobInfo:
    """One job, or `JobNotFound`."""
    if (info := get(c, d, id_)) is None:
        raise JobNotFound(missing(id_))
    return info


def over(c: Connection, d: Dialect, ids: Sequence[UUID]) -> dict[UUID, JobInfo | None]:
    """Those of these jobs that have ended; None for one that does not exist."""
    columns = readable_columns(d, JOB, _JOB_COLUMNS)
    rows = d.execute(c, sa.select(*columns).where(JOB.c.id.in_(ids), JOB.c.finished_at.is_not(None))).mappings()
    ended: dict[UUID, JobInfo | None] = {info.id: info for info in map(_info, rows)}
    there = {row[0] for row in d.execute(c, sa.select(JOB.c.id).where(JOB.c.id.in_(ids)))}
    return dict.fromkeys(set(ids) - there) | ended  # one that was deleted between the two has ended all the same


def missing(*ids: UUID) -> str:
    """The error for ids that no job has."""
    return f"there is no job {', '.join(map(str, ids))}: it was never committed, or it was pruned since"


def page(
    c: Connection,
    d: Dialect,
    f: JobFilter,
    *,
    limit: int = 100,
    after: UUID | None = None,
    order: Order = "newest",
    payloads: bool = True,
) -> list[JobInfo]:
    """Up to ``limit`` jobs in the order of their ids, from the one that follows ``after``.

    Without ``payloads`` their documents, which may be large, stay where they are.
    """
    if not 1 <= limit <= PAGE_LIMIT:
        raise InvalidInput(f"limit={limit}: ask for 1 to {PAGE_LIMIT} jobs at a time, then for those after the last")
    newest = order == "newest"
    extra = [] if after is None else [JOB.c.id < after if newest else JOB.c.id > after]
    columns = readable_columns(d, JOB, [name for name in _JOB_COLUMNS if payloads or name not in _LARGE])
    rows = d.execute(c, picked(d, f.at(d.now(c)), columns, extra, limit=limit, newest=newest))
    left_out = {} if payloads else dict.fromkeys(_LARGE, NOT_LOADED)
    return [_info({**row, **left_out}) for row in rows.mappings()]


def count(c: Connection, d: Dialect, f: JobFilter, *, limit: int = COUNT_LIMIT) -> Count:
    """How many jobs fit, counted up to ``limit``."""
    if limit < 1:
        raise InvalidInput(f"limit={limit}: count up to at least 1")
    inner = picked(d, f.at(d.now(c)), (JOB.c.id,), [], limit=limit + 1, newest=None).subquery()
    number: int = d.execute(c, sa.select(sa.func.count()).select_from(inner)).scalar_one()
    return Count(min(number, limit), more=number > limit)


def picked(
    d: Dialect,
    f: JobFilter,
    columns: Sequence[ColumnElement[Any]],
    extra: Sequence[ColumnElement[bool]],
    *,
    limit: int,
    newest: bool | None,
    whole: bool = True,
) -> sa.Select[Any]:
    """A SELECT of ``columns`` (with the id first) that fit; ``newest`` None leaves the order open.

    ``whole``: the caller wants one page, and does not come back for all the others.
    """
    where = [*conditions(f, d), *extra]
    # A time range is served by the index of the state's time. SQLite would rather walk the primary key, which is in
    # order already, past every job that was ever finished (0.3 s for a million); a plus sign forbids that.
    by = JOB.c.id if d.is_postgresql or not (whole and f.ranged) else _PLUS_ID

    def branch(state: str | None) -> sa.Select[Any]:
        one = sa.select(*columns).where(*where, *([] if state is None else [in_state(state)]))
        return _ordered(one, by, newest=newest).limit(limit)

    states = tuple(dict.fromkeys(f.state))
    if len(states) < 2:  # noqa: PLR2004 - nothing to merge
        return branch(states[0] if states else None)
    # SQLite takes no LIMIT inside a UNION, only inside a sub-select of one.
    parts = [sa.select(branch(state).subquery()) for state in states]
    merged = sa.union_all(*parts).subquery()
    return _ordered(sa.select(merged), merged.c.id, newest=newest).limit(limit)


def _ordered(statement: sa.Select[Any], id_: ColumnElement[Any], *, newest: bool | None) -> sa.Select[Any]:
    if newest is None:
        return statement
    return statement.order_by(id_.desc() if newest else id_)


def attempts(c: Connection, d: Dialect, job_id: UUID, *, limit: int = 100) -> list[AttemptInfo]:
    """The latest executions of a job that did not simply succeed, oldest first."""
    columns = readable_columns(d, ATTEMPT, _ATTEMPT_COLUMNS)
    newest = sa.select(*columns).where(ATTEMPT.c.job_id == job_id).order_by(ATTEMPT.c.id.desc()).limit(limit)
    return [AttemptInfo(**row) for row in reversed(d.execute(c, newest).mappings().all())]


def _info(row: Mapping[Any, Any]) -> JobInfo:
    tags = row["tags"]
    if tags is not None and not isinstance(tags, dict):
        tags = {NOT_READABLE: "they are no JSON object"}
    return JobInfo(**{**row, "tags": tags, "state": JobState(row["state"])})


# -- columns that can be read for certain ------------------------------------------------------------------------------

NOT_READABLE: Final = "not_readable"


def readable_columns(d: Dialect, table: sa.Table, names: Sequence[str]) -> list[ColumnElement[Any]]:
    """These columns, documents as their text, on SQLite all text as bytes; see the top of this file."""
    return [_readable(table.c[name], as_text=d.is_postgresql) for name in names]


def _readable(column: ColumnElement[Any], *, as_text: bool) -> ColumnElement[Any]:
    if isinstance(column.type, sa.JSON):
        text = sa.cast(column, sa.Text if as_text else sa.LargeBinary)
        return sa.type_coerce(text, ReadableDocument()).label(column.key)
    if isinstance(column.type, (sa.String, sa.Text)) and not as_text:
        return sa.type_coerce(sa.cast(column, sa.LargeBinary), ReadableText()).label(column.key)
    return column


def document(d: Dialect, name: str) -> str:
    """A column of documents in a statement, for `ReadableDocument`."""
    return f"CAST({name} AS {'text' if d.is_postgresql else 'blob'})"


class ReadableText(TypeDecorator[str]):
    """Text of which a replacement character stands for each byte that is no UTF-8."""

    impl = LargeBinary
    cache_ok = True

    def process_result_value(self, value: Any, dialect: SADialect) -> str | None:  # noqa: ARG002 - SQLAlchemy asks so
        """Always text."""
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


class ReadableDocument(TypeDecorator[Any]):
    """JSON, or why it cannot be read: nobody's data gets into an error."""

    impl = LargeBinary
    cache_ok = True

    def load_dialect_impl(self, dialect: SADialect) -> TypeEngine[Any]:
        """Text on PostgreSQL, bytes on SQLite."""
        return dialect.type_descriptor(sa.Text() if dialect.name == "postgresql" else LargeBinary())

    def process_result_value(self, value: Any, dialect: SADialect) -> Any:  # noqa: ARG002 - as above
        """The document, or ``{"not_readable": why}``."""
        if not isinstance(value, (bytes, str)):
            return value
        try:
            return json.loads(value if isinstance(value, str) else value.decode())
        except UnicodeDecodeError as error:
            return {NOT_READABLE: f"byte {error.start} of {len(value)} is no UTF-8"}
        except ValueError as error:  # whose message is a place and a rule
            return {NOT_READABLE: f"it is no JSON: {error}"}
        except RecursionError:
            return {NOT_READABLE: "it is nested too deeply"}


@direct
def locked_jobs(c: Connection, d: Dialect, ids: Sequence[UUID]) -> set[UUID]:
    """Those of these jobs that are locked at the moment: one statement, which waits for no lock."""
    rows = d.run(
        c,
        "WITH free AS MATERIALIZED"
        f" (SELECT id FROM {{job}} WHERE id {d.among('ids', 'uuid')} ORDER BY id {{leaf_lock}})"
        f" SELECT id FROM {{job}} WHERE id {d.among('ids', 'uuid')} AND id NOT IN (SELECT id FROM free)",
        {"ids": d.pack_ids(ids)},
        id=ID,
    )
    return {r[0] for r in rows}
