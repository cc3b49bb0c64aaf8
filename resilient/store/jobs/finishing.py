"""Finishing: decisions about running jobs are written under their fences, with their history.

A write names the version it was decided on and raises it; jobs that no longer match are not written and are missing
from the returned ids. Whatever becomes ready again gets its turn in the same transaction. A batch is one parameter.

Nothing is decided here: a `Transition` has alternatives for a cancel, or another execution, that was requested
meanwhile, and the statement only chooses.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy.exc import DBAPIError

from resilient.core.base.errors import FailureKind
from resilient.core.jobs import marks
from resilient.core.jobs.backoff import Retry
from resilient.core.jobs.decide import decide, once_more
from resilient.core.jobs.outcomes import SUCCEEDED, JobFacts, Transition
from resilient.core.jobs.states import TERMINAL, JobState
from resilient.store.db.dialect import ID, JSON, LOCK_WAIT, SHORT_LOCK_WAIT, Dialect, is_lock_timeout, limit_lock_waits
from resilient.store.jobs import ready
from resilient.store.jobs.columns import selected, types
from resilient.store.jobs.dependencies import Ends, release_followers
from resilient.store.jobs.insert import NEXT_KEY, grant_wishes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from uuid import UUID

    from sqlalchemy import Connection


@dataclass(frozen=True, slots=True)
class Finish:
    """The decision about a job whose fence is believed to hold, and what its history needs beside that.

    ``marks``: the job's unanswered requests; None: those of the row.
    """

    id: UUID
    version: int
    transition: Transition
    marks: Mapping[str, Any] | None = None
    execution: int = 0
    worker_id: str | None = None
    started_at: datetime | None = None


# -- the statements ------------------------------------------------------------------------------------------
# `_updates` makes both from the SQL of each field of a transition: a column of the batch, or a constant. The row's own
# flags, under its lock, choose between a transition and its alternatives (`Transition.choices`), because a cancel may
# have been requested meanwhile, or another execution.

_CANCELLED: Final = "{job}.cancel_requested"
_ONCE_MORE: Final = "({job}.once_more AND NOT {job}.cancel_requested)"
_NULL, _TRUE, _FALSE = "NULL", "true", "false"


# A claim gives a unique key away that counts until the start; a job that has not started takes it back, if it is free.
# One that ran has not started either if that run was the end of an operation: somebody has retried it since.
_ENDS: Final = ("dead", "expired", "cancelled", "retried", "replaced", "once_more")
_HAS_NOT_STARTED: Final = (
    "({job}.executions < 2 OR EXISTS (SELECT 1 FROM {attempt} a WHERE a.job_id = {job}.id"
    f" AND a.execution = {{job}}.executions - 1 AND a.decision IN {_ENDS}))"
)
_TAKEN_BACK: Final = (
    f"CASE WHEN {{job}}.unique_lock IS NULL AND {{job}}.unique_key IS NOT NULL AND {_HAS_NOT_STARTED}"
    " AND NOT EXISTS (SELECT 1 FROM {job} o"
    " WHERE o.kind = {job}.kind AND o.unique_lock = {job}.unique_key) THEN {job}.unique_key"
    " ELSE {job}.unique_lock END"
)


def _when(condition: str, then: str, other: str) -> str:
    """A CASE, or one of its branches if the condition is a constant or the branches are equal."""
    if condition in (_TRUE, _FALSE) or then == other:
        return then if condition == _TRUE else other
    return f"CASE WHEN {condition} THEN {then} ELSE {other} END"


def _or_else(value: str, other: str) -> str:
    return other if value == _NULL else f"coalesce({value}, {other})"


def _updates(of: Callable[[str], str]) -> str:
    """The SET of an UPDATE that writes a transition; ``of`` gives the SQL of a field's value.

    Two fields are not `Transition`'s: ``over`` (the state is an end), ``sent`` (marks to keep; NULL: those of the row).
    """
    is_reason = _TRUE if of("error_kind") == _NULL else f"{of('error_kind')} IS NULL"
    # Without a kind the error is a reason to wait: the history keeps it, the job keeps its last error.
    errors = {
        f"last_{name}": _when(of("clear_error"), _NULL, _when(is_reason, f"{{job}}.last_{name}", of(name)))
        for name in ("error", "error_kind", "error_code")
    }
    values = {
        "state": of("state"),
        "run_at": _or_else(of("run_at"), "{job}.run_at"),
        "attempts": of("attempts"),
        "deferrals": of("deferrals"),
        "rescues": of("rescues"),
        "executions": _when(of("unbegun"), "{job}.executions - 1", "{job}.executions"),
        "idempotency_key": _when(of("fresh_key"), NEXT_KEY, "{job}.idempotency_key"),
        **errors,
        "waiting_for": of("waiting_for"),
        "sent": _when(of("clear_sent"), _NULL, _or_else(of("sent"), "{job}.sent")),
        "finished_at": _when(of("over"), "CAST(:now AS {timestamp})", _NULL),
        "unique_lock": _when(of("over"), _NULL, _when(of("unbegun"), _TAKEN_BACK, "{job}.unique_lock")),
        "version": "{job}.version + 1",
        "updated_at": ":now",
        "once_more": _when(of("over"), _FALSE, _when(of("fresh_key"), _FALSE, "{job}.once_more")),
        "wish": _when(of("over"), _NULL, "{job}.wish"),
        "cancel_requested": _FALSE,
        **dict.fromkeys(("locked_by", "lease_until"), _NULL),
    }
    return ", ".join(f"{name} = {value}" for name, value in values.items() if value != f"{{job}}.{name}")


_AS_IT_WAS: Final = -1  # a counter that no transition has
_ANY_TIME: Final = datetime(2000, 1, 1, tzinfo=UTC)
_SUCCESS: Final = decide(
    JobFacts(attempts=_AS_IT_WAS, deferrals=_AS_IT_WAS, rescues=_AS_IT_WAS), SUCCEEDED, Retry(), _ANY_TIME, 0.0
)  # the same for every job: only its result is its own


def ends_of(transition: Transition) -> frozenset[tuple[str, bool]]:
    """What `leases.ends` may read of a job once this was written: its state, and whether it has no rescues.

    A job that runs once more may be wished for a later time, and its new operation begins without rescues.
    """
    ends = set[tuple[str, bool]]()
    for one in transition.choices():
        state = str(one.state)
        ends |= {("ready", True), ("scheduled", True)} if one.fresh_key else {(state, True), (state, False)}
    return frozenset(ends)


AFTER_SUCCESS: Final = ends_of(_SUCCESS)


def _constant(field: str) -> str:
    """The SQL of a field for a job that succeeded."""
    instead = _SUCCESS.if_once_more or _SUCCESS
    return _when(_ONCE_MORE, _literal(field, instead), _literal(field, _SUCCESS))


def _literal(field: str, transition: Transition) -> str:
    if field == "over":
        return _TRUE if transition.state in TERMINAL else _FALSE
    value = None if field == "sent" else getattr(transition, field)
    match value:
        case None:
            return _NULL
        case bool():
            return _TRUE if value else _FALSE
        case int():
            return f"{{job}}.{field}" if value == _AS_IT_WAS else str(value)
        case datetime():
            return "CAST(:now AS {timestamp})"
        case _:
            return f"'{value}'"


_SAME: Final = " WHERE {job}.id = p.id AND {job}.version = p.version"
_UNDER_FENCE: Final = _SAME + " AND {is_running}"
_WHILE_WAITING: Final = _SAME + " AND {job}.state IN ('scheduled', 'ready', 'blocked')"
_SUCCEED: Final = _updates(_constant)
_SUCCEED_ALONE: Final = _updates(lambda field: _literal(field, _SUCCESS))


def lock(c: Connection, d: Dialect, ids: Sequence[UUID]) -> None:
    """Lock jobs by id, before several statements each write some of them. SQLite has one writer: it needs none."""
    if d.is_postgresql:
        rows = f"SELECT id FROM {{job}} WHERE id {d.among('ids', 'uuid')} ORDER BY id {{row_lock}}"
        d.run(c, rows, {"ids": d.pack_ids(ids)})


def succeed_if_held(
    c: Connection, d: Dialect, done: Sequence[tuple[UUID, int, str | None]], now: datetime, ends: Ends | None = None
) -> set[UUID]:
    """Finish (id, version, result as JSON text) whose fence still holds; returns the ids that were finished.

    A job that is to run once more goes back to ready instead, with a fresh budget and keys of its own: under the
    old ones a provider would take its requests for repeats. ``ends``: what follows is written later, by its `release`
    and `go_on`.
    """
    if not done:
        return set()
    rows: list[ready.ChangedJob] = []
    plain = [x for x in done if x[2] is None]
    with_results = [x for x in done if x[2] is not None]
    for batch, with_result in ((plain, False), (with_results, True)):
        if batch:
            source, params = fences(d, batch, with_result=with_result)
            result = ", result = p.result" if with_result else ", result = NULL"  # not that of an earlier run
            rows += ready.update(c, d, _SUCCEED + result, source + _UNDER_FENCE, {**params, "now": now})
    if again := [job.id for job in rows if job.state == "ready"]:
        note_decision(c, d, again, "once_more", now)
        grant_wishes(c, d, again, now)
    _follow(c, d, rows, now, ends)
    return {job.id for job in rows}


def note_decision(c: Connection, d: Dialect, ids: Sequence[UUID], decision: str, now: datetime) -> None:
    """Add a history row for jobs that begin a new operation; ``decision`` says why. It reads what their rows say now.

    A success adds none by itself, and without one `sync.decisions_since` takes the next execution for a continuation.
    """
    d.run(
        c,
        "INSERT INTO {attempt} (job_id, execution, decision, charged, finished_at)"
        f" SELECT id, executions, :decision, false, :now FROM {{job}} WHERE id {d.among('ids', 'uuid')}",
        {"ids": d.pack_ids(ids), "decision": decision, "now": now},
    )


def ran_once_more(c: Connection, d: Dialect, id_: UUID, execution: int) -> bool:
    """Whether this execution of a job was a success, after which it is to run once more."""
    row = "SELECT 1 FROM {attempt} WHERE job_id = :id AND execution = :execution AND decision = 'once_more'"
    return d.run(c, row, {"id": d.id(id_), "execution": execution}).first() is not None


_ALONE: Final = " AND NOT {job}.once_more AND NOT {job}.followed AND {job}.ordering_key IS NULL"


def succeed_alone(c: Connection, d: Dialect, done: Sequence[tuple[UUID, int, str | None]], how_long: str) -> set[UUID]:
    """Finish jobs that succeeded, and commit (PostgreSQL): one round trip, in which all is decided by the jobs' rows.

    Returns the ids that were finished. Not finished are those whose fence is gone, that are to run once more, or whose
    end matters to others (`succeed_if_held`). ``how_long``: how long to wait for each lock.
    """
    d.steer_later(c, how_long)
    now = {} if (host := d.host_now()) is None else {"now": host}
    others = []
    for with_result in (False, True):
        if batch := [one for one in done if (one[2] is not None) is with_result]:
            source, params = fences(d, batch, with_result=with_result)
            params |= {"number": len(batch)} | now
            others.append(d.later(c, _finishing_alone(source, d.now_sql, with_result), params, id=ID))
    d.commit(c)
    return {one[0] for one in done}.difference(*([row.id for row in rows.all()] for rows in others))


@lru_cache(maxsize=16)
def _finishing_alone(source: str, now: str, with_result: bool) -> str:  # noqa: FBT001 - of a cached function
    result = ", result = p.result" if with_result else ", result = NULL"  # not that of an earlier run
    sets = (_SUCCEED_ALONE + result).replace(":now", now)
    return (
        f"WITH finished AS (UPDATE {{job}} SET {sets}{source}{_UNDER_FENCE}{_ALONE} RETURNING {{job}}.id)"
        f" SELECT p.id{source} WHERE (SELECT count(*) FROM finished) < CAST(:number AS int)"
        " AND p.id NOT IN (SELECT id FROM finished)"
    )


def _follow(c: Connection, d: Dialect, rows: Sequence[ready.ChangedJob], now: datetime, ends: Ends | None) -> None:
    """Release what waits for the jobs that ended, or leave that to `Ends.release` of ``ends``."""
    over = [job for job in rows if job.state in TERMINAL]
    followed, in_order = [job.id for job in over if job.followed], [job.id for job in over if job.ordering_key]
    if ends is None:
        release_followers(c, d, followed, in_order, now)
    else:
        ends.again = ends.again or any(job.state == "ready" for job in rows)
        ends.note(followed, in_order)


def fences(
    d: Dialect, batch: Sequence[tuple[UUID, int, str | None]], *, with_result: bool
) -> tuple[str, dict[str, Any]]:
    """A FROM clause ``p(id, version[, result])``."""
    if with_result or not d.is_postgresql:
        fields = {"id": "uuid", "version": "int"} | ({"result": "json"} if with_result else {})
        rows = ",".join(
            f'{{"id":"{d.id(i)}","version":{v}' + (f',"result":{r}}}' if with_result else "}") for i, v, r in batch
        )
        return f" FROM {d.records('doc', fields)} AS p", {"doc": f"[{rows}]"}
    # Two array literals cost a third of a JSON document; LIMIT as in `Dialect.records`.
    arrays = "unnest(CAST(:ids AS uuid[]), CAST(:versions AS int[]))"
    return (
        f" FROM (SELECT * FROM {arrays} AS u(id, version) LIMIT 100000) AS p",
        {"ids": d.pack_ids([i for i, _, _ in batch]), "versions": d.pack_ints([v for _, v, _ in batch])},
    )


_TRANSITION_FIELDS: Final = {
    "state": "text",
    "run_at": "timestamptz",
    "attempts": "int",
    "deferrals": "int",
    "rescues": "int",
    "error": "text",
    "error_kind": "text",
    "error_code": "text",
    "waiting_for": "text",
    "clear_sent": "boolean",
    "clear_error": "boolean",
    "fresh_key": "boolean",
    "unbegun": "boolean",
    "sent": "json",
    "over": "boolean",
}
# The alternatives: the prefix of their fields, when they apply, and which fields may differ (`test_decide.py`).
_INSTEAD: Final = (
    ("cancelled_", _CANCELLED, [n for n in _TRANSITION_FIELDS if n not in {"clear_error", "unbegun"}]),
    ("again_", _ONCE_MORE, ["state", "run_at", "attempts", "rescues", "fresh_key", "clear_sent", "over"]),
)
_FINISH_FIELDS: Final = (
    {"id": "uuid", "version": "int", "result": "json"}
    | _TRANSITION_FIELDS
    | {prefix + name: _TRANSITION_FIELDS[name] for prefix, _, fields in _INSTEAD for name in fields}
)


def _column(field: str) -> str:
    """The SQL of a field, taken from the alternative that applies to the row, of those the batch has for a job."""
    value = f"p.{field}"
    for prefix, condition, fields in _INSTEAD:
        if field in fields:
            value = _when(f"{condition} AND p.{prefix}state IS NOT NULL", f"p.{prefix}{field}", value)
    return value


_FINISH: Final = _updates(_column) + ", result = coalesce(p.result, {job}.result)"


def finish_if_held(
    c: Connection, d: Dialect, finishes: Sequence[Finish], now: datetime, ends: Ends | None = None
) -> set[UUID]:
    """Write decisions whose fence still holds, their history, and turns for what became ready; returns those ids."""
    return _finish(c, d, finishes, now, _UNDER_FENCE, ends)


def _finish(
    c: Connection, d: Dialect, finishes: Sequence[Finish], now: datetime, where: str, ends: Ends | None
) -> set[UUID]:
    if not finishes:
        return set()
    finishes = sorted(finishes, key=lambda f: f.id)
    doc = json.dumps([_finish_record(d, f) for f in finishes])
    source = f" FROM {d.records('doc', _FINISH_FIELDS)} AS p"
    rows = ready.update(c, d, _FINISH, source + where, {"doc": doc, "now": now})
    states = {job.id: job.state for job in rows}
    written = [_as_written(f, states[f.id]) for f in finishes if f.id in states]
    record_attempts(c, d, written, now)
    if again := [f.id for f in written if f.transition.fresh_key]:
        grant_wishes(c, d, again, now)
    _follow(c, d, rows, now, ends)
    return set(states)


def _as_written(f: Finish, state: str) -> Finish:
    """The finish with the choice that was written, known by its state: no two choices have the same."""
    (written,) = [one for one in f.transition.choices() if one.state == state]
    return f if written is f.transition else replace(f, transition=written)


def _finish_record(d: Dialect, f: Finish) -> dict[str, Any]:
    t = f.transition
    record = {"id": d.id(f.id), "version": f.version, "result": None if t.result is None else json.loads(t.result)}
    record |= _transition_record(d, t, f.marks)
    for (prefix, _, fields), instead in zip(_INSTEAD, (t.if_cancelled, t.if_once_more), strict=True):
        if instead is not None:
            values = _transition_record(d, instead, f.marks)
            record |= {prefix + name: values[name] for name in fields}
    return {name: value for name, value in record.items() if value is not None and value is not False}


_PLAIN_FIELDS: Final = tuple(name for name in _TRANSITION_FIELDS if name in Transition._fields and name != "run_at")
_plain_values: Final = attrgetter(*_PLAIN_FIELDS)


def _transition_record(d: Dialect, t: Transition, marks: Mapping[str, Any] | None) -> dict[str, Any]:
    record = dict(zip(_PLAIN_FIELDS, _plain_values(t), strict=True))
    record["run_at"] = d.time(t.run_at)
    if not t.set_mark and marks is not None and not marks:
        record["clear_sent"] = True  # nothing is unanswered: a mark in the row may be of a write that was cut off
    record["sent"] = {"unknown": {}} if t.set_mark else marks
    record["over"] = t.state in TERMINAL
    return record


_ATTEMPT_FIELDS: Final = {
    "job_id": "uuid",
    "execution": "int",
    "worker_id": "text",
    "started_at": "timestamptz",
    "duration": "float8",
    "decision": "text",
    "charged": "boolean",
    "kind": "text",
    "code": "text",
    "status": "int",
    "resource_key": "text",
    "next_at": "timestamptz",
    "message": "text",
    "traceback": "text",
}


def record_attempts(c: Connection, d: Dialect, finishes: Sequence[Finish], now: datetime) -> None:
    """Keep the history of executions that did not simply succeed."""
    if not finishes:
        return
    names = ", ".join(_ATTEMPT_FIELDS)
    doc = json.dumps(
        [
            {
                "job_id": d.id(f.id),
                "execution": f.execution,
                "worker_id": f.worker_id,
                "started_at": d.time(f.started_at),
                "duration": max(0.0, (now - f.started_at).total_seconds()) if f.started_at else None,
                "decision": f.transition.decision,
                "charged": f.transition.charged,
                "kind": f.transition.error_kind,
                "code": f.transition.error_code,
                "status": f.transition.status,
                "resource_key": f.transition.resource_key or f.transition.waiting_for,
                "next_at": d.time(f.transition.run_at),
                "message": f.transition.error,
                "traceback": f.transition.traceback,
            }
            for f in finishes
        ]
    )
    d.later(
        c,
        f"INSERT INTO {{attempt}} ({names}, finished_at)"
        f" SELECT {names}, :now FROM {d.records('doc', _ATTEMPT_FIELDS)} AS r WHERE true",
        {"doc": doc, "now": now},
    )


class ExpiredJob(NamedTuple):
    """A waiting job past its expiry; ``sent`` only of one that is to run once more, because a row may be unreadable."""

    id: UUID
    version: int
    attempts: int
    deferrals: int
    rescues: int
    executions: int
    expires_at: datetime
    once_more: bool
    sent: Any


def expire(
    c: Connection,
    d: Dialect,
    now: datetime,
    describe: Callable[[datetime], str],
    limit: int = ready.STAGE_LIMIT,
    *,
    careful: bool = False,
) -> int:
    """Let waiting jobs past their expiry die, with a history row; returns how many.

    One that is to run once more does: only its operation that waits has expired.

    ``careful``: one by one, without those whose ordering key or workflow somebody holds (see `db/dialect.py`).
    """
    limit_lock_waits(c, d, SHORT_LOCK_WAIT if careful else LOCK_WAIT)
    rows = d.run(
        c,
        f"SELECT {selected(ExpiredJob, sent='CASE WHEN once_more THEN sent END')} FROM {{job}}"
        " WHERE expires_at <= :now AND finished_at IS NULL AND state IN ('scheduled', 'ready', 'blocked')"
        " ORDER BY id LIMIT :limit {skip_locked}",
        {"now": now, "limit": limit},
        **types(ExpiredJob, "sent") | {"sent": JSON},
    ).all()
    if not rows:
        return 0
    expired = [ExpiredJob._make(row) for row in rows]
    finishes = [
        Finish(r.id, r.version, _expired(r, describe(r.expires_at), now), execution=r.executions) for r in expired
    ]
    if not careful:
        return len(bury_if_waiting(c, d, finishes, now))
    return sum(_bury_alone(c, d, one, now) for one in finishes)


def _expired(job: ExpiredJob, error: str, now: datetime) -> Transition:
    step = Transition(
        JobState.DEAD, "expired", attempts=job.attempts, deferrals=job.deferrals, rescues=job.rescues, error=error,
        error_kind=FailureKind.EXPIRED,
    )  # fmt: skip
    facts = JobFacts(
        rescues=job.rescues, sent=marks.in_doubt(job.sent, now), safe_until=marks.safe_until(job.sent)
    )  # fmt: skip
    return (once_more(facts, step, now) or step) if job.once_more else step


def _bury_alone(c: Connection, d: Dialect, finish: Finish, now: datetime) -> int:
    try:
        with c.begin_nested():
            return len(bury_if_waiting(c, d, [finish], now))
    except DBAPIError as error:
        if not is_lock_timeout(error):
            raise
        return 0


def bury_if_waiting(c: Connection, d: Dialect, finishes: Sequence[Finish], now: datetime) -> set[UUID]:
    """Write decisions about waiting jobs that can never run (expired, undecodable), with a history row."""
    return _finish(c, d, finishes, now, _WHILE_WAITING, None)
