"""Erasing and exporting what is stored about one resource and everything below it.

Each function is one short transaction over a bounded number of rows. Jobs, history and steps have no index by resource,
so they are walked by id, a window at a time. Where an account's name may stand is said once, in `_condition`: an
erasure deletes those rows, an export shows them. `tests/engine/test_erasure.py` fails for a table that is not here,
and for a row that the engine's own features leave behind.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

import sqlalchemy as sa

from resilient.core.events.message import RESOURCE
from resilient.core.gates.breaker import Window
from resilient.core.jobs.records import plain
from resilient.store.accounts import grants
from resilient.store.accounts.fuse import notices_of
from resilient.store.db import tables
from resilient.store.db.dialect import ID, JSON
from resilient.store.gates import controls, turns
from resilient.store.jobs.columns import AT_THE_END_SQL
from resilient.store.jobs.dependencies import release_followers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sqlalchemy import Connection

    from resilient.store.db.dialect import Dialect

WINDOW: Final = 5_000  # rows looked at in one transaction
BATCH: Final = 500  # rows deleted in one transaction
REASON: Final = "it is being erased"
SECRET: Final = {"grant": ("secrets",), "authorization": ("secrets", "id"), "connection": ("seal",)}  # never exported
WINDOWS: Final = ("job", "attempt", "step")
# In this order: no consent connects an account once its row is deleted, no death of a grant is told to one without a
# connection, and no look finds a gate without a row.
OTHERS: Final = (
    "authorization", "connection", "order", "cursor", "rate_limit", "schedule_account", "inbox", "inbox_key", "turn",
    "resource", "alert",
)  # fmt: skip
_OUTBOX: Final = f"(resource_key > '{RESOURCE}/' AND resource_key < '{RESOURCE}0')"  # '0' follows '/'
_DELIVERIES: Final = ("id", "event", "body")  # how a webhook's delivery is noted: `core.events.webhook.repeat_key`
_UNREADABLE: Final = r"\\u(0000|[dD][89a-fA-F])"  # in JSON, for PostgreSQL: a NUL, or half a pair perhaps
_FIRST_ID: Final = UUID(int=0)


class Name(NamedTuple):
    """Whose rows are meant: a resource and what lies below it.

    ``hosts``: token endpoints that nobody else uses, which are resources of their own.
    """

    key: str
    hosts: Sequence[str] = ()


class Place(NamedTuple):
    """Where a walk goes on: the last id that was looked at."""

    job: UUID = _FIRST_ID
    attempt: int = 0
    workflow: UUID = _FIRST_ID


def _here(column: str) -> str:
    return f"({column} = :key OR ({column} > :low AND {column} < :high))"


def _named(value: str) -> str:
    """The same of a text whose collation is not known."""
    return f"({value} = :key OR substr({value}, 1, length(CAST(:low AS text))) = :low)"


def _of(d: Dialect, column: str, name: str) -> str:
    """A text inside a document; on SQLite it may hold anything."""
    if d.is_postgresql:
        return f"({column} ->> '{name}')"
    return f"(CASE WHEN json_valid({column}) THEN {column} ->> '$.{name}' END)"


def _params(d: Dialect, name: Name) -> dict[str, Any]:
    """The parameters of `_condition`."""
    key, (provider, _, account) = name.key, name.key.partition("/")
    notes = {f"{kind}_delivery": json.dumps([kind, account])[:-1] + "," for kind in _DELIVERIES}
    return {
        "key": key, "low": f"{key}/", "high": f"{key}0", "notices": notices_of(provider),
        "account": account, "webhooks": f"webhook:{provider}", "hosts": d.pack_keys(name.hosts), **notes,
        "begins": f'{{"provider":{_quoted(provider)},', "says": f'"account":{_quoted(account)}',
        "unreadable": _UNREADABLE,
    }  # fmt: skip


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _delivered(d: Dialect) -> str:
    """Whether a payload is a webhook's that came for the account: by its text first, so that few are read as JSON."""
    text = "CAST(payload AS text)"
    read = f"{_of(d, 'payload', 'account')} = :account AND {_of(d, 'payload', 'delivery')} IS NOT NULL"
    if d.is_postgresql:
        match, read = f"strpos({text}, :says) > 0", f"CASE WHEN {text} ~ :unreadable THEN true ELSE {read} END"
    else:
        match = f"instr({text}, :says) > 0"
    return (
        f"CASE WHEN substr({text}, 1, length(CAST(:begins AS text))) = :begins AND {match} THEN {read} ELSE false END"
    )


def _condition(d: Dialect, table: str) -> str:
    """Which rows of a table are about the resource: the one list of the places where its name may stand."""
    at_host = f"{{}} {d.among('hosts', 'text')}"
    customer = f"coalesce({_of(d, 'tags', 'account')}, {_of(d, 'payload', 'resource_key')})"
    deliveries = " OR ".join(
        f"substr(message_id, 1, length(CAST(:{kind}_delivery AS text))) = :{kind}_delivery" for kind in _DELIVERIES
    )
    steps = f"SELECT workflow_id FROM {{step}} WHERE {_here('resource_key')}"
    connections = f"SELECT grant_id FROM {{connection}} WHERE {_here('resource_key')}"
    event = f"{_here('ordering_key')} OR {_named(_of(d, 'payload', 'subject'))}"
    special = {
        "job": f"({_here('resource_key')} OR ({_OUTBOX} AND ({event}))"
        f" OR (resource_key = :notices AND {_named(customer)}) OR ({_delivered(d)}))",
        "alert": f"({_here('subject')} OR {_named(_of(d, 'detail', 'resource'))} OR {at_host.format('subject')})",
        "inbox": f"(consumer = :webhooks AND ({deliveries}))",
        "rate_limit": f"({_here('resource_key')} OR {at_host.format('resource_key')})",
        "attempt": f"({_here('resource_key')} OR {at_host.format('resource_key')})",
        "order": f"({_here('resource_key')} OR ({_OUTBOX} AND {_here('ordering_key')}))",
        "inbox_key": _here("ordering_key"),
        "grant": f"id IN ({connections})",
        "workflow": f"id IN ({steps})",
        "resource": f"({_here('key')} OR {at_host.format('key')})",
        "audit": _here("subject"),
    }
    return special.get(table) or _here("resource_key")


# -- before ------------------------------------------------------------------------------------------------------------


def stop(c: Connection, d: Dialect, key: str) -> bool:
    """Pause a resource, so that nothing of it starts any more; False if it was paused before."""
    before = d.run(c, "SELECT paused_at IS NOT NULL FROM {resource} WHERE key = :key", {"key": key}).scalar()
    if not before:
        controls.pause(c, d, key, reason=REASON)
    return not before


def obstacles(c: Connection, d: Dialect, name: Name) -> tuple[list[UUID], list[UUID]]:
    """Jobs of a resource that run, and workflows with steps of it that are not over: some of each."""
    running = d.run(
        c,
        f"SELECT id FROM {{job}} WHERE state = 'running' AND {_condition(d, 'job')} ORDER BY id LIMIT 10",
        _params(d, name),
        id=ID,
    )
    open_ = d.run(
        c,
        "SELECT w.id FROM {workflow} w WHERE w.finished_at IS NULL AND EXISTS (SELECT 1 FROM {step} s"
        f" WHERE s.workflow_id = w.id AND {_here('s.resource_key')}) ORDER BY w.id LIMIT 10",
        _params(d, name),
        id=ID,
    )
    return [row[0] for row in running], [row[0] for row in open_]


def endpoints_of(c: Connection, d: Dialect, provider: str) -> list[str]:
    """The token endpoints at hosts of a provider's accounts that something is stored of."""
    params = {"low": f"{provider}:token@", "high": f"{provider}:tokenA"}  # 'A' follows '@'
    places = (("resource", "key"), ("rate_limit", "resource_key"), ("alert", "subject"))
    query = " UNION ".join(f"SELECT {name} FROM {{{t}}} WHERE {name} > :low AND {name} < :high" for t, name in places)
    return list(d.run(c, query, params).scalars())


# -- erasing -----------------------------------------------------------------------------------------------------------


def _edge(c: Connection, d: Dialect, table: str, after: Any, size: int) -> Any:
    """The last id of the window behind ``after``; None: it reaches to the end."""
    row = d.run(
        c,
        f"SELECT id FROM {{{table}}} WHERE id > :after_id ORDER BY id LIMIT 1 OFFSET :size",
        {"after_id": d.id(after) if isinstance(after, UUID) else after, "size": size - 1},
        **({"id": ID} if isinstance(after, UUID) else {}),
    ).first()
    return None if row is None else row[0]


def _window(d: Dialect, column: str, after: Any, edge: Any) -> tuple[str, dict[str, Any]]:
    values = {name: d.id(v) if isinstance(v, UUID) else v for name, v in (("first_id", after), ("last_id", edge))}
    if edge is None:
        return f"{column} > :first_id", {"first_id": values["first_id"]}
    return f"{column} > :first_id AND {column} <= :last_id", values


def jobs(c: Connection, d: Dialect, name: Name, place: Place, *, dry_run: bool) -> tuple[Counter[str], Place | None]:
    """Delete the jobs of the next window, with what hangs on them; running ones stay, and locked ones.

    Returns how many rows of which table, and where to go on (None: there is no next window).
    """
    edge = _edge(c, d, "job", place.job, WINDOW)
    window, values = _window(d, "id", place.job, edge)
    most = WINDOW if dry_run else BATCH
    rows = d.run(
        c,
        "SELECT id, followed, ordering_key IS NOT NULL AS is_ordered, resource_key,"
        f" CASE WHEN {_OUTBOX} THEN {_of(d, 'payload', 'id')} END AS event_id FROM {{job}} WHERE {window}"
        f" AND {_condition(d, 'job')}{'' if dry_run else _AT_REST} ORDER BY id LIMIT :limit"
        f"{'' if dry_run else ' {skip_locked}'}",
        {**values, **_params(d, name), "limit": most},
        id=ID,
    ).all()
    next_ = rows[-1].id if len(rows) == most else edge
    tally = _with_jobs(c, d, rows, dry_run=dry_run)
    if not dry_run:  # jobs of others that wait for this resource wait no longer
        both = {**values, **_params(d, name)}
        waits = f"({_here('waiting_for')} OR waiting_for {d.among('hosts', 'text')})"
        d.run(c, f"UPDATE {{job}} SET waiting_for = NULL WHERE {window} AND {waits}", both)
    return tally, None if next_ is None else place._replace(job=next_)


_AT_REST: Final = " AND state <> 'running'"


def _with_jobs(c: Connection, d: Dialect, rows: Sequence[Any], *, dry_run: bool) -> Counter[str]:
    """Delete jobs whose rows are locked, their history, dependencies and notes of the inbox; what waited goes on."""
    if not rows:
        return Counter()
    ids = {"ids": d.pack_ids([r.id for r in rows])}
    messages = {"messages": d.pack_keys([r.event_id for r in rows if r.event_id])}
    tally = Counter({"job": len(rows)})
    if not dry_run:
        now = d.now(c)
        d.run(
            c,
            f"UPDATE {{job}} SET state = 'cancelled', version = version + 1, waits = 0, {AT_THE_END_SQL},"
            f" finished_at = :now WHERE id {d.among('ids', 'uuid')} AND finished_at IS NULL",
            {**ids, "now": now},
        )
        followed, in_order = [r.id for r in rows if r.followed], [r.id for r in rows if r.is_ordered]
        release_followers(c, d, followed, in_order, now, gone=True)
    inbox = f"consumer IN ({_CONSUMERS}) AND message_id {d.among('messages', 'text')}"
    of_jobs = f"job_id {d.among('ids', 'uuid')}"
    for table, where, params in (
        ("attempt", of_jobs, ids), ("dependency", of_jobs, ids), ("inbox", inbox, messages),
    ):  # fmt: skip
        tally[table] += _count(c, d, table, where, params) if dry_run else _delete(c, d, table, where, params)
    if not dry_run:
        _delete(c, d, "job", f"id {d.among('ids', 'uuid')}", ids)
    return tally


# Each consumer by one look into the index, however many messages it took.
_CONSUMERS: Final = (
    "WITH RECURSIVE names(name) AS (SELECT min(consumer) FROM {inbox}"
    " UNION ALL SELECT (SELECT min(consumer) FROM {inbox} WHERE consumer > names.name) FROM names"
    " WHERE names.name IS NOT NULL) SELECT name FROM names WHERE name IS NOT NULL"
)


def _delete(c: Connection, d: Dialect, table: str, where: str, params: Mapping[str, Any]) -> int:
    return int(d.run(c, f"DELETE FROM {{{table}}} WHERE {where}", params).rowcount)


def _count(c: Connection, d: Dialect, table: str, where: str, params: Mapping[str, Any]) -> int:
    number: int = d.run(c, f"SELECT count(*) FROM {{{table}}} WHERE {where}", params).scalar_one()
    return number


def attempts(
    c: Connection, d: Dialect, name: Name, place: Place, *, dry_run: bool
) -> tuple[Counter[str], Place | None]:
    """Delete the executions of the next window that name the resource: of jobs of others, too."""
    edge = _edge(c, d, "attempt", place.attempt, WINDOW)
    window, values = _window(d, "id", place.attempt, edge)
    where, params = f"{window} AND {_condition(d, 'attempt')}{_of_others(d)}", {**values, **_params(d, name)}
    number = _count(c, d, "attempt", where, params) if dry_run else _delete(c, d, "attempt", where, params)
    return Counter({"attempt": number}), None if edge is None else place._replace(attempt=edge)


def _of_others(d: Dialect) -> str:
    """Of executions: those whose job is none of the resource's; the others hang on it."""
    return f" AND NOT EXISTS (SELECT 1 FROM {{job}} WHERE {{job}}.id = job_id AND {_condition(d, 'job')})"


def steps(c: Connection, d: Dialect, name: Name, place: Place, *, dry_run: bool) -> tuple[Counter[str], Place | None]:
    """Delete the resource's steps of the next window of workflows, and workflows that have no other step."""
    edge = _edge(c, d, "workflow", place.workflow, WINDOW)
    window, values = _window(d, "workflow_id", place.workflow, edge)
    where, params = f"{window} AND {_here('resource_key')}", {**values, **_params(d, name)}
    others = f"SELECT 1 FROM {{step}} s WHERE s.workflow_id = {{workflow}}.id AND NOT {_here('s.resource_key')}"
    alone = f"id IN (SELECT workflow_id FROM {{step}} WHERE {where}) AND NOT EXISTS ({others})"
    reach = _count if dry_run else _delete
    tally = Counter({"workflow": reach(c, d, "workflow", alone, params)})
    tally["step"] = reach(c, d, "step", where, params)
    return tally, None if edge is None else place._replace(workflow=edge)


def others(c: Connection, d: Dialect, name: Name, table: str, *, dry_run: bool) -> tuple[Counter[str], bool]:
    """Delete some of the rows of one other table; returns how many, and whether there may be more."""
    where, params = _condition(d, table), _params(d, name)
    if table == "connection":
        return _connections(c, d, name, dry_run=dry_run)
    if dry_run:
        return Counter({table: _count(c, d, table, where, params)}), False
    if table == "resource":
        return _resources(c, d, name)
    if table == "authorization":  # few; what is written at this moment is waited for
        return Counter({table: _delete(c, d, table, where, params)}), False
    if table == "order":  # a key with a head has a job that was enqueued meanwhile
        where += " AND head_id IS NULL"
    if table == "turn":
        ready = "SELECT 1 FROM {job} j WHERE j.state = 'ready' AND j.resource_key = {turn}.resource_key"
        where += f" AND NOT EXISTS ({ready})"
    row = "ctid" if d.is_postgresql else "rowid"
    chosen = d.chosen(f"SELECT {row} FROM {{{table}}} WHERE {where} LIMIT :limit")
    number = _delete(c, d, table, f"{row} {chosen} AND {where}", {**params, "limit": BATCH})
    return Counter({table: number}), number > 0


def _connections(c: Connection, d: Dialect, name: Name, *, dry_run: bool) -> tuple[Counter[str], bool]:
    """Delete connections, and grants that no other account uses."""
    here, params = _condition(d, "connection"), {**_params(d, name), "limit": BATCH}
    grant_ids = d.run(
        c,
        f"SELECT DISTINCT grant_id FROM {{connection}} WHERE {here} ORDER BY grant_id LIMIT :limit",
        params,
        grant_id=ID,
    ).all()
    tally = Counter[str]()
    for (id_,) in grant_ids:
        if not dry_run:
            grants.lock(c, d, id_)
        shared = f"grant_id = :grant_id AND NOT {here}"
        of_grant = {**_params(d, name), "grant_id": d.id(id_)}
        is_shared = _count(c, d, "connection", shared, of_grant) > 0
        reach = _count if dry_run else _delete
        tally["connection"] += reach(c, d, "connection", f"grant_id = :grant_id AND {here}", of_grant)
        if not is_shared:
            tally["grant"] += reach(c, d, "grant", "id = :id", {"id": d.id(id_)})
    return tally, not dry_run and len(grant_ids) == BATCH


def _resources(c: Connection, d: Dialect, name: Name) -> tuple[Counter[str], bool]:
    """Delete resource rows; turns of others that are parked there are served again, the breaker above forgets it."""
    here = _condition(d, "resource")
    rows = d.run(
        c,
        f"SELECT key FROM {{resource}} WHERE {here} ORDER BY key LIMIT :limit {{row_lock}}",
        {**_params(d, name), "limit": BATCH},
    ).all()
    keys = {"keys": d.pack_keys([row[0] for row in rows])}
    parked = d.run(
        c, f"DELETE FROM {{turn}} WHERE parked_on {d.among('keys', 'text')} RETURNING resource_key, priority", keys
    ).all()
    turns.insert(c, d, [(row[0], row[1]) for row in parked])
    number = _delete(c, d, "resource", f"key {d.among('keys', 'text')}", keys)
    _forget(c, d, name)
    return Counter({"resource": number}), len(rows) == BATCH


def _forget(c: Connection, d: Dialect, name: Name) -> None:
    """Take a resource out of what the breaker above it notes of who was well lately, and who was not."""
    above, _, child = name.key.rpartition("/")
    row = d.run(c, 'SELECT "window" FROM {resource} WHERE key = :key {row_lock}', {"key": above}, window=JSON).first()
    window = Window.from_json(None if row is None else row[0])
    if child in {**window.well, **window.ill}:
        rest = replace(window, well=_without(window.well, child), ill=_without(window.ill, child))
        doc = "CAST(:doc AS json)" if d.is_postgresql else ":doc"
        values = {"key": above, "doc": json.dumps(rest.to_json())}
        d.run(c, f'UPDATE {{resource}} SET "window" = {doc} WHERE key = :key', values)


def _without(times: Mapping[str, float], child: str) -> dict[str, float]:
    return {name: at for name, at in times.items() if name != child}


# -- exporting ---------------------------------------------------------------------------------------------------------

EXPORTED: Final = (
    "resource", "connection", "grant", "authorization", "rate_limit", "schedule_account", "cursor", "order", "turn",
    "inbox", "inbox_key", "workflow", "alert", "audit",
)  # fmt: skip


def rows(c: Connection, d: Dialect, name: Name, table: str) -> list[dict[str, Any]]:
    """The rows of one table about the resource, without secrets."""
    return list(_read(c, d, table, d.named(_condition(d, table)), _params(d, name)))


def windowed(
    c: Connection, d: Dialect, name: Name, table: str, place: Place
) -> tuple[list[tuple[str, dict[str, Any]]], Place | None]:
    """The rows of the next window of one of `WINDOWS`, each with its table; jobs with what hangs on them."""
    column, ids = ("workflow_id", "workflow") if table == "step" else ("id", table)
    after = getattr(place, ids)
    edge = _edge(c, d, ids, after, BATCH if table == "job" else WINDOW)
    window, values = _window(d, column, after, edge)
    where, params = f"{window} AND {_condition(d, table)}", {**values, **_params(d, name)}
    if table == "attempt":
        where += _of_others(d)
    out = [(table, row) for row in _read(c, d, table, d.named(where), params)]
    if table == "job" and out:
        packed = {"ids": d.pack_ids([UUID(row["id"]) for _, row in out])}
        for other in ("attempt", "dependency"):
            of_jobs = f"job_id {d.among('ids', 'uuid')}"
            out += [(other, row) for row in _read(c, d, other, of_jobs, packed)]
    return out, None if edge is None else place._replace(**{ids: edge})


def _read(c: Connection, d: Dialect, table: str, where: str, params: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    source = tables.metadata.tables[f"resilient_{table}"]
    columns = [column for column in source.c if column.name not in SECRET.get(table, ())]
    for row in d.execute(c, sa.select(*columns).where(sa.text(where)), params).mappings():
        yield {name: plain(value) for name, value in row.items()}
