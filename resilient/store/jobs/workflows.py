"""Workflows and their steps.

Each step is a job. Whatever ends one of them, or its undo, asks for a look at the workflow (`ask`, its last statement
but the commit); staging looks (`due`), decides (`core/jobs/workflow.py`) and writes, in a transaction of its own that
never waits for a job: the order of locks is jobs, then workflows, and staging has it the other way round.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.core.jobs.outcomes import BROKEN_OFF, INTERRUPTED
from resilient.core.jobs.states import JobState
from resilient.core.jobs.workflow import OVER, StepFacts, StepInfo, WorkflowInfo, WorkflowState
from resilient.store.db.dialect import ID, JSON, TIME
from resilient.store.jobs.queries import ReadableDocument, document

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection, Row

    from resilient.store.db.dialect import Dialect

CANCELLED: Final = "it was cancelled"  # why a workflow turned around
DUE_LIMIT: Final = 50
LIST_LIMIT: Final = 1_000


class NewStep(NamedTuple):
    """A step to insert; its job is written beside it."""

    name: str
    no: int
    job_id: UUID
    kind: str
    resource_key: str
    after: tuple[str, ...] = ()
    undo_kind: str | None = None
    undo_payload: str | None = None  # JSON text
    undo_version: int | None = None
    undo_max_attempts: int | None = None


_STEP: Final = {
    "name": "text", "no": "int", "job_id": "uuid", "kind": "text", "resource_key": "text", "after_names": "json",
    "undo_kind": "text", "undo_payload": "json", "undo_version": "int", "undo_max_attempts": "int",
}  # fmt: skip


def insert(c: Connection, d: Dialect, id_: UUID, name: str, now: datetime, *, attention: bool = False) -> None:
    """Insert a running workflow. ``attention``: ask for a look, because no step's end will."""
    d.run(
        c,
        "INSERT INTO {workflow} (id, name, state, attention, created_at, updated_at)"
        " VALUES (:id, :name, 'running', :attention, :now, :now)",
        {"id": d.id(id_), "name": name, "attention": attention, "now": now},
    )


def insert_steps(c: Connection, d: Dialect, workflow_id: UUID, steps: Sequence[NewStep]) -> set[str]:
    """Insert steps; returns the names that are new."""
    names = ", ".join(_STEP)
    doc = [
        {
            "name": s.name, "no": s.no, "job_id": d.id(s.job_id), "kind": s.kind, "resource_key": s.resource_key,
            "after_names": list(s.after), "undo_kind": s.undo_kind,
            "undo_payload": None if s.undo_payload is None else json.loads(s.undo_payload),
            "undo_version": s.undo_version, "undo_max_attempts": s.undo_max_attempts,
        }
        for s in steps
    ]  # fmt: skip
    rows = d.run(
        c,
        f"INSERT INTO {{step}} (workflow_id, {names}) SELECT {_uuid(d, 'workflow_id')}, {names}"
        f" FROM {d.records('doc', _STEP)} AS p WHERE true ON CONFLICT (workflow_id, name) DO NOTHING RETURNING name",
        {"workflow_id": d.id(workflow_id), "doc": json.dumps(doc)},
    )
    return {r[0] for r in rows}


def _uuid(d: Dialect, param: str) -> str:
    return f"CAST(:{param} AS uuid)" if d.is_postgresql else f":{param}"


def of_job(c: Connection, d: Dialect, job_id: UUID) -> UUID | None:
    """The workflow of which a job is a step, or the undo of one."""
    for column in ("job_id", "undo_job_id"):
        id_: UUID | None = d.run(
            c, f"SELECT workflow_id FROM {{step}} WHERE {column} = :id", {"id": d.id(job_id)}, workflow_id=ID
        ).scalar()
        if id_ is not None:
            return id_
    return None


def find(c: Connection, d: Dialect, id_: UUID, *, lock: bool) -> tuple[str, str, int] | None:
    """Name and state of a workflow, and the number of its next step; with ``lock`` it stays so until the commit.

    Not a count: a step that was kept leaves its number unused, and none may come before what added it.
    """
    how = " {row_lock}" if lock else ""
    row = d.run(c, "SELECT name, state FROM {workflow} WHERE id = :id" + how, {"id": d.id(id_)}).one_or_none()
    if row is None:
        return None
    following = "SELECT coalesce(max(no) + 1, 0) FROM {step} WHERE workflow_id = :id"
    return row[0], row[1], d.run(c, following, {"id": d.id(id_)}).scalar_one()


def ask(c: Connection, d: Dialect, ids: Collection[UUID], now: datetime) -> None:
    """Ask for a look at the workflows of these jobs, which ended."""
    members = d.chosen(
        f"SELECT workflow_id FROM {{step}} WHERE job_id {d.among('ids', 'uuid')}"
        f" UNION ALL SELECT workflow_id FROM {{step}} WHERE undo_job_id {d.among('ids', 'uuid')}"
    )
    open_ = d.chosen(f"SELECT id FROM {{workflow}} WHERE finished_at IS NULL AND id {members} ORDER BY id {{row_lock}}")
    d.run(
        c,
        f"UPDATE {{workflow}} SET attention = true, updated_at = :now WHERE id {open_}",
        {"ids": d.pack_ids(sorted(ids)), "now": now},
    )


def cancel(c: Connection, d: Dialect, ids: Collection[UUID], over: Collection[UUID], now: datetime) -> None:
    """Turn running workflows around. ``over``: ended jobs, whose workflows are locked too, all in one order."""
    params = {"ids": d.pack_ids(sorted(ids)), "jobs": d.pack_ids(sorted(over))}
    members = d.chosen(
        f"SELECT workflow_id FROM {{step}} WHERE job_id {d.among('jobs', 'uuid')}"
        f" UNION ALL SELECT workflow_id FROM {{step}} WHERE undo_job_id {d.among('jobs', 'uuid')}"
        f" UNION ALL SELECT id FROM {{workflow}} WHERE id {d.among('ids', 'uuid')}"
    )
    d.run(c, f"SELECT id FROM {{workflow}} WHERE id {members} ORDER BY id {{row_lock}}", params).all()
    d.run(
        c,
        "UPDATE {workflow} SET state = 'undoing', reason = :reason, attention = true, updated_at = :now"
        f" WHERE state = 'running' AND id {d.among('ids', 'uuid')}",
        {"ids": params["ids"], "reason": CANCELLED, "now": now},
    )


def turned_around(c: Connection, d: Dialect, ids: Iterable[UUID]) -> set[UUID]:
    """Those of these jobs that are steps of a workflow that turned around; locks the workflows."""
    params = {"ids": d.pack_ids(sorted(ids))}
    members = d.chosen(f"SELECT workflow_id FROM {{step}} WHERE job_id {d.among('ids', 'uuid')}")
    d.run(c, f"SELECT id FROM {{workflow}} WHERE id {members} ORDER BY id {{row_lock}}", params).all()
    rows = d.run(  # how they stand, now that they stay so
        c,
        "SELECT s.job_id, w.state FROM {step} s JOIN {workflow} w ON w.id = s.workflow_id"
        f" WHERE s.job_id {d.among('ids', 'uuid')}",
        params,
        job_id=ID,
        state=None,
    )
    return {r[0] for r in rows if r[1] not in (WorkflowState.RUNNING, WorkflowState.SUCCEEDED)}


def in_open_ones(c: Connection, d: Dialect, ids: Collection[UUID]) -> set[UUID]:
    """Those of these jobs that are steps, or undos of steps, of workflows that are not over."""
    if not ids:
        return set()
    packed = {"ids": d.pack_ids(sorted(ids))}
    members = set["UUID"]()
    for column in ("job_id", "undo_job_id"):
        rows = d.run(
            c,
            f"SELECT s.{column} AS id FROM {{step}} s JOIN {{workflow}} w ON w.id = s.workflow_id"
            f" WHERE s.{column} {d.among('ids', 'uuid')} AND w.finished_at IS NULL",
            packed,
            id=ID,
        )
        members |= {row.id for row in rows}
    return members


# -- looking at them ---------------------------------------------------------------------------------------------------


def due(c: Connection, d: Dialect, after: str = "", limit: int = DUE_LIMIT) -> Sequence[Row[Any]]:
    """Lock workflows to look at: (id, name, state, reason); those that are locked are left out.

    In a circle by id, from the one behind ``after`` on: one that has to be looked at again and again, because somebody
    holds its jobs, must not keep its place before others.
    """
    rows: list[Row[Any]] = []
    for sign in (">", "<=") if after else (">",):
        rows += d.run(
            c,
            f"SELECT id, name, state, reason FROM {{workflow}} WHERE attention AND id {sign} {_behind(d)}"
            " ORDER BY id LIMIT :limit {leaf_lock}",
            {"after_id": after, "limit": limit - len(rows)},
            id=ID,
            name=None,
            state=None,
            reason=None,
        ).all()
        if len(rows) >= limit:
            break
    return rows


def _behind(d: Dialect) -> str:
    """The id in ``:after_id``, before all others if it is empty."""
    if d.is_postgresql:
        return "CAST(coalesce(nullif(:after_id, ''), '00000000-0000-0000-0000-000000000000') AS uuid)"
    return ":after_id"


def unattended(c: Connection, d: Dialect, after: str, limit: int) -> Sequence[Row[Any]]:
    """The next workflows that are not over and for which no look was asked for: (id, state), by id."""
    behind = _behind(d)
    each = " UNION ALL ".join(  # one walk along the index for each state: most workflows are over
        f"SELECT * FROM (SELECT id, state FROM {{workflow}} WHERE state = '{state.value}' AND id > {behind}"
        f" AND NOT attention ORDER BY id LIMIT :limit) AS {state.value}"
        for state in WorkflowState
        if state not in OVER
    )
    return d.run(
        c,
        f"SELECT id, state FROM ({each}) AS unattended ORDER BY id LIMIT :limit",
        {"after_id": after, "limit": limit},
        id=ID,
        state=None,
    ).all()


def hold_unattended(c: Connection, d: Dialect, ids: Collection[UUID]) -> Sequence[Row[Any]]:
    """Lock those of these that still are: (id, state); those that are locked are left out."""
    return d.run(
        c,
        "SELECT id, state FROM {workflow} WHERE NOT attention AND finished_at IS NULL"
        f" AND id {d.among('ids', 'uuid')} ORDER BY id {{leaf_lock}}",
        {"ids": d.pack_ids(sorted(ids))},
        id=ID,
        state=None,
    ).all()


def look_at(c: Connection, d: Dialect, ids: Collection[UUID], now: datetime) -> None:
    """Ask for a look at locked workflows."""
    d.run(
        c,
        f"UPDATE {{workflow}} SET attention = true, updated_at = :now WHERE id {d.among('ids', 'uuid')}",
        {"ids": d.pack_ids(sorted(ids)), "now": now},
    )


def write(
    c: Connection,
    d: Dialect,
    id_: UUID,
    state: WorkflowState,
    reason: str | None,
    now: datetime,
    *,
    over: bool,
    attention: bool,
) -> None:
    """Write the decision about a locked workflow."""
    d.run(
        c,
        "UPDATE {workflow} SET state = :state, reason = :reason, attention = :attention, updated_at = :now,"
        f" finished_at = {'CAST(:now AS {timestamp})' if over else 'NULL'} WHERE id = :id",
        {"id": d.id(id_), "state": state.value, "reason": reason, "attention": attention, "now": now},
    )


def undos_of(c: Connection, d: Dialect, ids: Collection[UUID]) -> dict[str, list[UUID]]:
    """The kinds of the undos of these jobs that may run once more, each with the jobs whose undo it is.

    Steps of a workflow that turned around run no more: what they may have done, they did with the payload they had.
    """
    rows = d.run(
        c,
        "SELECT s.undo_kind, s.job_id FROM {step} s JOIN {workflow} w ON w.id = s.workflow_id"
        f" WHERE s.job_id {d.among('ids', 'uuid')} AND s.undo_kind IS NOT NULL AND s.undo_job_id IS NULL"
        " AND w.state = 'running' ORDER BY s.job_id",
        {"ids": d.pack_ids(sorted(ids))},
        undo_kind=None,
        job_id=ID,
    )
    jobs: dict[str, list[UUID]] = {}
    for row in rows:
        jobs.setdefault(row.undo_kind, []).append(row.job_id)
    return jobs


def edit_undos(c: Connection, d: Dialect, ids: Collection[UUID], payload: str, version: int) -> None:
    """Give the undos of these jobs, which are of one kind and have not begun, another payload (JSON text)."""
    document = "CAST(:payload AS json)" if d.is_postgresql else ":payload"
    d.run(
        c,
        f"UPDATE {{step}} SET undo_payload = {document}, undo_version = :version"
        f" WHERE job_id {d.among('ids', 'uuid')} AND undo_kind IS NOT NULL AND undo_job_id IS NULL",
        {"ids": d.pack_ids(sorted(ids)), "payload": payload, "version": version},
    )


def undo_payload(c: Connection, d: Dialect, id_: UUID, name: str) -> str | None:
    """What the undo of a step gets (JSON text)."""
    text = "CAST(undo_payload AS text)" if d.is_postgresql else "undo_payload"
    step = " FROM {step} WHERE workflow_id = :id AND name = :name"
    payload: str | None = d.run(c, f"SELECT {text}{step}", {"id": d.id(id_), "name": name}).scalar()
    return payload


def results_of(c: Connection, d: Dialect, ids: Collection[UUID]) -> dict[UUID, Any]:
    """The results of these jobs."""
    rows = d.run(
        c,
        f"SELECT id, result FROM {{job}} WHERE id {d.among('ids', 'uuid')}",
        {"ids": d.pack_ids(sorted(ids))},
        id=ID,
        result=JSON,
    )
    return {row.id: row.result for row in rows}


def undo_begins(c: Connection, d: Dialect, id_: UUID, name: str, job_id: UUID) -> None:
    """Write which job undoes a step."""
    d.run(
        c,
        f"UPDATE {{step}} SET undo_job_id = {_uuid(d, 'job_id')} WHERE workflow_id = :id AND name = :name",
        {"id": d.id(id_), "name": name, "job_id": d.id(job_id)},
    )


_KINDS: Final = ", ".join(f"'{kind}'" for kind in sorted(BROKEN_OFF))
# An execution ``a`` of the history after which nobody knows what its step did: broken off, or followed by another
# operation although it had succeeded, or a request of it was not answered.
_IN_DOUBT: Final = f"(a.code = '{INTERRUPTED}' OR a.kind IN ({_KINDS}) OR a.decision IN ('retried', 'replaced'))"
# Whether such a one is still to be read: its workflow may turn around.
IS_NEEDED: Final = (
    f"CASE WHEN {_IN_DOUBT} THEN (SELECT (SELECT w.id FROM {{workflow}} w WHERE w.id = s.workflow_id"
    " AND w.finished_at IS NULL) FROM {step} s WHERE s.job_id = a.job_id LIMIT 1) IS NOT NULL ELSE false END"
)
_STEPS_OF: Final = (
    "SELECT s.workflow_id, s.name, s.no, s.kind, s.resource_key, s.job_id, s.after_names, s.undo_kind, s.undo_version,"
    " s.undo_max_attempts, s.undo_job_id, j.state, j.attempts, {result} AS result, j.last_error,"
    " j.last_error_kind, j.started_at, j.finished_at, u.state AS undo_state, u.last_error AS undo_error,"
    " (j.sent IS NOT NULL OR (j.state IN ('dead', 'cancelled') AND EXISTS (SELECT 1 FROM {attempt} a WHERE"
    f" a.job_id = j.id AND {_IN_DOUBT}))) AS in_doubt"
    " FROM {step} s LEFT JOIN {job} j ON j.id = s.job_id LEFT JOIN {job} u ON u.id = s.undo_job_id"
)
_STEP_TYPES: Final[dict[str, Any]] = {
    "workflow_id": ID, "name": None, "no": None, "kind": None, "resource_key": None, "job_id": ID, "after_names": JSON,
    "undo_kind": None, "undo_version": None, "undo_max_attempts": None, "undo_job_id": ID,
    "state": None, "attempts": None, "result": ReadableDocument(), "last_error": None, "last_error_kind": None,
    "started_at": TIME, "finished_at": TIME, "undo_state": None, "undo_error": None, "in_doubt": None,
}  # fmt: skip


def steps_of(c: Connection, d: Dialect, ids: Collection[UUID], *, results: bool = False) -> dict[UUID, list[Row[Any]]]:
    """The steps of workflows, with their jobs as they stand, in their order.

    Each step's end has somebody read all steps of its workflow: of ``results``, up to 1 MiB each, only who needs them.
    """
    steps: dict[UUID, list[Row[Any]]] = {id_: [] for id_ in ids}
    if ids:
        rows = d.run(
            c,
            _STEPS_OF.replace("{result}", document(d, "j.result") if results else "NULL")
            + f" WHERE s.workflow_id {d.among('ids', 'uuid')} ORDER BY s.workflow_id, s.no",
            {"ids": d.pack_ids(sorted(ids))},
            **_STEP_TYPES,
        )
        for row in rows:
            steps[row.workflow_id].append(row)
    return steps


def states_of(c: Connection, d: Dialect, id_: UUID) -> list[StepFacts]:
    """The states of a workflow's steps, and nothing else of them."""
    rows = d.run(
        c,
        "SELECT s.name, s.no, j.state FROM {step} s LEFT JOIN {job} j ON j.id = s.job_id WHERE s.workflow_id = :id",
        {"id": d.id(id_)},
    ).all()
    return [StepFacts(name, no, None if state is None else JobState(state)) for name, no, state in rows]


_COLUMNS: Final = "id, name, state, reason, created_at, updated_at, finished_at"
_TYPES: Final[dict[str, Any]] = {
    "id": ID, "name": None, "state": None, "reason": None, "created_at": TIME, "updated_at": TIME, "finished_at": TIME,
}  # fmt: skip


def get(c: Connection, d: Dialect, id_: UUID, *, results: bool = True) -> WorkflowInfo | None:
    """One workflow with its steps."""
    rows = d.run(c, f"SELECT {_COLUMNS} FROM {{workflow}} WHERE id = :id", {"id": d.id(id_)}, **_TYPES).all()
    return _infos(c, d, rows, results=results)[0] if rows else None


def page(
    c: Connection, d: Dialect, *, state: str | None, name: str | None, after: UUID | None, limit: int
) -> list[WorkflowInfo]:
    """Up to ``limit`` workflows with their steps, the newest first, from the one that follows ``after``."""
    where, params = ["true"], {"limit": limit}
    filters: dict[str, Any] = {"state": state, "name": name}
    for column, value in filters.items():
        if value is not None:
            where.append(f"{column} = :{column}")
            params[column] = value
    if after is not None:
        where.append("id < :after_id")
        params["after_id"] = d.id(after)  # type: ignore[assignment]
    rows = d.run(
        c,
        f"SELECT {_COLUMNS} FROM {{workflow}} WHERE {' AND '.join(where)} ORDER BY id DESC LIMIT :limit",
        params,
        **_TYPES,
    ).all()
    return _infos(c, d, rows, results=True)


def _infos(c: Connection, d: Dialect, rows: Sequence[Row[Any]], *, results: bool) -> list[WorkflowInfo]:
    steps = steps_of(c, d, [row.id for row in rows], results=results)
    return [
        WorkflowInfo(
            id=row.id,
            name=row.name,
            state=WorkflowState(row.state),
            reason=row.reason,
            created_at=row.created_at,
            updated_at=row.updated_at,
            finished_at=row.finished_at,
            steps=tuple(_step_info(step) for step in steps[row.id]),
        )
        for row in rows
    ]


def _step_info(row: Row[Any]) -> StepInfo:
    return StepInfo(
        name=row.name,
        kind=row.kind,
        resource_key=row.resource_key,
        job_id=row.job_id,
        state=None if row.state is None else JobState(row.state),
        after=tuple(row.after_names or ()),
        attempts=row.attempts or 0,
        result=row.result,
        last_error=row.last_error,
        last_error_kind=row.last_error_kind,
        started_at=row.started_at,
        finished_at=row.finished_at,
        undo=row.undo_kind,
        undo_job_id=row.undo_job_id,
        undo_state=None if row.undo_state is None else JobState(row.undo_state),
        undo_error=row.undo_error,
    )


# -- retention ---------------------------------------------------------------------------------------------------------


def prune(c: Connection, d: Dialect, before: datetime, limit: int = 500) -> int:
    """Forget workflows that ended before a time and of whose jobs none is left."""
    rows = d.run(
        c,
        "SELECT w.id FROM {workflow} w WHERE w.finished_at < :before AND NOT EXISTS (SELECT 1 FROM {step} s"
        " JOIN {job} j ON j.id = s.job_id OR j.id = s.undo_job_id WHERE s.workflow_id = w.id)"
        " ORDER BY w.finished_at LIMIT :limit",
        {"before": before, "limit": limit},
        id=ID,
    ).all()
    if rows:
        ids = {"ids": d.pack_ids([r[0] for r in rows])}
        d.run(c, f"DELETE FROM {{step}} WHERE workflow_id {d.among('ids', 'uuid')}", ids)
        d.run(c, f"DELETE FROM {{workflow}} WHERE id {d.among('ids', 'uuid')}", ids)
    return len(rows)
