"""Which jobs are meant: `JobFilter`, and the SQL condition it stands for.

States are written into the statement instead of bound: the job table's indexes are partial (``WHERE state =
'ready'``), and neither database uses a partial index for a parameter. A finished state also says
``finished_at IS NOT NULL``, which is what its index is partial on. Resource patterns become a range of the
key (the part before the first wildcard, for the index) and a match that counts the slashes, so that a
wildcard cannot cross one.

Times may be given as a `timedelta`, which means that long ago by the database's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from resilient.core.base import resource_key
from resilient.core.base.errors import FailureKind, InvalidInput, NaiveDatetime
from resilient.core.base.instants import add, in_utc
from resilient.core.base.misfit import check_storable, explained_class
from resilient.core.jobs.states import TERMINAL, JobState
from resilient.store.db import tables

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sqlalchemy import ColumnElement

    from resilient.store.db.dialect import Dialect

Words: TypeAlias = "str | Iterable[str]"
WordsOrNone: TypeAlias = "str | Iterable[str | None]"
Moment: TypeAlias = "datetime | timedelta"
JOB: Final[sa.Table] = tables.metadata.tables["resilient_job"]
GOING: Final = tuple(state for state in JobState if state not in TERMINAL)


class Criteria(TypedDict, total=False):
    """`JobFilter` as keyword arguments."""

    ids: Iterable[UUID | str]
    state: Words
    kind: Words
    resource: Words
    within: str
    tags: Mapping[str, str]
    unique_key: str
    ordering_key: str
    error_kind: WordsOrNone
    error_code: WordsOrNone
    text: str
    worker: str
    struggling: bool
    created_after: Moment
    created_before: Moment
    finished_after: Moment
    finished_before: Moment
    run_after: Moment
    run_before: Moment


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Jobs that fit *all* of what is given; where several values are given, any one of them.

    ``resource``: keys or patterns (``github/*``, ``github/**``); ``within``: a key and everything below it;
    ``tags``: all of these; ``text``: occurs in the last error, in any case; ``worker``: the worker that runs
    it; ``struggling``: attempts used, and still going; None in ``error_kind`` or ``error_code``: jobs without one.
    ``*_after`` includes its moment, ``*_before`` does not; a timedelta is that long ago.

    Raises `InvalidInput` for unknown states and kinds of error, bad patterns and naive datetimes.
    """

    ids: tuple[UUID, ...] | None = None
    state: tuple[str, ...] = ()
    kind: tuple[str, ...] = ()
    resource: tuple[str, ...] = ()
    within: str | None = None
    tags: tuple[tuple[str, str], ...] = ()
    unique_key: str | None = None
    ordering_key: str | None = None
    error_kind: tuple[str | None, ...] = ()
    error_code: tuple[str | None, ...] = ()
    text: str | None = None
    worker: str | None = None
    struggling: bool = False
    created_after: Moment | None = None
    created_before: Moment | None = None
    finished_after: Moment | None = None
    finished_before: Moment | None = None
    run_after: Moment | None = None
    run_before: Moment | None = None

    def __post_init__(self) -> None:
        """One value stands for itself, and not for its letters."""
        for name in ("state", "kind", "resource", "error_kind", "error_code"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, (value,))
        for name in _TEXTS:
            words = getattr(self, name)
            for word in (words,) if isinstance(words, str) else words or ():
                check_storable(name, word or "")
        for pair in self.tags:
            check_storable("tags", "=".join(pair))

    @classmethod
    def of(cls, criteria: Criteria) -> JobFilter:
        """A checked filter; None and empty values do not count as given."""
        names = {f.name for f in fields(cls)}
        if unknown := sorted(set(criteria) - names):
            raise InvalidInput(f"there is no filter {unknown[0]!r}: use one of {', '.join(sorted(names))}")
        values: dict[str, Any] = {k: v for k, v in criteria.items() if v is not None}
        for name in ("state", "kind", "resource"):
            if name in values:
                values[name] = _words(values[name])
        for name in ("error_kind", "error_code"):
            if name in values:
                values[name] = _words_or_none(values[name])
        if "ids" in values:
            values["ids"] = tuple(as_id(i) for i in values["ids"])
        if "tags" in values:
            values["tags"] = tuple(sorted((str(k), str(v)) for k, v in values["tags"].items()))
        made = cls(**values)
        made._check()
        return made.with_states(GOING) if made.struggling else made

    def _check(self) -> None:
        for state in self.state:
            if state not in list(JobState):
                raise InvalidInput(f"{state!r} is not a job state: use one of {', '.join(JobState)}")
        for kind in self.error_kind:
            if kind is not None and kind not in list(FailureKind):
                raise InvalidInput(f"{kind!r} is not a kind of error: use one of {', '.join(FailureKind)}")
        if self.struggling and self.state and not set(self.state) & set(GOING):
            raise InvalidInput(f"struggling jobs are still going: leave out state={', '.join(self.state)}")
        for pattern in self.resource:
            resource_key.check_pattern(pattern)
        if self.within is not None:
            resource_key.check_stored(self.within)
        for name in _MOMENTS:
            moment = getattr(self, name)
            if isinstance(moment, datetime) and moment.tzinfo is None:
                raise NaiveDatetime(
                    f"{name}={moment.isoformat()} has no time zone: use datetime.now(UTC) or a timedelta"
                )

    @property
    def ranged(self) -> bool:
        """Whether the filter has a time range that an index serves."""
        return any(getattr(self, name) is not None for name in _MOMENTS if not name.startswith("created"))

    def with_states(self, allowed: Iterable[JobState]) -> JobFilter:
        """The same jobs, of these states only."""
        names = tuple(str(s) for s in allowed)
        return replace(self, state=tuple(s for s in self.state if s in names) if self.state else names)

    def at(self, now: datetime) -> JobFilter:
        """The filter with every timedelta turned into a time, and every time one that a database reads."""
        times: dict[str, Any] = {}
        for name in _MOMENTS:
            moment = getattr(self, name)
            if moment is not None:
                at = add(now, -moment) if isinstance(moment, timedelta) else in_utc(moment)
                times |= {name: at} if at is not moment else {}
        return replace(self, **times) if times else self


_TEXTS: Final = ("kind", "unique_key", "ordering_key", "error_code", "text", "worker")
_MOMENTS: Final = tuple(f.name for f in fields(JobFilter) if f.name.endswith(("_after", "_before")))
_TIMES: Final = {"created": "created_at", "finished": "finished_at", "run": "run_at"}


def as_id(value: UUID | str, what: str = "job") -> UUID:
    """A job's id, or that of ``what``; `InvalidInput` if it is none."""
    if isinstance(value, UUID):
        return value
    try:
        return UUID(value)
    except (ValueError, AttributeError, TypeError):
        raise InvalidInput(
            f"{value!r} is not a {what} id: ids look like 0195f3a2-7c1e-7d3a-9b0e-2f6f3c1a8e55"
        ) from None


def _words(value: Words) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(str(v) for v in value)


def _words_or_none(value: WordsOrNone) -> tuple[str | None, ...]:
    return (value,) if isinstance(value, str) else tuple(None if v is None else str(v) for v in value)


def conditions(f: JobFilter, d: Dialect) -> list[ColumnElement[bool]]:
    """Everything but the state, as conditions that must all hold. ``f`` has been through `JobFilter.at`."""
    t = JOB.c
    where: list[ColumnElement[bool]] = []
    if f.ids is not None:
        where.append(t.id.in_(f.ids))
    by_word: tuple[tuple[ColumnElement[str | None], tuple[str | None, ...]], ...] = (
        (t.kind, f.kind),
        (t.last_error_kind, f.error_kind),
        (t.last_error_code, f.error_code),
    )
    where += [_one_of(column, words) for column, words in by_word if words]
    if f.resource:
        where.append(sa.or_(*(matches(t.resource_key, p, d) for p in f.resource)))
    if f.within is not None:
        where.append(within(t.resource_key, f.within))
    if f.tags:
        where.append(_tagged(f.tags, d))
    same = {t.unique_key: f.unique_key, t.ordering_key: f.ordering_key, t.locked_by: f.worker}
    where += [column == value for column, value in same.items() if value is not None]
    if f.struggling:
        where += [t.attempts > 0, t.finished_at.is_(None)]
    if f.text is not None:
        where.append(t.last_error.icontains(f.text, autoescape=True))
    return where + _moments(f)


def _one_of(column: ColumnElement[str | None], words: tuple[str | None, ...]) -> ColumnElement[bool]:
    texts = [word for word in words if word is not None]
    parts = [column == texts[0] if len(texts) == 1 else column.in_(texts)] if texts else []
    return sa.or_(*parts, *([column.is_(None)] if None in words else []))


def _moments(f: JobFilter) -> list[ColumnElement[bool]]:
    bounds: list[ColumnElement[bool]] = []
    for word, column in _TIMES.items():
        if (after := getattr(f, f"{word}_after")) is not None:
            bounds.append(JOB.c[column] >= after)
        if (before := getattr(f, f"{word}_before")) is not None:
            bounds.append(JOB.c[column] < before)
    return bounds


def in_state(state: str) -> ColumnElement[bool]:
    """A condition for this state, in the words of its partial index."""
    one: ColumnElement[bool] = JOB.c.state == sa.literal(str(state), literal_execute=True)
    return sa.and_(one, JOB.c.finished_at.is_not(None)) if state in TERMINAL else one


def _tagged(tags: tuple[tuple[str, str], ...], d: Dialect) -> ColumnElement[bool]:
    """All of these tags: containment by the GIN index on PostgreSQL, a look into each document on SQLite."""
    if d.is_postgresql:
        contains: ColumnElement[bool] = sa.type_coerce(JOB.c.tags, JSONB).contains(dict(tags))
        return contains
    readable = sa.case((sa.func.json_valid(JOB.c.tags) == 1, JOB.c.tags))  # one bad row must not fail the others
    each = sa.func.json_each(readable).table_valued("key", "value")
    return sa.and_(
        JOB.c.tags.is_not(None),
        *(sa.exists(sa.select(1).select_from(each).where(each.c.key == k, each.c.value == v)) for k, v in tags),
    )


def within(column: ColumnElement[str], key: str) -> ColumnElement[bool]:
    """The key itself and everything below it; a range, because keys sort as bytes and ``0`` follows ``/``."""
    inner = sa.or_(column == key, column > f"{key}/")
    return sa.and_(column >= key, column < f"{key}0", inner)


def matches(column: ColumnElement[str], pattern: str, d: Dialect) -> ColumnElement[bool]:
    """`resource_key.matches` as a condition."""
    stem, everything = (pattern[:-3], True) if pattern.endswith("/**") else (pattern, False)
    if not ("*" in stem or "?" in stem):
        return sa.and_(column > f"{stem}/", column < f"{stem}0") if everything else column == stem
    if not everything:
        return _glob(column, stem, d)
    deeper = range(1, resource_key.MAX_SEGMENTS - resource_key.depth(stem) + 1)
    return sa.or_(*(_glob(column, stem + "/*" * n, d) for n in deeper)) if deeper else sa.false()


def _glob(column: ColumnElement[str], pattern: str, d: Dialect) -> ColumnElement[bool]:
    """Match a pattern without ``**`` segment by segment.

    Both must have the same number of slashes, so that no wildcard stands for one. That is said as a pattern, because
    planners know how many keys fit a pattern, and nothing of a computed number.
    """
    prefix = pattern[: min(pattern.find(w) for w in "*?" if w in pattern)]
    if d.is_postgresql:
        like = pattern.replace("_", r"\_").replace("*", "%").replace("?", "_")
        fits = column.like(like, escape="\\")
        deeper = column.not_like("%/" * (pattern.count("/") + 1) + "%")
    else:
        fits = column.op("GLOB")(pattern)  # LIKE would ignore case here
        deeper = column.op("NOT GLOB")("*/" * (pattern.count("/") + 1) + "*")
    parts: list[ColumnElement[bool]] = [fits, deeper]
    if prefix:
        parts += [column >= prefix, column < prefix + resource_key.FAR]
    return sa.and_(*parts)
