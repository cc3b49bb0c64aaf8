"""What the database's gauges show: how much waits, runs, is stopped and lags; from a bounded number of jobs.

Nothing here counts millions: of each state up to `COUNTED` jobs are looked at, and `Gauges.cut_off` names the states
that reach this bound. Names are as the rows have them; whoever shows them keeps to what the program declares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from resilient.core.jobs.states import JobState
from resilient.store import alerts
from resilient.store.db.dialect import TIME
from resilient.store.inspect import pages, workers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.store.db.dialect import Dialect
    from resilient.store.inspect.pages import Cause, DestinationRow

COUNTED: Final = 20_000  # jobs of each state
_TIMEOUT: Final = "5s"  # of one statement (PostgreSQL): a scrape must not wait, nor keep a busy database busier
_STATES: Final = (JobState.BLOCKED, JobState.SCHEDULED, JobState.READY, JobState.RUNNING, JobState.DEAD)
_ACCOUNTS: Final = 1_000  # whose runnable jobs are looked at
_ALERTS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Runnable:
    """Jobs of one provider and kind that could run now, and since when the oldest of them could."""

    provider: str
    kind: str
    count: int
    oldest: datetime | None


@dataclass(frozen=True, slots=True)
class Gauges:
    """Everything, read in one transaction."""

    at: datetime
    jobs: Mapping[tuple[str, str, str], int]  # by state, kind and first segment of the resource key
    cut_off: frozenset[str]  # states with `COUNTED` jobs or more, whose numbers may be too low
    runnable: list[Runnable]
    causes: list[Cause]
    destinations: list[DestinationRow]
    grants: Mapping[str, Mapping[str, int]]  # by provider and state
    schedules: Mapping[str, datetime]  # when a job of it succeeded last
    workers: int
    alerts: Mapping[str, int]


def read(c: Connection, d: Dialect, destinations: Iterable[str]) -> Gauges:
    """Read them all."""
    if d.is_postgresql:
        d.run(c, f"SELECT set_config('statement_timeout', '{_TIMEOUT}', true), set_config('jit', 'off', true)").all()
    now = d.now(c)
    jobs: dict[tuple[str, str, str], int] = {}
    cut_off: set[str] = set()
    for state in _STATES:
        of_state = _jobs(c, d, state)
        jobs.update({(state.value, kind, root): count for (kind, root), count in of_state.items()})
        if sum(of_state.values()) >= COUNTED:
            cut_off.add(state.value)
    names = [one.name for one in alerts.page(c, d, resolved=False, limit=_ALERTS)]
    return Gauges(
        at=now,
        jobs=jobs,
        cut_off=frozenset(cut_off),
        runnable=runnable(c, d),
        causes=pages.causes(c, d, now),
        destinations=pages.destinations(c, d, destinations),
        grants=pages.grants_by_provider(c, d),
        schedules=_schedules(c, d),
        workers=len(workers.alive(c, d, now)),
        alerts={name: names.count(name) for name in set(names)},
    )


def _jobs(c: Connection, d: Dialect, state: str) -> dict[tuple[str, str], int]:
    rows = d.run(
        c,
        f"SELECT kind, {_root(d)} AS root, count(*) AS number FROM (SELECT kind, resource_key FROM {{job}}"
        f" WHERE state = '{state}' LIMIT {COUNTED}) AS part GROUP BY 1, 2",
    )
    return {(kind, root): int(number) for kind, root, number in rows.all()}


def _root(d: Dialect) -> str:
    if d.is_postgresql:
        return "split_part(resource_key, '/', 1)"
    return "substr(resource_key, 1, instr(resource_key || '/', '/') - 1)"


def runnable(c: Connection, d: Dialect) -> list[Runnable]:
    """What could run now: on PostgreSQL the view for autoscalers; on SQLite ready jobs, without a look at the gates."""
    sql = "SELECT provider, kind, runnable AS number, oldest_at FROM {scaling}"
    if not d.is_postgresql:
        sql = (
            f"SELECT {_root(d)} AS provider, kind, count(*) AS number, min(run_at) AS oldest_at FROM"
            " (SELECT resource_key, kind, run_at FROM {job} WHERE state = 'ready' AND resource_key IN"
            f" (SELECT resource_key FROM {{turn}} WHERE parked_on IS NULL LIMIT {_ACCOUNTS}) LIMIT {COUNTED}) AS part"
            " GROUP BY 1, 2"
        )
    return [Runnable(*row) for row in d.run(c, sql, provider=None, kind=None, number=None, oldest_at=TIME).all()]


def _schedules(c: Connection, d: Dialect) -> dict[str, datetime]:
    rows = d.run(
        c,
        "SELECT name, succeeded_at FROM {schedule} WHERE kind IS NOT NULL AND NOT removed AND succeeded_at IS NOT NULL"
        " ORDER BY name LIMIT 1000",
        name=None,
        succeeded_at=TIME,
    )
    return {row.name: row.succeeded_at for row in rows.all()}
