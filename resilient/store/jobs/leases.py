"""Leases: keeping them, finding those that are over, and what a running job saves under its fence.

The heartbeat's renewal and rescue never wait on a job row.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.store.db.dialect import ID, Dialect
from resilient.store.jobs.columns import selected, types
from resilient.store.jobs.finishing import fences
from resilient.store.jobs.insert import json_param

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime, timedelta
    from uuid import UUID

    from sqlalchemy import Connection

# What a holder measures its leases by. `time.monotonic` stands still while a machine sleeps; on Linux it is the only
# one that does, on macOS Python's own does and the system's does not.
_AWAKE: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
clock: Final[Callable[[], float]] = time.monotonic if _AWAKE is None else partial(time.clock_gettime, _AWAKE)


def renew_if_held(
    c: Connection, d: Dialect, fences_: Sequence[tuple[UUID, int]], lease: timedelta, now: datetime
) -> dict[UUID, bool]:
    """Extend the leases still held; returns id to whether a cancel was requested. Never waits on a job row.

    An id that is missing was locked by somebody just now, or its fence is gone: `held_versions` says which.
    """
    if not fences_:
        return {}
    source, params = fences(d, [(i, v, None) for i, v in sorted(fences_)], with_result=False)
    free = d.chosen(
        f"SELECT j.id FROM {{job}} j,{source.removeprefix(' FROM')}"
        " WHERE j.id = p.id AND j.version = p.version AND j.state = 'running' {skip_locked_j}"
    )
    rows = d.run(
        c,
        f"UPDATE {{job}} SET lease_until = :lease_until WHERE id {free} RETURNING id, cancel_requested",
        {**params, "lease_until": now + lease},
        id=ID,
    ).all()
    return {r[0]: bool(r[1]) for r in rows}


def keep_if_held(c: Connection, d: Dialect, id_: UUID, version: int, lease: timedelta) -> bool:
    """Extend one lease, for whoever must know now; False if the fence is gone. Waits for whoever has the row."""
    row = d.run(
        c,
        "UPDATE {job} SET lease_until = :lease_until WHERE id = :id AND version = :version AND state = 'running'"
        " RETURNING 1",
        {"lease_until": d.now(c) + lease, "id": d.id(id_), "version": version},
    ).first()
    return row is not None


def held_versions(c: Connection, d: Dialect, ids: Sequence[UUID]) -> dict[UUID, tuple[int, str]]:
    """The present version and state of some jobs, without locking."""
    rows = d.run(
        c,
        f"SELECT id, version, state FROM {{job}} WHERE id IN (SELECT value FROM {d.array('ids', 'uuid')})",
        {"ids": d.pack_ids(ids)},
        id=ID,
    )
    return {r[0]: (r[1], r[2]) for r in rows}


def ends(c: Connection, d: Dialect, ids: Sequence[UUID]) -> dict[UUID, tuple[int, str, bool]]:
    """Version and state of some jobs, and whether they count no lost worker: of one that was rescued they do."""
    rows = d.run(
        c,
        "SELECT id, version, state, rescues = 0 AS is_calm FROM {job}"
        f" WHERE id IN (SELECT value FROM {d.array('ids', 'uuid')})",
        {"ids": d.pack_ids(ids)},
        id=ID,
    )
    return {r[0]: (r[1], r[2], bool(r[3])) for r in rows}


RESCUE_BATCH: Final = 100


class OverdueJob(NamedTuple):
    """A running job whose lease is over.

    ``alive``: its worker wrote a heartbeat since then. Either it could not renew the lease, because the job was locked;
    or the answer to its claim was lost, and it does not know that it has the job.
    """

    id: UUID
    version: int
    kind: str
    resource_key: str
    attempts: int
    max_attempts: int | None
    executions: int
    deferrals: int
    rescues: int
    expires_at: datetime | None
    sent: Any
    cancel_requested: bool
    once_more: bool
    locked_by: str
    started_at: datetime | None
    alive: bool


_ALIVE: Final = "EXISTS (SELECT 1 FROM {worker} w WHERE w.id = {job}.locked_by AND w.seen_at > {job}.lease_until)"
_OVERDUE: Final = selected(OverdueJob, alive=_ALIVE)


def overdue(c: Connection, d: Dialect, now: datetime, only: UUID | None = None) -> list[OverdueJob]:
    """Running jobs whose lease is over (or this one, if it is), locked; never waits on a job row."""
    this = "" if only is None else " AND id = :id"
    rows = d.run(
        c,
        f"SELECT {_OVERDUE} FROM {{job}}"
        f" WHERE state = 'running' AND lease_until < :now{this} ORDER BY id LIMIT :limit {{skip_locked}}",
        {"now": now, "limit": RESCUE_BATCH} | ({} if only is None else {"id": d.id(only)}),
        **types(OverdueJob, "alive"),
    )
    return [OverdueJob._make(row) for row in rows.all()]


def is_held(c: Connection, d: Dialect, id_: UUID, version: int) -> bool:
    """Whether a running job's fence still holds; it goes on holding until the commit.

    Waits for whoever has the row, as the end of a job does: a renewal of its lease, say, or a program that cancels it.
    """
    return (
        d.run(
            c,
            "SELECT 1 FROM {job} WHERE id = :id AND version = :version AND state = 'running' {row_lock}",
            {"id": d.id(id_), "version": version},
        ).first()
        is not None
    )


def bound_idle(c: Connection, d: Dialect, seconds: float | None) -> None:
    """Let PostgreSQL end this transaction once it was idle for so long, unless its owner has set another limit.

    None: never.

    A process that was stopped in the middle of a handler must not keep the handler's rows locked for ever: another
    worker runs the job meanwhile, and waits for them.
    """
    if d.is_postgresql:
        name = "'idle_in_transaction_session_timeout'"
        d.run(
            c,
            f"SELECT set_config({name}, CAST(:ms AS text), true) WHERE current_setting({name}) = '0'",
            {"ms": str(int((seconds or 0.0) * 1000))},
        )


# -- marks of requests ---------------------------------------------------------------------------------------


def mark_sent_if_held(c: Connection, d: Dialect, id_: UUID, version: int, mark: str | None, now: datetime) -> bool:
    """Commit (or with None clear) the mark of an unanswered non-idempotent request, under the fence."""
    return _save_if_held(c, d, "sent = {value}", id_, version, mark, now)


def set_progress_if_held(c: Connection, d: Dialect, id_: UUID, version: int, progress: str, now: datetime) -> bool:
    """Save the progress that a running job reported (JSON text), under the fence."""
    return _save_if_held(c, d, "progress = {value}", id_, version, progress, now)


def checkpoint_if_held(
    c: Connection, d: Dialect, id_: UUID, version: int, progress: str, now: datetime, *, clear_sent: bool = False
) -> bool:
    """Save a checkpoint under the fence, and forget the workers that the job lost, because progress was made.

    ``clear_sent``: every request before it was answered, and is behind it.
    """
    sets = "progress = {value}, rescues = 0" + (", sent = NULL" if clear_sent else "")
    return _save_if_held(c, d, sets, id_, version, progress, now)


STUCK: Final = "stuck"  # error code of a running job whose handler does not end


def note_stuck_if_held(c: Connection, d: Dialect, id_: UUID, version: int, text: str) -> None:
    """Write into a running job's row that its handler should have ended and has not; its end overwrites it."""
    d.run(
        c,
        "UPDATE {job} SET last_error = :text, last_error_kind = 'timeout', last_error_code = :code, updated_at = :now"
        " WHERE id = :id AND version = :version AND state = 'running'",
        {"text": text, "code": STUCK, "id": d.id(id_), "version": version, "now": d.now(c)},
    )


def _save_if_held(
    c: Connection, d: Dialect, sets: str, id_: UUID, version: int, value: str | None, now: datetime
) -> bool:
    sets = sets.replace("{value}", json_param(d, "value", "json"))
    row = d.run(
        c,
        f"UPDATE {{job}} SET {sets}, updated_at = :now"
        " WHERE id = :id AND version = :version AND state = 'running' RETURNING 1",
        {"value": value, "id": d.id(id_), "version": version, "now": now},
    ).first()
    return row is not None
