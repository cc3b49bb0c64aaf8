"""Inserting jobs. `claim.py`, `finishing.py` and `leases.py` have the rest of their life.

Four statements write the same columns: a JSON document for any batch, VALUES for one job that is ready at once, an
INSERT that also draws the number of one job with an ordering key, COPY for many jobs. Each goes through `ready.py`,
which inserts the turns in the same transaction. Locks on several jobs are taken in id order.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import Connection, Table, inspect
from sqlalchemy.dialects import postgresql, sqlite

from resilient.core.base.errors import InvalidInput
from resilient.store.db import direct
from resilient.store.db.dialect import ID, JSON
from resilient.store.jobs import ready
from resilient.store.jobs.columns import (
    BY_NAME,
    SHARED,
    NewJob,
    Writer,
    getter,
    has_only,
    names,
    parameter,
    selected,
    types,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from uuid import UUID

    from sqlalchemy.orm import Session

    from resilient.store.db.dialect import Dialect


# An idempotency key this job never had, in an update that raises its version.
NEXT_KEY: Final = "CAST({job}.id AS text) || '-' || CAST({job}.version + 1 AS text)"


# A job that is ready at once, and has neither an ordering key nor a unique key.
_PLAIN: Final = tuple(
    name for name in names(Writer.CALLER)
    if name not in {"unique_key", "unique_until", "ordering_key", "ordering_policy", "order_no", "waits", "followed"}
)  # fmt: skip
_is_plain: Final = has_only(_PLAIN)
_plain_values: Final = getter(_PLAIN)
_shared_values: Final = getter(SHARED)
_DOCUMENTS: Final = frozenset({"tags", "trace"})  # fields that are JSON text


def insert(c: Connection, d: Dialect, jobs: Sequence[NewJob]) -> None:
    """Insert jobs without unique keys, and a turn for each resource that got ready ones: one statement."""
    _insert(c, d, jobs, on_conflict="")


def insert_unique(c: Connection, d: Dialect, jobs: Sequence[NewJob]) -> set[UUID]:
    """Insert jobs that may have unique keys; returns the ids that are new. Call with the jobs sorted by unique key."""
    return _insert(c, d, jobs, on_conflict=" ON CONFLICT (kind, unique_lock) WHERE unique_lock IS NOT NULL DO NOTHING")


def _insert(c: Connection, d: Dialect, jobs: Sequence[NewJob], on_conflict: str) -> set[UUID]:
    if len(jobs) == 1 and not on_conflict and d.is_postgresql and d.clock is None and _is_plain(jobs[0]):
        _insert_one(c, d, jobs[0])
        return set()
    if not on_conflict and _can_copy(c, d, jobs):
        _copy(c, d, jobs)
        return set()
    host = d.host_now()
    params: dict[str, Any] = {"doc": _document(d, jobs, host)}
    if host is not None:
        params["now"] = host
    return ready.insert(c, d, _inserting(d, on_conflict), params, ids=bool(on_conflict))


@lru_cache(maxsize=64)
def _inserting(d: Dialect, on_conflict: str) -> str:
    """The columns, and the SELECT that reads them from one JSON document of jobs."""
    columns = {name: BY_NAME[name] for name in names(Writer.CALLER)}
    fields = {name: column.type for name, column in columns.items()} | _TIMED
    values = {
        name: f"r.{name}" if column.default is None else f"coalesce(r.{name}, {json.dumps(column.default)})"
        for name, column in columns.items()
    }
    if d.is_postgresql:  # as text: JSON within JSON must hold no \\u0000 there
        fields["payload"], values["payload"] = "text", "CAST(r.payload AS json)"
    now = d.now_sql
    # Times are the database's unless the caller gave some.
    own_clock = d.is_postgresql and d.clock is None
    derived = {
        "state": "CASE WHEN r.waits > 0 THEN 'blocked' ELSE r.state END",
        "run_at": f"coalesce(r.run_at, {now} + make_interval(secs => coalesce(r.delay, 0)))"
        if own_clock
        else "coalesce(r.run_at, :now)",
        "expires_at": f"coalesce(r.expires_at, {now} + make_interval(secs => r.expires_in))"
        if own_clock
        else "r.expires_at",
        "unique_lock": "r.unique_key",
        "created_at": now,
        "updated_at": now,
    }
    values |= {name: derived[name] for name in names(Writer.INSERT)}
    source = f"SELECT {', '.join(values.values())} FROM {d.records('doc', fields)} AS r WHERE true"
    return f"({', '.join(values)}) {source}{on_conflict}"


_TIMED: Final = {
    "state": "text",
    "run_at": "timestamptz",
    "delay": "float8",
    "expires_at": "timestamptz",
    "expires_in": "float8",
}


def _insert_one(c: Connection, d: Dialect, j: NewJob) -> None:
    """Insert one job that is ready at once, in half the time of the general way, which is made for batches."""
    params = dict(zip(_PLAIN, _plain_values(j), strict=True))
    params["id"] = j.id.hex
    ready.insert(c, d, _ONE, params, ids=False)


_AT_ONCE: Final = {
    "state": "'ready'",
    "run_at": "clock_timestamp()",
    "expires_at": "NULL",
    "unique_lock": "NULL",
    "created_at": "clock_timestamp()",
    "updated_at": "clock_timestamp()",
}
_VALUES: Final = {name: parameter(name) for name in _PLAIN} | {name: _AT_ONCE[name] for name in names(Writer.INSERT)}
_ONE: Final = f"({', '.join(_VALUES)}) VALUES ({', '.join(_VALUES.values())})"


def _document(d: Dialect, jobs: Sequence[NewJob], host_now: datetime | None) -> str:
    """The batch as one JSON array; what jobs have in common is encoded once."""
    common: dict[tuple[Any, ...], str] = {}
    rows = []
    for j in jobs:
        shared = _shared_values(j)
        rest = common.get(shared)
        if rest is None:
            rest = common[shared] = _shared_fields(d, j, host_now)
        own = f',"waits":{j.waits}' if j.waits else ""
        if j.order_no is not None:
            own += f',"order_no":{j.order_no}'
        payload = json.dumps(j.payload, ensure_ascii=False) if d.is_postgresql else j.payload
        rows.append(f'{{"id":"{j.id.hex}","resource_key":"{j.resource_key}","payload":{payload},{rest}{own}}}')
    return "[" + ",".join(rows) + "]"


def _shared_fields(d: Dialect, j: NewJob, host_now: datetime | None) -> str:
    run_at, expires_at = j.run_at, j.expires_at
    if host_now is not None:
        run_at, expires_at = j.start(host_now), j.expiry(host_now)
    fields = {name: value for name, value in zip(SHARED, _shared_values(j), strict=True) if value is not None}
    documents = {name: value for name, value in fields.items() if name in _DOCUMENTS}
    fields |= {
        "state": "scheduled" if j.is_later else "ready",
        "run_at": d.time(run_at),
        "expires_at": d.time(expires_at),
    }
    plain = {name: value for name, value in fields.items() if name not in documents}
    return ",".join([json.dumps(plain)[1:-1], *(f'"{name}":{text}' for name, text in documents.items())])


class KeyHolder(NamedTuple):
    """The job that holds a unique key."""

    id: UUID
    resource_key: str
    state: str
    version: int
    sent: Any
    executions: int
    cancel_requested: bool
    ordering_key: str | None


def holder(c: Connection, d: Dialect, kind: str, unique_key: str) -> KeyHolder | None:
    """The job that holds a unique key, or None."""
    row = d.run(
        c,
        f"SELECT {selected(KeyHolder)} FROM {{job}} WHERE kind = :kind AND unique_lock = :unique_key",
        {"kind": kind, "unique_key": unique_key},
        **types(KeyHolder),
    ).one_or_none()
    return None if row is None else KeyHolder._make(row)


def keep_if_waiting(c: Connection, d: Dialect, old: KeyHolder) -> bool:
    """Keep a ready or scheduled job from starting before this transaction ends, so that it reads what that writes.

    False if it has started or ended. Not for a blocked job: whoever lets it go on has its ordering key locked by then.
    """
    where = "id = :id AND state IN ('scheduled', 'ready') AND unique_lock IS NOT NULL"
    return d.run(c, f"SELECT 1 FROM {{job}} WHERE {where} {{stay_lock}}", {"id": d.id(old.id)}).first() is not None


def replace_if_waiting(c: Connection, d: Dialect, old: KeyHolder, new: NewJob, now: datetime) -> bool:
    """Overwrite a waiting job with a newer one of the same unique key; its attempts begin anew.

    If it was executed before, it gets a new idempotency key: the old one may stand for a request with the old payload.
    """
    params = {"id": d.id(old.id), "held": old.version, "now": now} | _wish(new, now)
    state = "scheduled" if new.is_later else "ready"
    key = f"CASE WHEN {{job}}.executions > 0 THEN {NEXT_KEY} ELSE {{job}}.idempotency_key END"
    sets = (
        f"{_granting(d, key)}, attempts = 0, rescues = 0, sent = NULL, once_more = false, progress = NULL,"
        " version = {job}.version + 1, updated_at = :now,"
        f" waiting_for = NULL, state = CASE WHEN state = 'blocked' THEN 'blocked' ELSE '{state}' END"
    )
    where = "id = :id AND version = :held AND state IN ('scheduled', 'ready', 'blocked')"
    if not ready.update(c, d, sets, " WHERE " + where, params):
        return False
    if old.executions:  # what follows is no further try of that execution
        which = {"id": d.id(old.id), "execution": old.executions}
        d.run(c, "UPDATE {attempt} SET decision = 'replaced' WHERE job_id = :id AND execution = :execution", which)
    return True


_WISHED: Final = (
    "payload", "payload_version", "priority", "run_at", "expires_at", "max_attempts", "unique_until", "tags", "trace",
    "ordering_policy", "idempotency_key",
)  # fmt: skip
_WISHED_TIMES: Final = ("run_at", "expires_at")
_PARAMS: Final = {name: name for name in _WISHED} | {"unique_until": "uniqueness"}  # "..._until" is read as a time


def _wish(new: NewJob, now: datetime) -> dict[str, Any]:
    """What a newer job asks of the job that has its unique key: parameters (`_PARAMS`) with their values."""
    own = {param: getattr(new, name) for name, param in _PARAMS.items() if name not in _WISHED_TIMES}
    return own | {"run_at": new.start(now), "expires_at": new.expiry(now)}


def _granting(d: Dialect, key: str = "{job}.idempotency_key") -> str:
    """The SET that writes a wish; ``key``: the SQL of the idempotency key, if the wish names none."""
    special = {name: json_param(d, name, BY_NAME[name].type) for name in ("payload", "tags", "trace")}
    special |= {
        "idempotency_key": f"coalesce(:idempotency_key, {key})",
        "ordering_policy": "coalesce(:ordering_policy, {job}.ordering_policy)",
    }
    values = {name: special.get(name, f":{param}") for name, param in _PARAMS.items()}
    return ", ".join(f"{name} = {value}" for name, value in values.items()) + ", wish = NULL"


def mark_once_more(c: Connection, d: Dialect, id_: UUID, now: datetime, new: NewJob | None = None) -> bool:
    """Let a running job run once more after it finishes, as ``new`` if that is given, else as it is.

    False if it is not running any more, or is to be cancelled.
    """
    wish = None if new is None else json.dumps(_wish(new, now), default=datetime.isoformat)
    return (
        d.run(
            c,
            f"UPDATE {{job}} SET once_more = true, wish = coalesce({json_param(d, 'wish', 'json')}, wish),"
            " updated_at = :now WHERE id = :id AND state = 'running' AND NOT cancel_requested RETURNING 1",
            {"id": d.id(id_), "now": now, "wish": wish},
        ).first()
        is not None
    )


def grant_wishes(c: Connection, d: Dialect, ids: Sequence[UUID], now: datetime) -> None:
    """Write the wishes of locked jobs that run once more. An expiry that has passed was the last run's: it is cleared.

    No version is raised: the statement that let them run once more has raised it.
    """
    d.run(
        c,
        f"UPDATE {{job}} SET expires_at = NULL WHERE id {d.among('ids', 'uuid')} AND expires_at <= :now",
        {"ids": d.pack_ids(ids), "now": now},
    )
    rows = d.run(
        c,
        f"SELECT id, wish FROM {{job}} WHERE id {d.among('ids', 'uuid')} AND wish IS NOT NULL ORDER BY id",
        {"ids": d.pack_ids(ids)},
        id=ID,
        wish=JSON,
    ).all()
    for id_, wish in rows:
        times = {name: wish[name] and datetime.fromisoformat(wish[name]) for name in _WISHED_TIMES}
        state = "scheduled" if times["run_at"] > now else "ready"
        values = dict.fromkeys(_PARAMS.values()) | wish | times  # an older version wrote fewer
        ready.update(c, d, f"{_granting(d)}, state = '{state}'", " WHERE id = :id", {**values, "id": d.id(id_)})


def json_param(d: Dialect, name: str, type_: str) -> str:
    """A parameter that is JSON text."""
    return f"CAST(:{name} AS {type_})" if d.is_postgresql else f":{name}"


# -- one job with an ordering key --------------------------------------------------------------------------------------
# What publishing an event costs a business transaction: one statement, on PostgreSQL with its own clock. Everything
# else takes the general way (`order.draw`, then `insert`), which writes the same in two statements for any number of
# jobs.

# What the caller writes. The statement itself draws the job's number, and decides whether the job waits.
_EVENT: Final = (
    "id", "kind", "resource_key", "payload", "payload_version", "max_attempts", "idempotency_key", "tags", "trace",
    "ordering_key", "ordering_policy",
)  # fmt: skip
_is_event: Final = has_only(_EVENT)
_event_values: Final = getter(_EVENT)
_PLACE: Final = (
    "place AS (INSERT INTO {order} (resource_key, ordering_key, last_no, head_id, seek_no, updated_at)"
    " VALUES (:resource_key, :ordering_key, 1, CAST(:id AS uuid), 1, clock_timestamp())"
    " ON CONFLICT (resource_key, ordering_key) DO UPDATE SET last_no = {order}.last_no + 1,"
    " head_id = coalesce({order}.head_id, excluded.head_id), updated_at = excluded.updated_at"
    " RETURNING last_no, head_id = CAST(:id AS uuid) AS is_head), "
)
_EVENT_DERIVED: Final = _AT_ONCE | {"state": "CASE WHEN is_head THEN 'ready' ELSE 'blocked' END"}
_EVENT_COLUMNS: Final = {
    **{name: parameter(name) for name in _EVENT},
    "order_no": "last_no",
    "waits": "CASE WHEN is_head THEN 0 ELSE 1 END",
    **{name: _EVENT_DERIVED[name] for name in names(Writer.INSERT)},
}
_APPEND: Final = f"({', '.join(_EVENT_COLUMNS)}) SELECT {', '.join(_EVENT_COLUMNS.values())} FROM place"


def can_append(d: Dialect, j: NewJob) -> bool:
    """Whether `append` can insert this job."""
    return d.is_postgresql and d.clock is None and j.ordering_key is not None and _is_event(j)


def append(c: Connection, d: Dialect, j: NewJob) -> None:
    """Insert a job with the next number of its key, and a turn if it is the head. Locks the key until the commit."""
    params = dict(zip(_EVENT, _event_values(j), strict=True))
    params["id"] = j.id.hex
    ready.insert(c, d, _APPEND, params, first=_PLACE, ids=False)


# -- many jobs: COPY ---------------------------------------------------------------------------------------------------
# On PostgreSQL it takes half the time of an INSERT from a JSON document. Only for jobs that nobody can refuse: one with
# a unique key needs ON CONFLICT (`insert_unique`).

COPY_LEAST: Final = 50  # fewer go quicker as one INSERT
_COPY_LINES: Final = 500  # sent at a time, so that the server works while the next are written
_NULL: Final = r"\N"
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t"})


def _can_copy(c: Connection, d: Dialect, jobs: Sequence[NewJob]) -> bool:
    """Whether `_copy` can insert these jobs."""
    return (
        len(jobs) >= COPY_LEAST and d.is_postgresql and direct.can_copy(c) and all(j.unique_key is None for j in jobs)
    )


def _copy(c: Connection, d: Dialect, jobs: Sequence[NewJob]) -> None:
    """Insert jobs, and a turn for each resource that got ready ones."""
    now, best = d.now(c), dict[str, int]()
    ready.copy(c, d, [*_OWN_TEXT, *_copy_shared(jobs[0], now)], _copy_chunks(jobs, now, best), best)


def _copy_chunks(jobs: Sequence[NewJob], now: datetime, best: dict[str, int]) -> Iterator[str]:
    lines = _copy_lines(jobs, now, best)
    while some := "".join(islice(lines, _COPY_LINES)):
        yield some


def _copy_lines(jobs: Sequence[NewJob], now: datetime, best: dict[str, int]) -> Iterator[str]:
    """One line a job; what many have in common is encoded once. Notes the best priority of each key with ready ones."""
    common: dict[tuple[Any, ...], tuple[str, str]] = {}
    before, once = None, ("", "")
    for j in jobs:
        if (shared := _shared_values(j)) != before:  # quicker than to look it up
            before = shared
            if shared not in common:
                text = "\t".join(_copy_shared(j, now).values())
                common[shared] = ("scheduled" if j.is_later else "ready", text)
            once = common[shared]
        state, rest = once
        if j.waits > 0:
            state = "blocked"
        elif state == "ready" and j.priority > best.get(j.resource_key, -32768):
            best[j.resource_key] = j.priority
        yield _copy_line(j, state, rest)


def _copy_shared(j: NewJob, now: datetime) -> dict[str, str]:
    """The columns that many jobs have in common, as COPY reads them."""
    values = {name: getattr(j, name) for name in names(Writer.CALLER) if name in SHARED}
    derived = {
        "run_at": j.start(now),
        "expires_at": j.expiry(now),
        "unique_lock": j.unique_key,
        "created_at": now,
        "updated_at": now,
    }
    values |= {name: derived[name] for name in names(Writer.INSERT) if name != "state"}
    return {name: _NULL if value is None else _copy_text(str(value)) for name, value in values.items()}


def _copy_text(value: str) -> str:
    """A text as COPY reads it."""
    return value if value.isprintable() and "\\" not in value else value.translate(_ESCAPES)


# What is each job's own (`OWN`, and its state), by column. Compiled once into one f-string: a dict for each job takes a
# third more time.
_OWN_TEXT: Final = {
    "id": "{j.id.hex}",
    "resource_key": "{_copy_text(j.resource_key)}",
    "payload": "{_copy_text(j.payload)}",
    "waits": "{j.waits}",
    "order_no": "{_NULL if j.order_no is None else j.order_no}",
    "state": "{state}",
}
_copy_line: Final[Callable[[NewJob, str, str], str]] = eval(  # noqa: S307 - nothing but the constants above
    "lambda j, state, rest: f'" + r"\t".join(_OWN_TEXT.values()) + r"\t{rest}\n'"
)


# -- rows of handlers, written once although the job may run twice -----------------------------------------------------


def insert_if_absent(target: Session | Connection, into: Any, values: Mapping[str, Any]) -> bool:
    """Insert one row into a table or mapped class unless a unique constraint holds it already; True if it is new.

    Runs in the caller's transaction (async: ``await session.run_sync(insert_if_absent, Order, {...})``). Two
    transactions at once: the second waits for the first, then inserts nothing. Give the row a natural key, or
    ``job.idempotency_key``, which stays the same over all executions of a job.
    """
    table = into if isinstance(into, Table) else inspect(into).local_table
    c = target if isinstance(target, Connection) else target.connection()
    if c.dialect.name not in ("postgresql", "sqlite"):
        raise InvalidInput(f"insert_if_absent knows PostgreSQL and SQLite, not {c.dialect.name}")
    make = postgresql.insert if c.dialect.name == "postgresql" else sqlite.insert
    statement = make(table).values(dict(values)).on_conflict_do_nothing().returning(*table.primary_key.columns)
    return c.execute(statement).first() is not None
