"""Earlier jobs of schedules: jobs that have not ended when another one takes their place as the last job.

Where jobs may overlap, the last job is mostly one that still runs, and the successes are those of earlier ones. With
``overlap="skip"`` there are none: the next job comes when the one before has ended. Each earlier job has a row of its
own, a chore's, until it has ended; `note_successes` looks at these rows. An account's key is not in them: it is read
from the job, and is erased with that.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.core.jobs.states import JobState
from resilient.store.db.dialect import JSON, TIME

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.store.db.dialect import Dialect

PREFIX: Final = "engine:earlier:"
MOST: Final = 100  # of one schedule, or of one account of it: the oldest ones, which end first
BATCH: Final = 1_000
_PLACE: Final = len(PREFIX) + 32  # characters of a name that say whose job it is; the others are the job's id
_ROWS: Final = f"p.kind IS NULL AND p.name LIKE '{PREFIX}%'"
_NOTE: Final = {"name": "text", "spec": "json", "job": "uuid"}
_SUCCESS: Final = {"schedule": "text", "key": "text", "at": "timestamptz"}


class Earlier(NamedTuple):
    """An earlier job; ``account``: of a schedule `for_each` account."""

    job: UUID
    account: str = ""


def keep(c: Connection, d: Dialect, schedule: str, jobs: Iterable[Earlier], now: datetime) -> None:
    """Note earlier jobs of a locked schedule, until they have ended."""
    doc = [
        {"name": f"{_place(schedule, one.account)}{one.job.hex}", "spec": {"schedule": schedule}, "job": d.id(one.job)}
        for one in jobs
    ]
    if doc:
        d.run(
            c,
            "INSERT INTO {schedule} (name, spec, next_at, last_job, updated_at)"
            f" SELECT name, spec, CAST(:now AS {{timestamp}}), job, CAST(:now AS {{timestamp}})"
            f" FROM {d.records('doc', _NOTE)} AS r WHERE true ON CONFLICT (name) DO NOTHING",
            {"doc": json.dumps(doc), "now": now},
        )


def _place(schedule: str, account: str) -> str:
    return PREFIX + blake2b(f"{schedule}\x1f{account}".encode(), digest_size=16).hexdigest()


def note_successes(c: Connection, d: Dialect) -> None:
    """Write the successes of earlier jobs to their schedules and accounts, and forget those that have ended.

    What belongs to a schedule that somebody moves on at this moment is left for the next call.
    """
    rows = d.run(
        c,
        "SELECT p.name, p.spec, j.state, j.resource_key, j.finished_at FROM {schedule} p"
        f" LEFT JOIN {{job}} j ON j.id = p.last_job WHERE {_ROWS} AND (j.id IS NULL OR j.finished_at IS NOT NULL)"
        " ORDER BY p.name LIMIT :limit",
        {"limit": BATCH},
        name=None,
        spec=JSON,
        state=None,
        resource_key=None,
        finished_at=TIME,
    ).all()
    if rows:
        free = _lock_free(c, d, {row.spec["schedule"] for row in rows})
        over = [row for row in rows if row.spec["schedule"] in free]
        _write(c, d, [row for row in over if row.state == JobState.SUCCEEDED])
        _forget(c, d, [row.name for row in over])
    _forget(c, d, _too_many(c, d))


def _lock_free(c: Connection, d: Dialect, names: Collection[str]) -> set[str]:
    """Lock those of these schedules that are not locked; with those that are there no more."""
    params = {"names": d.pack_keys(sorted(names))}
    among = f"SELECT name FROM {{schedule}} WHERE name {d.among('names', 'text')}"
    locked = set(d.run(c, f"{among} ORDER BY name {{leaf_lock}}", params).scalars())
    return set(names) if len(locked) == len(names) else set(names) - (set(d.run(c, among, params).scalars()) - locked)


def _write(c: Connection, d: Dialect, succeeded: Sequence[Any]) -> None:
    """Write the latest success of each schedule, and of each account that it has."""
    latest: dict[tuple[str, str], datetime] = {}
    for row in succeeded:
        for place in ((row.spec["schedule"], ""), (row.spec["schedule"], row.resource_key)):
            latest[place] = max(row.finished_at, latest.get(place, row.finished_at))
    set_later = (
        "UPDATE {table} SET succeeded_at = r.at"
        f" FROM {d.records('doc', _SUCCESS)} AS r WHERE {{same}} AND (succeeded_at IS NULL OR succeeded_at < r.at)"
    )
    whole = {place: at for place, at in latest.items() if not place[1]}
    accounts = {place: at for place, at in latest.items() if place[1]}
    for table, same, times in (
        ("{schedule}", "{schedule}.name = r.schedule", whole),
        ("{schedule_account}", "{schedule_account}.schedule = r.schedule AND resource_key = r.key", accounts),
    ):
        if times:
            d.run(c, set_later.replace("{table}", table).replace("{same}", same), {"doc": _document(d, times)})


def _document(d: Dialect, times: Mapping[tuple[str, str], datetime]) -> str:
    return json.dumps([{"schedule": s, "key": key, "at": d.time(at)} for (s, key), at in sorted(times.items())])


def _too_many(c: Connection, d: Dialect) -> list[str]:
    """The rows beyond `MOST` of each schedule or account."""
    numbered = (
        f"SELECT p.name, row_number() OVER (PARTITION BY substr(p.name, 1, {_PLACE}) ORDER BY p.name) AS n"
        f" FROM {{schedule}} p WHERE {_ROWS}"
    )
    return list(d.run(c, f"SELECT name FROM ({numbered}) AS numbered WHERE n > {MOST} LIMIT {BATCH}").scalars())


def _forget(c: Connection, d: Dialect, names: Sequence[str]) -> None:
    if names:
        rows = d.chosen_rows("{schedule}", f"name {d.among('names', 'text')}")
        d.run(c, f"DELETE FROM {{schedule}} WHERE {rows}", {"names": d.pack_keys(names)})
