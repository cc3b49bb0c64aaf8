"""Earlier jobs of schedules: an earlier job still runs when the schedule starts its next one.

A schedule's row names only its last job. Where jobs may overlap, that job mostly still runs, and the successes come
from earlier jobs. With ``overlap="skip"`` there are none: the next job starts after the last one has ended. Each
earlier job has a row of its own in the table of schedules until it has ended; `note_successes` reads these rows. They
do not hold an account's key: it is read from the job, so it is erased with the job.
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
MOST: Final = 100  # jobs of one schedule, or of one of its accounts: the oldest are kept, because they end first
BATCH: Final = 1_000
_OWNER_LENGTH: Final = len(PREFIX) + 32  # the first characters of a row's name; the job's id follows
_IS_EARLIER: Final = f"p.kind IS NULL AND p.name LIKE '{PREFIX}%'"
_NOTE: Final = {"name": "text", "spec": "json", "job": "uuid"}
_SUCCESS: Final = {"schedule": "text", "key": "text", "at": "timestamptz"}


class Earlier(NamedTuple):
    """An earlier job; ``account``: its resource key, if the schedule runs `for_each` account."""

    job: UUID
    account: str = ""


def keep(c: Connection, d: Dialect, schedule: str, jobs: Iterable[Earlier], now: datetime) -> None:
    """Insert a row for each of these earlier jobs. The caller has locked the schedule."""
    doc = [
        {"name": f"{_owner(schedule, one.account)}{one.job.hex}", "spec": {"schedule": schedule}, "job": d.id(one.job)}
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


def _owner(schedule: str, account: str) -> str:
    """The beginning of a row's name, the same for all earlier jobs of a schedule, or of one of its accounts."""
    return PREFIX + blake2b(f"{schedule}\x1f{account}".encode(), digest_size=16).hexdigest()


def note_successes(c: Connection, d: Dialect) -> None:
    """Write the successes of earlier jobs to their schedules and accounts, and delete the rows of ended ones.

    The rows of a schedule that another transaction has locked are left for the next call.
    """
    rows = d.run(
        c,
        "SELECT p.name, p.spec, j.state, j.resource_key, j.finished_at FROM {schedule} p"
        f" LEFT JOIN {{job}} j ON j.id = p.last_job WHERE {_IS_EARLIER} AND (j.id IS NULL OR j.finished_at IS NOT NULL)"
        " ORDER BY p.name LIMIT :limit",
        {"limit": BATCH},
        name=None,
        spec=JSON,
        state=None,
        resource_key=None,
        finished_at=TIME,
    ).all()
    if rows:
        writable = _lock_unlocked(c, d, {row.spec["schedule"] for row in rows})
        ended = [row for row in rows if row.spec["schedule"] in writable]
        _write(c, d, [row for row in ended if row.state == JobState.SUCCEEDED])
        _delete(c, d, [row.name for row in ended])
    _delete(c, d, _list_excess(c, d))


def _lock_unlocked(c: Connection, d: Dialect, names: Collection[str]) -> set[str]:
    """Lock those of these schedules that nobody has locked; return their names, and those of deleted schedules."""
    params = {"names": d.pack_keys(sorted(names))}
    among = f"SELECT name FROM {{schedule}} WHERE name {d.among('names', 'text')}"
    locked = set(d.run(c, f"{among} ORDER BY name {{leaf_lock}}", params).scalars())
    return set(names) if len(locked) == len(names) else set(names) - (set(d.run(c, among, params).scalars()) - locked)


def _write(c: Connection, d: Dialect, succeeded: Sequence[Any]) -> None:
    """Write the latest success of each schedule, and of each account that it has."""
    latest: dict[tuple[str, str], datetime] = {}
    for row in succeeded:
        for target in ((row.spec["schedule"], ""), (row.spec["schedule"], row.resource_key)):
            latest[target] = max(row.finished_at, latest.get(target, row.finished_at))
    set_later = (
        "UPDATE {table} SET succeeded_at = r.at"
        f" FROM {d.records('doc', _SUCCESS)} AS r WHERE {{same}} AND (succeeded_at IS NULL OR succeeded_at < r.at)"
    )
    schedules = {target: at for target, at in latest.items() if not target[1]}
    accounts = {target: at for target, at in latest.items() if target[1]}
    for table, same, times in (
        ("{schedule}", "{schedule}.name = r.schedule", schedules),
        ("{schedule_account}", "{schedule_account}.schedule = r.schedule AND resource_key = r.key", accounts),
    ):
        if times:
            d.run(c, set_later.replace("{table}", table).replace("{same}", same), {"doc": _encode(d, times)})


def _encode(d: Dialect, times: Mapping[tuple[str, str], datetime]) -> str:
    return json.dumps([{"schedule": s, "key": key, "at": d.time(at)} for (s, key), at in sorted(times.items())])


def _list_excess(c: Connection, d: Dialect) -> list[str]:
    """The names of the rows beyond the `MOST` oldest of each schedule or account."""
    numbered = (
        f"SELECT p.name, row_number() OVER (PARTITION BY substr(p.name, 1, {_OWNER_LENGTH}) ORDER BY p.name) AS n"
        f" FROM {{schedule}} p WHERE {_IS_EARLIER}"
    )
    return list(d.run(c, f"SELECT name FROM ({numbered}) AS numbered WHERE n > {MOST} LIMIT {BATCH}").scalars())


def _delete(c: Connection, d: Dialect, names: Sequence[str]) -> None:
    if names:
        rows = d.chosen_rows("{schedule}", f"name {d.among('names', 'text')}")
        d.run(c, f"DELETE FROM {{schedule}} WHERE {rows}", {"names": d.pack_keys(names)})
