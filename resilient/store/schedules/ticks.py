"""Ticks: recurring jobs and the engine's own chores.

Whoever moves `next_at` forward under the row's lock has won the tick; all others see no row. So a tick happens once
over all workers, and no worker leads. A tick's job is inserted in the same transaction (`engine/schedules`).

Rows with a kind are schedules, rows without are chores. A declared schedule finds its row by name; a row that no
declaration names any more stays, marked `removed`, and never ticks. Which declarations there are: `programs.py`.

The row of a schedule `for_each` account is due whenever one of its accounts is, or it is time to look who they are
(`accounts_at`); their ticks are in `accounts.py`.

The last success of a schedule is its last job's, as long as that job is there; `note_successes` and `move_on` keep its
time in the schedule's row before the job is pruned or followed by the next one. Of a job that has not ended when it is
followed, `earlier.py` takes care.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.errors import InvalidInput
from resilient.core.schedules import cron, schedule
from resilient.core.schedules.schedule import ScheduleInfo, Spec
from resilient.store.db.dialect import ID, JSON, TIME
from resilient.store.schedules import accounts as schedule_accounts
from resilient.store.schedules import earlier

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from datetime import datetime, timedelta
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.store.db.dialect import Dialect


_AHEAD: Final = 10  # times a chore's interval: no two versions of a program differ by more, nor two clocks


# -- chores --------------------------------------------------------------------------------------------------


def elect(c: Connection, d: Dialect, name: str, every: timedelta) -> bool:
    """Whether this caller does the chore ``name`` now; at most one caller in ``every``.

    A time farther ahead is of a clock that was wrong: waiting for it, nobody would do the chore for as long.
    """
    now = _chore(c, d, name)
    return (
        d.run(
            c,
            "UPDATE {schedule} SET next_at = :next_at, last_at = :now, updated_at = :now"
            " WHERE name = :name AND (next_at <= :now OR next_at > :far) RETURNING 1",
            {"name": name, "now": now, "next_at": now + every, "far": now + _AHEAD * every},
        ).first()
        is not None
    )


def lead(c: Connection, d: Dialect, name: str, lease: datetime | None, span: timedelta) -> datetime | None:
    """Take or prolong the lease of the one process that does the chore ``name``; returns its end, None if another does.

    ``lease``: the end that this process was given last. Nobody else has written that very time, so it is the fence.
    """
    now = _chore(c, d, name)
    own, params = "", {"name": name, "now": now, "until": now + span, "far": now + _AHEAD * span}
    if lease is not None:
        own, params["lease_until"] = " OR next_at = :lease_until", lease
    row = d.run(
        c,
        "UPDATE {schedule} SET next_at = :until, last_at = :now, updated_at = :now"
        f" WHERE name = :name AND (next_at <= :now OR next_at > :far{own}) RETURNING 1",
        params,
    ).first()
    return None if row is None else now + span


def look_since(c: Connection, d: Dialect, name: str) -> tuple[datetime, datetime]:
    """The span a chore has to look at, (since, now); the next one begins at this now."""
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
    """Lock a chore's row until the transaction ends, so that no other worker does that chore meanwhile.

    Lock it before any other row: it stands in no other order of locks.
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
    """A schedule's row, locked for whoever read it. ``unended``: its last job, if that has not ended."""

    name: str
    kind: str
    spec: Spec
    next_at: datetime
    last_at: datetime | None
    last_job: UUID | None
    paused: bool
    removed: bool
    accounts_at: datetime | None = None
    unended: UUID | None = None


def declare(
    c: Connection,
    d: Dialect,
    declared: Mapping[str, tuple[str, Spec]],
    kinds: Collection[str],
    others: Mapping[str, Collection[str]] | None = None,
    *,
    starts: bool = True,
) -> None:
    """Bring the rows to what a program declares: name to kind and spec.

    A new row, another timing, and one that comes back begin to tick from now on. Rows of the program's ``kinds`` that
    neither it declares nor ``others`` (`programs.others`) are marked removed; other programs' rows stay as they are.
    A program that ``starts`` overwrites what another one wrote; later only what nobody declares any more.
    """
    others = others or {}
    if not starts and not any(_changes(_all(c, d, locked=False), declared, kinds, others, starts=starts)):
        return
    rows, now = _all(c, d), d.now(c)
    news, gone = _changes(rows, declared, kinds, others, starts=starts)
    for name in news:
        if (row := rows.get(name)) is None:
            _insert(c, d, name, *declared[name], now)
        else:
            _redeclare(c, d, name, *declared[name], now, row)
    if gone:
        remove(c, d, gone, now)


def _changes(
    rows: Mapping[str, tuple[str, Any, bool]],
    declared: Mapping[str, tuple[str, Spec]],
    kinds: Collection[str],
    others: Mapping[str, Collection[str]],
    *,
    starts: bool,
) -> tuple[list[str], list[str]]:
    """The schedules that are to be written, and those that are to be marked removed."""
    news = []
    for name, (kind, spec) in sorted(declared.items()):
        row = rows.get(name)
        if row == (kind, spec.to_json(), False):
            continue
        if starts or row is None or row[2] or schedule.digest(*row[:2]) not in others.get(name, ()):
            news.append(name)
    names = declared.keys() | others.keys()
    return news, [name for name, row in rows.items() if name not in names and row[0] in kinds and not row[2]]


def remove(c: Connection, d: Dialect, names: Sequence[str], now: datetime) -> None:
    """Mark locked schedules removed: they tick no more, until a program that starts declares them."""
    d.run(
        c,
        f"UPDATE {{schedule}} SET removed = true, updated_at = :now WHERE name {d.among('names', 'text')}",
        {"names": d.pack_keys(list(names)), "now": now},
    )


def _all(c: Connection, d: Dialect, *, locked: bool = True) -> dict[str, tuple[str, Any, bool]]:
    """Every schedule: its kind, spec, and whether it is removed.

    Locked in the order of names, so that two programs starting at once do not interleave.
    """
    lock = "{row_lock}" if locked else ""
    rows = d.run(
        c,
        f"SELECT name, kind, spec, removed FROM {{schedule}} WHERE kind IS NOT NULL ORDER BY name {lock}",
        name=None,
        kind=None,
        spec=JSON,
        removed=None,
    )
    return {r[0]: (r[1], r[2], bool(r[3])) for r in rows}


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
    """The first tick; a schedule of many accounts looks them up at once."""
    return now if spec.for_each else cron.next_after(spec.ticks, now)


def _redeclare(
    c: Connection, d: Dialect, name: str, kind: str, spec: Spec, now: datetime, row: tuple[Any, ...]
) -> None:
    """Write what changed; ticks start anew if the timing changed or the schedule was away."""
    _, old, removed = row
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


def lock_if_due(c: Connection, d: Dialect, name: str, *, for_each: bool = False) -> tuple[Row, datetime] | None:
    """Lock a schedule that is still due: its row, and now; None if another worker has it or had it.

    ``for_each``: it is served for each account. Raises `InvalidInput` if its row, which another version may have
    written, is not of that sort, or cannot be read here.
    """
    now = d.now(c)
    row = _lock(
        c,
        d,
        "name = :name AND kind IS NOT NULL AND NOT paused AND NOT removed AND next_at <= :now {leaf_lock}",
        {"name": name, "now": now},
    )
    if row is not None and bool(row.spec.for_each) is not for_each:
        sort = "for one resource" if for_each else "for each account"
        raise InvalidInput(
            f"schedule {name!r} was declared {sort} by another version of the program, whose workers serve it"
        )
    return None if row is None else (row, now)


def lock(c: Connection, d: Dialect, name: str) -> Row | None:
    """Lock the row of a schedule; None if there is none. Raises `InvalidInput` if its spec cannot be read here."""
    return _lock(c, d, "name = :name AND kind IS NOT NULL {row_lock}", {"name": name})


def _lock_if_free(c: Connection, d: Dialect, name: str) -> bool:
    """Lock the row of a schedule without waiting and without reading its spec; False if another one has it."""
    sql = "SELECT 1 FROM {schedule} WHERE name = :name AND kind IS NOT NULL {leaf_lock}"
    return d.run(c, sql, {"name": name}).first() is not None


_ROW: Final = (
    "SELECT name, kind, spec, next_at, last_at, last_job, paused, removed, accounts_at, (SELECT j.id FROM {job} j"
    " WHERE j.id = {schedule}.last_job AND j.finished_at IS NULL) AS unended FROM {schedule} WHERE "
)
_ROW_TYPES: Final[dict[str, Any]] = {
    "name": None, "kind": None, "spec": JSON, "next_at": TIME, "last_at": TIME, "last_job": ID, "paused": None,
    "removed": None, "accounts_at": TIME, "unended": ID,
}  # fmt: skip


def _lock(c: Connection, d: Dialect, where: str, params: Mapping[str, Any]) -> Row | None:
    r = d.run(c, _ROW + where, params, **_ROW_TYPES).one_or_none()
    if r is None:
        return None
    if (spec := _spec(r.spec)) is None:
        raise InvalidInput(
            f"schedule {r.name!r} was declared by another version of the program, which this one cannot read: change it"
            " with that version"
        )
    return Row(
        r.name,
        r.kind,
        spec,
        r.next_at,
        r.last_at,
        r.last_job,
        bool(r.paused),
        bool(r.removed),
        r.accounts_at,
        r.unended,
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
    """Write the next tick of a locked schedule; ``job`` None keeps the last one.

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
    """Note that the accounts of a locked schedule were looked up, and are not looked up again before ``at``."""
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


_LAST_SUCCESS: Final = (  # an earlier job may have succeeded after the last one did
    "(SELECT CASE WHEN j.finished_at < {schedule}.succeeded_at THEN {schedule}.succeeded_at ELSE j.finished_at END"
    " FROM {job} j WHERE j.id = {schedule}.last_job AND j.state = 'succeeded')"
)
_SUCCESS: Final = f"succeeded_at = coalesce({_LAST_SUCCESS}, succeeded_at),"


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


def put_right(c: Connection, d: Dialect, names: Collection[str]) -> list[str]:
    """Let those of these schedules tick from now on whose next tick is out of reach; returns their names."""
    now = d.now(c)
    rows = d.run(
        c,
        "SELECT name, spec, next_at FROM {schedule} WHERE kind IS NOT NULL AND NOT paused AND NOT removed"
        f" AND next_at > :soon AND name IN (SELECT value FROM {d.array('names', 'text')}) ORDER BY name",
        {"names": d.pack_keys(list(names)), "soon": now + schedule.NEAR},
        name=None,
        spec=JSON,
        next_at=TIME,
    ).all()
    right = []
    for one in rows:
        if not _is_out_of_reach(_spec(one.spec), one.next_at, now):
            continue
        row = lock(c, d, one.name)
        if row is not None and not (row.paused or row.removed) and _is_out_of_reach(row.spec, row.next_at, now):
            set_paused(c, d, row, paused=False)
            right.append(row.name)
    return right


def _is_out_of_reach(spec: Spec | None, next_at: datetime, now: datetime) -> bool:
    return spec is not None and schedule.is_out_of_reach(spec, next_at, now)


# -- how schedules do: for people, and for the rule that looks for silent ones -----------------------------------------

_INFO: Final = (
    "SELECT s.name, s.kind, s.spec, s.next_at, s.last_at, s.last_job, j.state AS last_state,"
    f" coalesce({_LAST_SUCCESS.replace('{schedule}', 's')}, s.succeeded_at) AS succeeded_at, s.paused, s.removed,"
    " s.active_since FROM {schedule} s LEFT JOIN {job} j ON j.id = s.last_job WHERE s.kind IS NOT NULL"
)
_INFO_TYPES: Final[dict[str, Any]] = {
    "name": None, "kind": None, "spec": JSON, "next_at": TIME, "last_at": TIME, "last_job": ID, "last_state": None,
    "succeeded_at": TIME, "paused": None, "removed": None, "active_since": TIME,
}  # fmt: skip


def page(c: Connection, d: Dialect) -> list[ScheduleInfo]:
    """Every schedule by name."""
    rows = d.run(c, _INFO + " ORDER BY s.name", **_INFO_TYPES).all()
    return _counted([_info(r) for r in rows], schedule_accounts.totals(c, d))


def get(c: Connection, d: Dialect, name: str) -> ScheduleInfo | None:
    """One schedule."""
    r = d.run(c, _INFO + " AND s.name = :name", {"name": name}, **_INFO_TYPES).one_or_none()
    return None if r is None else _counted([_info(r)], schedule_accounts.totals(c, d))[0]


def _counted(infos: list[ScheduleInfo], totals: Mapping[str, schedule_accounts.Total]) -> list[ScheduleInfo]:
    """Add to each schedule `for_each` account the totals of its accounts."""
    return [
        one if (total := totals.get(one.name)) is None else replace(
            one, accounts=total.accounts, next_at=total.next_at,
            succeeded_at=max((at for at in (one.succeeded_at, total.succeeded_at) if at), default=None),
        )
        for one in infos
    ]  # fmt: skip


def _info(r: Any) -> ScheduleInfo:
    spec = _spec(r.spec)
    return ScheduleInfo(
        name=r.name, kind=r.kind, timing="not readable by this version" if spec is None else str(spec.ticks),
        resource_key="" if spec is None else spec.template.resource_key,
        catch_up="" if spec is None else spec.catch_up, overlap="" if spec is None else spec.overlap,
        next_at=r.next_at, last_at=r.last_at, last_job=r.last_job, last_state=r.last_state,
        succeeded_at=r.succeeded_at, paused=bool(r.paused), removed=bool(r.removed),
        for_each="" if spec is None else spec.for_each, accounts=0 if spec is not None and spec.for_each else None,
    )  # fmt: skip


def _spec(doc: Any) -> Spec | None:
    """The spec of a row; None if another version wrote one that this version cannot read."""
    try:
        return Spec.from_json(doc)
    except (KeyError, TypeError, ValueError):
        return None


def overdue(c: Connection, d: Dialect, before: datetime) -> list[tuple[str, datetime]]:
    """The schedules that tick and were due ``before`` a time, and since when, the longest due first."""
    rows = d.run(
        c,
        "SELECT name, next_at FROM {schedule} WHERE kind IS NOT NULL AND NOT paused AND NOT removed"
        " AND next_at < :before ORDER BY next_at, name",
        {"before": before},
        name=None,
        next_at=TIME,
    )
    return [(r.name, r.next_at) for r in rows]


def active(c: Connection, d: Dialect) -> set[str]:
    """The names of all schedules that tick, whoever declares them."""
    return set(d.run(c, "SELECT name FROM {schedule} WHERE kind IS NOT NULL AND NOT paused AND NOT removed").scalars())


@dataclass(frozen=True, slots=True)
class Record:
    """How well a schedule does: since when it ticks, and when a job of it last succeeded."""

    name: str
    kind: str
    spec: Spec
    since: datetime
    succeeded_at: datetime | None
    last_job: UUID | None
    last_state: str | None


def records(c: Connection, d: Dialect, names: Collection[str]) -> list[Record]:
    """The records of those of these schedules that tick."""
    rows = d.run(
        c,
        _INFO + " AND NOT s.paused AND NOT s.removed AND s.active_since IS NOT NULL"
        f" AND s.name IN (SELECT value FROM {d.array('names', 'text')}) ORDER BY s.name",
        {"names": d.pack_keys(list(names))},
        **_INFO_TYPES,
    )
    return [
        Record(r.name, r.kind, spec, r.active_since, r.succeeded_at, r.last_job, r.last_state)
        for r in rows
        if (spec := _spec(r.spec)) is not None
    ]


def note_successes(c: Connection, d: Dialect) -> None:
    """Remember which last and earlier jobs of schedules succeeded: the jobs may be pruned before the next tick.

    A schedule that somebody moves on at this moment is left alone: that notes its last job too.
    """
    news = d.chosen(
        "SELECT s.name FROM {schedule} s JOIN {job} j ON j.id = s.last_job WHERE s.kind IS NOT NULL"
        " AND j.state = 'succeeded' AND (s.succeeded_at IS NULL OR s.succeeded_at < j.finished_at)"
    )
    free = d.chosen(f"SELECT name FROM {{schedule}} WHERE name {news} ORDER BY name {{leaf_lock}}")
    d.run(c, f"UPDATE {{schedule}} SET succeeded_at = coalesce({_LAST_SUCCESS}, succeeded_at) WHERE name {free}")
    for name in set(schedule_accounts.totals(c, d)) & active(c, d):
        if _lock_if_free(c, d, name):  # else the holder of the lock notes it, or the next call
            schedule_accounts.note_successes(c, d, name)
    earlier.note_successes(c, d)
