"""Finishing: what was decided about running jobs, under their fences, with its history.

A write names the version it was decided on and bumps it; what no longer matches is not written and is missing from the
returned ids. Whatever becomes ready again gets its turn in the same transaction. A batch travels as one parameter.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.exc import DBAPIError

from resilient.core.states import TERMINAL
from resilient.store import patience, turns
from resilient.store.dialect import ID, TIME, Dialect
from resilient.store.followers import Ends, release_followers
from resilient.store.jobs import NEXT_KEY, STAGE_LIMIT, best_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection


@dataclass(frozen=True, slots=True)
class Finish:
    """What a worker decided about a running job it still believes to hold."""

    id: UUID
    version: int
    state: str
    decision: str
    charged: bool = False
    run_at: datetime | None = None  # None keeps the place in line
    attempts: int = 0
    deferrals: int = 0
    rescues: int = 0
    error: str | None = None
    error_kind: str | None = None
    error_code: str | None = None
    status: int | None = None
    waiting_for: str | None = None
    clear_sent: bool = False
    set_mark: bool = False  # the next execution begins by reconciling
    marks: Mapping[str, Any] | None = None  # its unanswered requests; None: those of the row
    result: str | None = None  # JSON text
    # for the history
    execution: int = 0
    worker_id: str | None = None
    started_at: datetime | None = None
    resource_key: str | None = None
    traceback: str | None = None


def succeed_if_held(
    c: Connection, d: Dialect, done: Sequence[tuple[UUID, int, str | None]], now: datetime, ends: Ends | None = None
) -> set[UUID]:
    """Finish (id, version, result as JSON text) whose fence still holds; returns the ids that were finished.

    A job that was asked to run once more goes back to ready instead, with a fresh budget and keys of its own: under the
    old ones a provider would take its requests for repeats. ``ends``: what follows is written later.
    """
    if not done:
        return set()
    sets = (
        " SET state = CASE WHEN {job}.once_more THEN 'ready' ELSE 'succeeded' END,"
        " finished_at = CASE WHEN {job}.once_more THEN NULL ELSE {stamp} END,"
        " attempts = CASE WHEN {job}.once_more THEN 0 ELSE {job}.attempts END,"
        f" idempotency_key = CASE WHEN {{job}}.once_more THEN {NEXT_KEY} ELSE {{job}}.idempotency_key END,"
        " unique_lock = CASE WHEN {job}.once_more THEN {job}.unique_lock END, once_more = false,"
        " version = {job}.version + 1, updated_at = :now, locked_by = NULL, lease_until = NULL, sent = NULL,"
        " cancel_requested = false, last_error = NULL, last_error_kind = NULL, last_error_code = NULL"
    ).replace("{stamp}", "CAST(:now AS {timestamp})")
    where = " WHERE {job}.id = p.id AND {job}.version = p.version AND {is_running}"
    tail = " RETURNING {job}.id, {job}.state, {job}.resource_key, {job}.priority, {job}.followed,"
    tail += " {job}.ordering_key"  # itself: SQLite 3.40 says of every column of a RETURNING that it IS NOT NULL
    effective: set[UUID] = set()
    again: list[tuple[str, int]] = []
    followed: list[UUID] = []
    in_lanes: list[UUID] = []
    plain = [x for x in done if x[2] is None]
    told = [x for x in done if x[2] is not None]
    for batch, with_result in ((plain, False), (told, True)):
        if not batch:
            continue
        source, params = fences(d, batch, with_result=with_result)
        result = ", result = p.result" if with_result else ", result = NULL"  # not that of an earlier run
        rows = d.run(c, "UPDATE {job}" + sets + result + source + where + tail, {**params, "now": now}, id=ID).all()
        for id_, state, key, priority, has_followers, in_lane in rows:
            effective.add(id_)
            if state == "ready":
                again.append((key, priority))
                continue
            if has_followers:
                followed.append(id_)
            if in_lane:
                in_lanes.append(id_)
    turns.insert(c, d, best_of(again))
    if ends is not None and again:
        ends.again = True
    _follow(c, d, followed, in_lanes, now, ends)
    return effective


def _follow(
    c: Connection, d: Dialect, followed: Sequence[UUID], in_lanes: Sequence[UUID], now: datetime, ends: Ends | None
) -> None:
    if ends is None:
        release_followers(c, d, followed, in_lanes, now)
    else:
        ends.add(c, d, followed, in_lanes, now)


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


_FINISH_FIELDS: Final = {
    "id": "uuid",
    "version": "int",
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
    "sent": "json",
    "result": "json",
    "terminal": "boolean",
}


def finish_if_held(
    c: Connection, d: Dialect, finishes: Sequence[Finish], now: datetime, ends: Ends | None = None
) -> set[UUID]:
    """Write decisions whose fence still holds, their history, and turns for what became ready; returns those ids.

    A cancel that was requested while the job ran, and of which its worker had not heard, still wins over going on; with
    a request unanswered the job is dead, for a person to look at.
    """
    if not finishes:
        return set()
    finishes = sorted(finishes, key=lambda f: f.id)
    doc = json.dumps([_finish_record(d, f) for f in finishes])
    rows = d.run(
        c,
        f"UPDATE {{job}} SET state = {_STATE}, version = {{job}}.version + 1,"
        f" run_at = CASE WHEN {_AGAIN} THEN CAST(:now AS {{timestamp}}) ELSE coalesce(p.run_at, {{job}}.run_at) END,"
        f" once_more = false, attempts = CASE WHEN {_AGAIN} THEN 0 ELSE p.attempts END,"
        f" idempotency_key = CASE WHEN {_AGAIN} THEN {NEXT_KEY} ELSE {{job}}.idempotency_key END,"
        " deferrals = p.deferrals, rescues = p.rescues,"
        # Without a kind the error is a remark (why it waits): the history keeps it, the job keeps its last error.
        " last_error = CASE WHEN p.error_kind IS NULL THEN {job}.last_error ELSE p.error END,"
        f" last_error_kind = CASE WHEN {_IN_DOUBT} THEN 'ambiguous'"
        " ELSE coalesce(p.error_kind, {job}.last_error_kind) END,"
        " last_error_code = CASE WHEN p.error_kind IS NULL THEN {job}.last_error_code ELSE p.error_code END,"
        f" waiting_for = CASE WHEN NOT {_CANCELLED} THEN p.waiting_for END,"
        f" sent = {_SENT}, result = coalesce(p.result, {{job}}.result),"
        f" finished_at = CASE WHEN {_OVER} THEN CAST(:now AS {{timestamp}}) END,"
        f" unique_lock = CASE WHEN {_OVER} THEN NULL ELSE {{job}}.unique_lock END,"
        " locked_by = NULL, lease_until = NULL, cancel_requested = false, updated_at = :now"
        f" FROM {d.records('doc', _FINISH_FIELDS)} AS p"
        " WHERE {job}.id = p.id AND {job}.version = p.version AND {is_running}"
        " RETURNING {job}.id, {job}.state, {job}.resource_key, {job}.priority, {job}.followed,"
        " {job}.ordering_key",
        {"doc": doc, "now": now},
        id=ID,
    ).all()
    states = {r[0]: r[1] for r in rows}
    turns.insert(c, d, best_of((r[2], r[3]) for r in rows if r[1] == "ready"))
    record_attempts(c, d, [_as_written(f, states[f.id]) for f in finishes if f.id in states], now)
    over = [r for r in rows if r[1] in TERMINAL]
    _follow(c, d, [r[0] for r in over if r[4]], [r[0] for r in over if r[5]], now, ends)
    return set(states)


_SENT: Final = "CASE WHEN p.clear_sent THEN NULL ELSE coalesce(p.sent, {job}.sent) END"
_CANCELLED: Final = "({job}.cancel_requested AND NOT p.terminal)"
_IN_DOUBT: Final = f"({_CANCELLED} AND {_SENT} IS NOT NULL)"
# Who enqueued it again while it ran was promised one more execution; dead or not, unless a request is in doubt.
# (One that succeeds here was looked up, and had.)
_AGAIN: Final = (
    "({job}.once_more AND p.state IN ('dead', 'succeeded') AND coalesce(p.error_kind, '') <> 'ambiguous'"
    f" AND {_SENT} IS NULL AND NOT {{job}}.cancel_requested)"
)
_OVER: Final = f"((p.terminal OR {_CANCELLED}) AND NOT {_AGAIN})"
_STATE: Final = (
    f"CASE WHEN {_AGAIN} THEN 'ready' WHEN {_IN_DOUBT} THEN 'dead' WHEN {_CANCELLED} THEN 'cancelled' ELSE p.state END"
)


def _as_written(f: Finish, state: str) -> Finish:
    """The history says what became of it, also where a cancel came between."""
    if state == f.state:
        return f
    if f.state in ("dead", "succeeded"):  # and once more
        return replace(f, state=state)
    return replace(f, state=state, decision=state, run_at=None, waiting_for=None)


def _finish_record(d: Dialect, f: Finish) -> dict[str, Any]:
    return {
        "id": d.id(f.id),
        "version": f.version,
        "state": f.state,
        "run_at": d.time(f.run_at),
        "attempts": f.attempts,
        "deferrals": f.deferrals,
        "rescues": f.rescues,
        "error": f.error,
        "error_kind": f.error_kind,
        "error_code": f.error_code,
        "waiting_for": f.waiting_for,
        "clear_sent": f.clear_sent,
        "sent": {"unknown": {}} if f.set_mark else f.marks,
        "result": None if f.result is None else json.loads(f.result),
        "terminal": f.state in ("succeeded", "dead", "cancelled"),
    }


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
                "decision": f.decision,
                "charged": f.charged,
                "kind": f.error_kind,
                "code": f.error_code,
                "status": f.status,
                "resource_key": f.resource_key or f.waiting_for,
                "next_at": d.time(f.run_at),
                "message": f.error,
                "traceback": f.traceback,
            }
            for f in finishes
        ]
    )
    d.run(
        c,
        f"INSERT INTO {{attempt}} ({names}, finished_at)"
        f" SELECT {names}, :now FROM {d.records('doc', _ATTEMPT_FIELDS)} AS r WHERE true",
        {"doc": doc, "now": now},
    )


def expire(
    c: Connection,
    d: Dialect,
    now: datetime,
    describe: Callable[[datetime], str],
    limit: int = STAGE_LIMIT,
    *,
    careful: bool = False,
) -> int:
    """Waiting jobs past their expiry become dead, with a history row; returns how many.

    ``careful``: one by one, but for those whose lane or workflow somebody holds (see `patience.py`).
    """
    patience.limit(c, d, patience.SHORT if careful else patience.PATIENCE)
    rows = d.run(
        c,
        "SELECT id, version, attempts, deferrals, rescues, executions, expires_at FROM {job}"
        " WHERE expires_at <= :now AND finished_at IS NULL AND state IN ('scheduled', 'ready', 'blocked')"
        " ORDER BY id LIMIT :limit {skip_locked}",
        {"now": now, "limit": limit},
        id=ID,
        expires_at=TIME,
    ).all()
    if not rows:
        return 0
    finishes = [
        Finish(
            r.id,
            r.version,
            "dead",
            "expired",
            attempts=r.attempts,
            deferrals=r.deferrals,
            rescues=r.rescues,
            error=describe(r.expires_at),
            error_kind="expired",
            execution=r.executions,
        )
        for r in rows
    ]
    if not careful:
        return len(bury_if_waiting(c, d, finishes, now))
    return sum(_buried_alone(c, d, one, now) for one in finishes)


def _buried_alone(c: Connection, d: Dialect, finish: Finish, now: datetime) -> int:
    try:
        with c.begin_nested():
            return len(bury_if_waiting(c, d, [finish], now))
    except DBAPIError as error:
        if not patience.was_held_up(error):
            raise
        return 0


def bury_if_waiting(c: Connection, d: Dialect, finishes: Sequence[Finish], now: datetime) -> set[UUID]:
    """Waiting jobs that can never run (expired, undecodable) become dead, with a history row."""
    if not finishes:
        return set()
    doc = json.dumps([_finish_record(d, f) for f in sorted(finishes, key=lambda f: f.id)])
    rows = d.run(
        c,
        "UPDATE {job} SET state = 'dead', version = {job}.version + 1, last_error = p.error,"
        " last_error_kind = p.error_kind, last_error_code = p.error_code, unique_lock = NULL, finished_at = :now,"
        f" updated_at = :now FROM {d.records('doc', _FINISH_FIELDS)} AS p"
        " WHERE {job}.id = p.id AND {job}.version = p.version AND {job}.state IN ('scheduled', 'ready', 'blocked')"
        " RETURNING {job}.id, {job}.followed, {job}.ordering_key",
        {"doc": doc, "now": now},
        id=ID,
    ).all()
    effective = {r[0] for r in rows}
    record_attempts(c, d, [f for f in finishes if f.id in effective], now)
    release_followers(c, d, [r[0] for r in rows if r[1]], [r[0] for r in rows if r[2]], now)
    return effective
