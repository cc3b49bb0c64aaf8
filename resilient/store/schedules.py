"""Ticks: recurring jobs and the engine's own chores.

Whoever moves `next_at` forward under the row's lock has won the tick; all others see no row. So a tick happens once
over all workers, and no worker leads. A tick's job is inserted in the same transaction (`engine/schedules.py`).

Rows with a kind are schedules, rows without are chores. A declared schedule finds its row by name; a row that no
declaration names any more stays, marked `removed`, and never ticks.

The row of a schedule `for_each` account is due whenever one of its accounts is, or it is time to look who they are
(`accounts_at`); their ticks are in `schedule_accounts.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from resilient.core import cron
from resilient.core.schedule import Spec
from resilient.store import schedule_accounts
from resilient.store.dialect import ID, JSON, TIME

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from datetime import datetime, timedelta
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.store.dialect import Dialect


# -- chores --------------------------------------------------------------------------------------------------


def elect(c: Connection, d: Dialect, name: str, every: timedelta) -> bool:
    """Whether this caller does the chore ``name`` now; at most one caller in ``every``."""
    now = _chore(c, d, name)
    return (
        d.run(
            c,
            "UPDATE {schedule} SET next_at = :next_at, last_at = :now, updated_at = :now"
            " WHERE name = :name AND next_at <= :now RETURNING 1",
            {"name": name, "now": now, "next_at": now + every},
        ).first()
        is not None
    )


def look_since(c: Connection, d: Dialect, name: str) -> tuple[datetime, datetime]:
    """From when until now a chore has to look, so that no moment is looked at twice."""
    now = _chore(c, d, name)
    since = d.run(
        c,
        "SELECT coalesce(last_at, next_at) AS since FROM {schedule} WHERE name = :name {row_lock}",
        {"name": name},
        since=TIME,
    ).scalar_one()
    d.run(
        c,
        "UPDATE {schedule} SET last_at = :now, updated_at = :now WHERE name = :name",
        {"name": name, "now": now},
    )
    return since, now


def hold(c: Connection, d: Dialect, name: str) -> None:
    """Lock a chore's row, until the transaction ends: whoever holds it is the only one at that business.

    Before any other row: no lock order knows it.
    """
    _chore(c, d, name)
    d.run(c, "SELECT 1 FROM {schedule} WHERE name = :name {row_lock}", {"name": name}).all()


def _chore(c: Connection, d: Dialect, name: str) -> datetime:
    now = d.now(c)
    d.run(
        c,
        "INSERT INTO {schedule} (name, next_at, updated_at) VALUES (:name, :now, :now) ON CONFLICT (name) DO NOTHING",
        {"name": name, "now": now},
    )
    return now


# -- declarations --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """A schedule's row, locked for whoever read it."""

    name: str
    kind: str
    spec: Spec
    next_at: datetime
    last_at: datetime | None
    last_job: UUID | None
    paused: bool
    removed: bool
    accounts_at: datetime | None = None


def declare(c: Connection, d: Dialect, declared: Mapping[str, tuple[str, Spec]], kinds: Collection[str]) -> None:
    """Bring the rows to what a program declares: name to kind and spec.

    A new row, another timing, and one that comes back begin to tick from now on. Rows of the program's
    ``kinds`` that it does not declare are marked removed; other programs' rows are theirs.
    """
    found = {r[0]: r[1:] for r in _all(c, d)}
    now = d.now(c)
    for name, (kind, spec) in sorted(declared.items()):
        if (known := found.get(name)) is None:
            _insert(c, d, name, kind, spec, now)
        elif known != (kind, spec.to_json(), False):
            _redeclare(c, d, name, kind, spec, now, known)
    gone = [n for n, r in found.items() if n not in declared and r[0] in kinds and not r[2]]
    if gone:
        d.run(
            c,
            f"UPDATE {{schedule}} SET removed = true, updated_at = :now WHERE name {d.among('names', 'text')}",
            {"names": d.pack_keys(gone), "now": now},
        )


def _all(c: Connection, d: Dialect) -> Sequence[Any]:
    """Every schedule, locked in the order of names, so that two programs starting at once do not interleave."""
    return [
        (r[0], r[1], r[2], bool(r[3]))
        for r in d.run(
            c,
            "SELECT name, kind, spec, removed FROM {schedule} WHERE kind IS NOT NULL ORDER BY name {row_lock}",
            name=None,
            kind=None,
            spec=JSON,
            removed=None,
        )
    ]


def _insert(c: Connection, d: Dialect, name: str, kind: str, spec: Spec, now: datetime) -> None:
    d.run(
        c,
        "INSERT INTO {schedule} (name, kind, spec, next_at, active_since, updated_at)"
        f" VALUES (:name, :kind, {_json(d)}, :next_at, :now, :now) ON CONFLICT (name) DO NOTHING",
        {
            "name": name, "kind": kind, "spec": json.dumps(spec.to_json()),
            "next_at": _first(spec, now), "now": now,
        },
    )  # fmt: skip


def _first(spec: Spec, now: datetime) -> datetime:
    """The first tick; a schedule of many accounts looks at once who they are."""
    return now if spec.for_each else cron.next_after(spec.ticks, now)


def _redeclare(
    c: Connection, d: Dialect, name: str, kind: str, spec: Spec, now: datetime, known: tuple[Any, ...]
) -> None:
    """Write what changed; ticks start anew if the timing changed or the schedule was away."""
    _, old, removed = known
    anew = removed or _timing(old) != _timing(spec.to_json())
    moved = ", next_at = :next_at, accounts_at = NULL, active_since = :now" if anew else ""
    if anew and spec.for_each:
        schedule_accounts.start_anew(c, d, name, now)
    elif anew:
        schedule_accounts.forget(c, d, name)
    d.run(
        c,
        f"UPDATE {{schedule}} SET kind = :kind, spec = {_json(d)}, removed = false, updated_at = :now{moved}"
        " WHERE name = :name",
        {
            "name": name, "kind": kind, "spec": json.dumps(spec.to_json()), "now": now,
            **({"next_at": _first(spec, now)} if anew else {}),
        },
    )  # fmt: skip


def _timing(doc: Mapping[str, Any]) -> tuple[Any, ...]:
    """What decides when there are ticks."""
    return doc.get("ticks"), doc.get("for_each"), doc.get("spread")


def _json(d: Dialect) -> str:
    return "CAST(:spec AS json)" if d.is_postgresql else ":spec"


# -- ticks ---------------------------------------------------------------------------------------------------


def due(c: Connection, d: Dialect, names: Collection[str], limit: int = 100) -> list[str]:
    """The schedules among ``names`` that are due, longest due first."""
    params: dict[str, Any] = {"names": d.pack_keys(list(names)), "limit": limit}
    if (now := d.host_now()) is not None:
        params["now"] = now
    rows = d.run(
        c,
        "SELECT name FROM {schedule} WHERE kind IS NOT NULL AND NOT paused AND NOT removed"
        f" AND next_at <= {d.now_sql} AND name IN (SELECT value FROM {d.array('names', 'text')})"
        " ORDER BY next_at LIMIT :limit",
        params,
    )
    return [r[0] for r in rows]


def lock_if_due(c: Connection, d: Dialect, name: str) -> tuple[Row, datetime] | None:
    """The row of a schedule that is still due, locked, and now; None if somebody else is at it or was."""
    now = d.now(c)
    found = _lock(
        c,
        d,
        "name = :name AND kind IS NOT NULL AND NOT paused AND NOT removed AND next_at <= :now {leaf_lock}",
        {"name": name, "now": now},
    )
    return None if found is None else (found, now)


def lock(c: Connection, d: Dialect, name: str) -> Row | None:
    """The row of a schedule, locked; None if there is none."""
    return _lock(c, d, "name = :name AND kind IS NOT NULL {row_lock}", {"name": name})


def lock_if_free(c: Connection, d: Dialect, name: str) -> Row | None:
    """`lock`, but without waiting: None also if somebody else has it."""
    return _lock(c, d, "name = :name AND kind IS NOT NULL {leaf_lock}", {"name": name})


_ROW: Final = "SELECT name, kind, spec, next_at, last_at, last_job, paused, removed, accounts_at FROM {schedule} WHERE "
_ROW_TYPES: Final[dict[str, Any]] = {
    "name": None, "kind": None, "spec": JSON, "next_at": TIME, "last_at": TIME, "last_job": ID, "paused": None,
    "removed": None, "accounts_at": TIME,
}  # fmt: skip


def _lock(c: Connection, d: Dialect, where: str, params: Mapping[str, Any]) -> Row | None:
    r = d.run(c, _ROW + where, params, **_ROW_TYPES).one_or_none()
    if r is None:
        return None
    return Row(
        r.name,
        r.kind,
        Spec.from_json(r.spec),
        r.next_at,
        r.last_at,
        r.last_job,
        bool(r.paused),
        bool(r.removed),
        r.accounts_at,
    )


def move_on(
    c: Connection,
    d: Dialect,
    name: str,
    now: datetime,
    *,
    next_at: datetime,
    last_at: datetime | None,
    job: UUID | None,
) -> None:
    """Write what became of a locked schedule's ticks; ``job`` None keeps the last one.

    Its last job will not be looked at any more, so a success of it is noted here.
    """
    d.run(
        c,
        f"UPDATE {{schedule}} SET next_at = :next_at, last_at = :last_at, updated_at = :now, {_SUCCESS}"
        " last_job = coalesce(CAST(:job AS {uuid}), last_job) WHERE name = :name".replace("{uuid}", _uuid(d)),
        {
            "name": name, "now": now, "next_at": next_at, "last_at": last_at,
            "job": None if job is None else d.id(job),
        },
    )  # fmt: skip


def look_again(c: Connection, d: Dialect, name: str, at: datetime) -> None:
    """Who the accounts of a locked schedule are is looked at now, and then not before ``at``."""
    d.run(c, "UPDATE {schedule} SET accounts_at = :accounts_at WHERE name = :name", {"name": name, "accounts_at": at})


def move_accounts_on(
    c: Connection, d: Dialect, row: Row, now: datetime, *, next_at: datetime, last_at: datetime | None, job: UUID | None
) -> None:
    """Write when a locked schedule of many accounts is due again, and what its latest tick and job are."""
    at = min(next_at, row.accounts_at or now)
    d.run(
        c,
        "UPDATE {schedule} SET next_at = :next_at, last_at = coalesce(:last_at, last_at), updated_at = :now,"
        f" last_job = coalesce(CAST(:job AS {_uuid(d)}), last_job) WHERE name = :name",
        {"name": row.name, "now": now, "next_at": at, "last_at": last_at, "job": None if job is None else d.id(job)},
    )


LAST_SUCCESS: Final = "(SELECT j.finished_at FROM {job} j WHERE j.id = {schedule}.last_job AND j.state = 'succeeded')"
_SUCCESS: Final = f"succeeded_at = coalesce({LAST_SUCCESS}, succeeded_at),"


def _uuid(d: Dialect) -> str:
    return "uuid" if d.is_postgresql else "text"


def set_paused(c: Connection, d: Dialect, row: Row, *, paused: bool) -> None:
    """Stop or go on ticking. What would have ticked meanwhile never does."""
    now = d.now(c)
    params = {"name": row.name, "paused": paused, "now": now}
    moved = ""
    if not paused:
        moved = ", next_at = :next_at, accounts_at = NULL, active_since = :now"
        params["next_at"] = _first(row.spec, now)
        if row.spec.for_each:
            schedule_accounts.start_anew(c, d, row.name, now)
    d.run(c, f"UPDATE {{schedule}} SET paused = :paused, updated_at = :now{moved} WHERE name = :name", params)
