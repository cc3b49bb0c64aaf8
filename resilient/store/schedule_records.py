"""How schedules do: for people, and for the rule that looks for silent ones.

A success is the last job's, as long as that job is there; `note_successes` and `schedules.move_on` keep its
time in the schedule's row before the job is pruned or followed by the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from resilient.core.schedule import ScheduleInfo, Spec
from resilient.store import schedule_accounts, schedules
from resilient.store.dialect import ID, JSON, TIME
from resilient.store.schedules import LAST_SUCCESS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.store.dialect import Dialect

_INFO: Final = (
    "SELECT s.name, s.kind, s.spec, s.next_at, s.last_at, s.last_job, j.state AS last_state,"
    f" coalesce({LAST_SUCCESS.replace('{schedule}', 's')}, s.succeeded_at) AS succeeded_at, s.paused, s.removed,"
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


def _counted(found: list[ScheduleInfo], totals: Mapping[str, schedule_accounts.Total]) -> list[ScheduleInfo]:
    """With what the accounts of those for many say together."""
    return [
        one if (total := totals.get(one.name)) is None else replace(
            one, accounts=total.accounts, next_at=total.next_at,
            succeeded_at=max((at for at in (one.succeeded_at, total.succeeded_at) if at), default=None),
        )
        for one in found
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
    """What the row keeps; None if another version wrote what this one cannot read. Then only that row is lost."""
    try:
        return Spec.from_json(doc)
    except (KeyError, TypeError, ValueError):
        return None


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
    """Remember which schedules' last jobs succeeded: the jobs may be pruned before the next tick.

    A schedule that somebody moves on at this moment is left alone: that notes its last job too.
    """
    news = d.chosen(
        "SELECT s.name FROM {schedule} s JOIN {job} j ON j.id = s.last_job WHERE s.kind IS NOT NULL"
        " AND j.state = 'succeeded' AND (s.succeeded_at IS NULL OR s.succeeded_at < j.finished_at)"
    )
    free = d.chosen(f"SELECT name FROM {{schedule}} WHERE name {news} ORDER BY name {{leaf_lock}}")
    d.run(c, f"UPDATE {{schedule}} SET succeeded_at = coalesce({LAST_SUCCESS}, succeeded_at) WHERE name {free}")
    for name in set(schedule_accounts.totals(c, d)) & active(c, d):
        if schedules.lock_if_free(c, d, name) is not None:  # else it is noted by whoever is at it, or next time
            schedule_accounts.note_successes(c, d, name)
