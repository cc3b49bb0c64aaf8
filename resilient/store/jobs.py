"""Jobs: inserting them and making them ready. `claim.py`, `finishing.py` and `leases.py` have the rest of their life.

Rules. A write names the version it was decided on (the fence) and bumps it; what no longer matches is not written and
is missing from the returned ids. Whatever writes `ready` goes through `_make_ready`, which inserts the turn in the same
transaction. Many rows travel as one JSON document. Locks on several jobs are taken in id order.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.store import bulk, turns
from resilient.store.dialect import ID, JSON, Dialect

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from sqlalchemy import Connection, Row

STAGE_LIMIT: Final = 500
# An idempotency key this job never had, in an update that raises its version.
NEXT_KEY: Final = "CAST({job}.id AS text) || '-' || CAST({job}.version + 1 AS text)"


class NewJob(NamedTuple):
    """A job to insert. ``run_at`` or ``delay`` make it scheduled, else it is ready.

    ``delay`` and ``expires_in`` are seconds from the database's now.

    The first four fields are its own, the others often the same for a whole batch.
    """

    id: UUID
    kind: str
    resource_key: str
    payload: str  # JSON text
    payload_version: int = 1
    priority: int = 0
    run_at: datetime | None = None
    delay: float | None = None
    expires_at: datetime | None = None
    expires_in: float | None = None
    max_attempts: int | None = None
    unique_key: str | None = None
    unique_until: str | None = None
    idempotency_key: str | None = None
    tags: str | None = None  # JSON text
    trace: str | None = None  # JSON text
    ordering_key: str | None = None
    ordering_policy: str | None = None
    followed: bool = False  # it waits for others, or is a step: see `followers.release_followers`
    waits: int = 0  # how many things it waits for; more than none: blocked
    order_no: int | None = None

    @property
    def at_any_time(self) -> bool:
        """Whether it may run at once, and as late as it takes."""
        return self.run_at is None and self.delay is None and self.expires_at is None and self.expires_in is None

    def expiry(self, now: datetime) -> datetime | None:
        """When it expires, if it is inserted ``now``."""
        return self.expires_at if self.expires_in is None else now + timedelta(seconds=self.expires_in)


_OWN_LAST: Final = 2  # fields at the end that are each job's own
_FIELDS: Final = {
    "id": "uuid",
    "kind": "text",
    "resource_key": "text",
    "payload": "json",
    "payload_version": "int",
    "state": "text",
    "priority": "int",
    "run_at": "timestamptz",
    "delay": "float8",
    "expires_at": "timestamptz",
    "expires_in": "float8",
    "max_attempts": "int",
    "unique_key": "text",
    "unique_until": "text",
    "idempotency_key": "text",
    "tags": "jsonb",
    "trace": "json",
    "ordering_key": "text",
    "ordering_policy": "text",
    "followed": "boolean",
    "waits": "int",
    "order_no": "bigint",
}
_COPIED: Final = (
    "id",
    "kind",
    "resource_key",
    "payload",
    "payload_version",
    "priority",
    "max_attempts",
    "unique_key",
    "unique_until",
    "idempotency_key",
    "tags",
    "trace",
    "ordering_key",
    "ordering_policy",
    "order_no",
)


def insert(c: Connection, d: Dialect, jobs: Sequence[NewJob]) -> None:
    """Insert jobs without unique keys, and a turn for each resource that got ready ones: one statement."""
    _insert(c, d, jobs, on_conflict="")


def insert_unique(c: Connection, d: Dialect, jobs: Sequence[NewJob]) -> set[UUID]:
    """Insert jobs that may have unique keys; returns the ids that are new. Call with the jobs sorted by unique key."""
    return _insert(c, d, jobs, on_conflict=" ON CONFLICT (kind, unique_lock) WHERE unique_lock IS NOT NULL DO NOTHING")


def _insert(c: Connection, d: Dialect, jobs: Sequence[NewJob], on_conflict: str) -> set[UUID]:
    if len(jobs) == 1 and not on_conflict and d.is_postgresql and d.clock is None and _plain(jobs[0]):
        _insert_one(c, d, jobs[0])
        return set()
    if not on_conflict and bulk.fits(c, d, jobs):
        bulk.copy(c, d, jobs)
        return set()
    columns = ", ".join(_COPIED)
    given, fields = columns, _FIELDS
    if d.is_postgresql:  # as text: JSON within JSON must hold no \u0000 there
        given, fields = columns.replace("payload,", "CAST(payload AS json),"), _FIELDS | {"payload": "text"}
    # A literal payload keeps its exact text; times are the database's unless the caller gave some.
    now = d.now_sql
    due, expiry = (
        (
            f"coalesce(r.run_at, {now} + make_interval(secs => coalesce(r.delay, 0)))",
            f"coalesce(r.expires_at, {now} + make_interval(secs => r.expires_in))",
        )
        if d.is_postgresql and d.clock is None
        else ("coalesce(r.run_at, :now)", "r.expires_at")
    )
    state = "CASE WHEN r.waits > 0 THEN 'blocked' ELSE r.state END, coalesce(r.waits, 0), coalesce(r.followed, false)"
    source = f"SELECT {given}, {state}, {due}, {expiry}, unique_key, {now}, {now}"
    source += f" FROM {d.records('doc', fields)} AS r"
    source += " WHERE true"
    head = f"INSERT INTO {{job}} ({columns}, state, waits, followed, run_at, expires_at, unique_lock, created_at,"
    head += " updated_at) "
    host = d.host_now()
    params: dict[str, Any] = {"doc": _document(d, jobs, host)}
    if host is not None:
        params["now"] = host
    if d.is_postgresql:
        rows = d.run(
            c,
            f"WITH new AS ({head}{source}{on_conflict} RETURNING id, resource_key, priority, state), turned AS ("
            "INSERT INTO {turn} (resource_key, priority)"
            " SELECT resource_key, max(priority) FROM new WHERE state = 'ready' GROUP BY resource_key)"
            + (" SELECT id FROM new" if on_conflict else " SELECT NULL WHERE false"),
            params,
        ).all()
        return {r[0] for r in rows}
    rows = d.run(c, f"{head}{source}{on_conflict} RETURNING id, resource_key, priority, state", params, id=ID).all()
    turns.insert(c, d, best_of((r[1], r[2]) for r in rows if r[3] == "ready"))
    return {r[0] for r in rows}


def _plain(j: NewJob) -> bool:
    return j.at_any_time and j.ordering_key is None and not j.followed


def _insert_one(c: Connection, d: Dialect, j: NewJob) -> None:
    """One job that is ready at once: half the time of the general way, which is made for batches."""
    d.run(
        c,
        "WITH new AS (INSERT INTO {job} (id, kind, resource_key, payload, payload_version, state, priority, run_at,"
        " max_attempts, idempotency_key, tags, trace, created_at, updated_at) VALUES (CAST(:id AS uuid), :kind, :key,"
        " CAST(:payload AS json), :version, 'ready', :priority, clock_timestamp(), :max_attempts, :idempotency_key,"
        " CAST(:tags AS jsonb), CAST(:trace AS json), clock_timestamp(), clock_timestamp()))"
        " INSERT INTO {turn} (resource_key, priority) VALUES (:key, :priority)",
        {
            "id": j.id.hex,
            "kind": j.kind,
            "key": j.resource_key,
            "payload": j.payload,
            "version": j.payload_version,
            "priority": j.priority,
            "max_attempts": j.max_attempts,
            "idempotency_key": j.idempotency_key,
            "tags": j.tags,
            "trace": j.trace,
        },
    )


def _document(d: Dialect, jobs: Sequence[NewJob], host_now: datetime | None) -> str:
    """The batch as one JSON array; what jobs have in common is encoded once."""
    common: dict[tuple[Any, ...], str] = {}
    rows = []
    for j in jobs:
        shared = (j[1], *j[4:-_OWN_LAST])
        rest = common.get(shared)
        if rest is None:
            rest = common[shared] = _shared_fields(d, j, host_now)
        own = f',"waits":{j.waits}' if j.waits else ""
        if j.order_no is not None:
            own += f',"order_no":{j.order_no}'
        payload = json.dumps(j[3], ensure_ascii=False) if d.is_postgresql else j[3]
        rows.append(f'{{"id":"{j[0].hex}","resource_key":"{j[2]}","payload":{payload},{rest}{own}}}')
    return "[" + ",".join(rows) + "]"


def _shared_fields(d: Dialect, j: NewJob, host_now: datetime | None) -> str:
    run_at, expires_at = j.run_at, j.expires_at
    if host_now is not None:
        run_at = run_at or (host_now + timedelta(seconds=j.delay) if j.delay else None)
        expires_at = j.expiry(host_now)
    later = j.run_at is not None or j.delay is not None
    fields: dict[str, Any] = {
        "kind": j.kind,
        "payload_version": j.payload_version,
        "state": "scheduled" if later else "ready",
        "priority": j.priority,
        "run_at": d.time(run_at),
        "delay": j.delay,
        "expires_at": d.time(expires_at),
        "expires_in": j.expires_in,
        "max_attempts": j.max_attempts,
        "unique_key": j.unique_key,
        "unique_until": j.unique_until,
        "idempotency_key": j.idempotency_key,
        "ordering_key": j.ordering_key,
        "ordering_policy": j.ordering_policy,
        "followed": j.followed or None,
    }
    text = json.dumps({name: value for name, value in fields.items() if value is not None})[1:-1]
    for name, value in (("tags", j.tags), ("trace", j.trace)):
        if value is not None:
            text += f',"{name}":{value}'
    return text


def best_of(rows: Any) -> dict[str, int]:
    """Resource keys with the priority of their best row."""
    best: dict[str, int] = {}
    for key, priority in rows:
        if priority > best.get(key, -32768):
            best[key] = priority
    return best


def holder(c: Connection, d: Dialect, kind: str, unique_key: str) -> Row[Any] | None:
    """The job that holds a unique key: (id, state, version, sent), or None."""
    return d.run(
        c,
        "SELECT id, state, version, sent FROM {job} WHERE kind = :kind AND unique_lock = :unique_key",
        {"kind": kind, "unique_key": unique_key},
        id=ID,
        state=None,
        version=None,
        sent=JSON,
    ).one_or_none()


def replace_if_waiting(c: Connection, d: Dialect, held: Row[Any], new: NewJob, now: datetime) -> bool:
    """Give a waiting job payload, priority and times of a newer one with the same unique key, and a fresh budget.

    Of one that was executed before it is a new operation: its old key may stand for a request with the old payload.
    """
    params = {
        "id": d.id(held.id),
        "held": held.version,
        "payload": new.payload,
        "version": new.payload_version,
        "priority": new.priority,
        "run_at": new.run_at or (now + timedelta(seconds=new.delay or 0)),
        "expires_at": new.expiry(now),
        "key": new.idempotency_key,
        "now": now,
        "tags": new.tags,
    }
    sets = (
        "payload = {json_payload}, payload_version = :version, priority = :priority, run_at = :run_at,"
        " expires_at = :expires_at, tags = {json_tags}, attempts = 0, sent = NULL,"
        " idempotency_key = coalesce(:key, CASE WHEN {job}.executions > 0 THEN {next_key}"
        " ELSE {job}.idempotency_key END), version = {job}.version + 1, updated_at = :now,"
        " state = CASE WHEN state = 'blocked' THEN 'blocked' ELSE '{state}' END"
    )
    for name, text in (
        ("json_payload", json_param(d, "payload", "json")),
        ("json_tags", json_param(d, "tags", "jsonb")),
        ("next_key", NEXT_KEY),
        ("state", "ready" if new.run_at is None and new.delay is None else "scheduled"),
    ):
        sets = sets.replace("{" + name + "}", text)
    where = "id = :id AND version = :held AND state IN ('scheduled', 'ready', 'blocked')"
    return bool(_make_ready(c, d, sets, where, params))


def mark_once_more(c: Connection, d: Dialect, id_: UUID, now: datetime) -> bool:
    """A running job shall run once more after it finishes; False if it is not running any more."""
    return (
        d.run(
            c,
            "UPDATE {job} SET once_more = true, updated_at = :now WHERE id = :id AND state = 'running' RETURNING 1",
            {"id": d.id(id_), "now": now},
        ).first()
        is not None
    )


def json_param(d: Dialect, name: str, type_: str) -> str:
    """A parameter that is JSON text."""
    return f"CAST(:{name} AS {type_})" if d.is_postgresql else f":{name}"


# -- making ready --------------------------------------------------------------------------------------------


def _make_ready(
    c: Connection, d: Dialect, sets: str, where: str, params: Mapping[str, Any], source: str = ""
) -> list[UUID]:
    """The one way into `ready`: update jobs and give resources of ready ones turns. Returns the ids that changed."""
    rows = d.run(
        c,
        f"UPDATE {{job}} SET {sets}{source} WHERE {where}"
        " RETURNING {job}.id, {job}.resource_key, {job}.priority, {job}.state",
        params,
        id=ID,
    ).all()
    turns.insert(c, d, best_of((r[1], r[2]) for r in rows if r[3] == "ready"))
    return [r[0] for r in rows]


def stage(c: Connection, d: Dialect, now: datetime) -> int:
    """Scheduled jobs that are due become ready; returns how many (call again until fewer than `STAGE_LIMIT`)."""
    return len(
        _make_ready(
            c,
            d,
            "state = 'ready', version = {job}.version + 1, updated_at = :now",
            "id "
            + d.chosen(
                "SELECT id FROM {job} WHERE state = 'scheduled' AND run_at <= :now"
                " ORDER BY run_at, id LIMIT :limit {skip_locked}"
            ),
            {"now": now, "limit": STAGE_LIMIT},
        )
    )


def make_ready_if_version(
    c: Connection, d: Dialect, versions: Mapping[UUID, int], now: datetime, *, reset: bool = False
) -> list[UUID]:
    """Jobs in any state the caller has checked become ready at once, if their version still is the given one.

    With ``reset`` attempts, rescues and the finish are forgotten (retry, replay).
    """
    if not versions:
        return []
    doc = json.dumps([{"id": d.id(i), "version": v} for i, v in sorted(versions.items())])
    sets = "state = 'ready', run_at = :now, version = {job}.version + 1, updated_at = :now"
    if reset:
        sets += ", attempts = 0, rescues = 0, finished_at = NULL, cancel_requested = false, waits = 0"
    return _make_ready(
        c,
        d,
        sets,
        "{job}.id = r.id AND {job}.version = r.version",
        {"doc": doc, "now": now},
        source=f" FROM {d.records('doc', {'id': 'uuid', 'version': 'int'})} AS r",
    )


def unblock(c: Connection, d: Dialect, fewer: Mapping[UUID, int], now: datetime) -> set[UUID]:
    """Blocked jobs wait for so many things fewer; those that wait for nothing more become ready, or scheduled.

    Returns the ids that were still blocked.
    """
    if not fewer:
        return set()
    doc = json.dumps([{"id": d.id(i), "n": n} for i, n in sorted(fewer.items())])
    changed = _make_ready(
        c,
        d,
        "state = CASE WHEN {job}.waits > p.n THEN 'blocked' WHEN {job}.run_at > :now THEN 'scheduled' ELSE 'ready' END,"
        " waits = CASE WHEN {job}.waits > p.n THEN {job}.waits - p.n ELSE 0 END,"
        " version = {job}.version + 1, updated_at = :now",
        "{job}.id = p.id AND {is_blocked}",
        {"doc": doc, "now": now},
        source=f" FROM {d.records('doc', {'id': 'uuid', 'n': 'int'})} AS p",
    )
    return set(changed)
