"""One look at everything, of bounded cost: nothing here reads more than some thousand rows of an index."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from resilient.core.overview import Overview, Trouble
from resilient.core.records import Count
from resilient.core.states import JobState
from resilient.store import alerts, queries, resource_queries, situation, turns
from resilient.store.filters import JOB, JobFilter, in_state

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from sqlalchemy import Connection, Row

    from resilient.store.dialect import Dialect

SAMPLE: Final = 1_000
MOST_ALERTS: Final = 100
LATELY: Final = timedelta(hours=1)
_GRACE: Final = timedelta(seconds=5)  # staging looks every second or so
_PRESENT: Final = (JobState.SCHEDULED, JobState.READY, JobState.RUNNING, JobState.DEAD)
_SEEN: Final = (
    JOB.c.id, JOB.c.kind, JOB.c.resource_key, JOB.c.attempts, JOB.c.run_at, JOB.c.last_error, JOB.c.last_error_kind,
    JOB.c.last_error_code,
)  # fmt: skip


def overview(c: Connection, d: Dialect) -> Overview:
    """Everything at a glance."""
    now, workers = d.now(c), situation.seen_workers(c, d, d.now(c))
    lately = {s: _count(c, d, state=(s,), finished_after=now - LATELY) for s in ("succeeded", "dead", "cancelled")}
    return Overview(
        at=now,
        jobs={state.value: _count(c, d, state=(state.value,)) for state in _PRESENT},
        lately=lately,
        overdue=_count(c, d, state=("scheduled",), run_before=now - _GRACE),
        workers=workers,
        stopped=resource_queries.summary(c, d),
        retrying=_troubles(_retrying(c, d), dead=False),
        died=_troubles(_died(c, d, now), dead=True),
        alerts=alerts.page(c, d, resolved=False, limit=MOST_ALERTS),
        stranded=len(turns.stranded(c, d)),
        unserved=_unserved(c, d, {kind for one in workers if not one.stopping for kind in one.kinds}),
    )


def _unserved(c: Connection, d: Dialect, kinds: set[str]) -> dict[str, Count]:
    """Kinds of ready jobs that no running worker has, in a sample of them."""
    sample = sa.select(JOB.c.kind).where(in_state("ready")).limit(SAMPLE).subquery()
    rows = d.execute(c, sa.select(sample.c.kind, sa.func.count()).group_by(sample.c.kind)).all()
    full = sum(number for _, number in rows) >= SAMPLE
    return {kind: Count(number, more=full) for kind, number in sorted(map(tuple, rows)) if kind not in kinds}


def _count(c: Connection, d: Dialect, **criteria: Any) -> Count:
    return queries.count(c, d, JobFilter(**criteria))


def _retrying(c: Connection, d: Dialect) -> Iterable[Row[Any]]:
    """Among the jobs that are due next, those that have failed before."""
    first = sa.select(*_SEEN).where(in_state("scheduled")).order_by(JOB.c.run_at, JOB.c.id).limit(SAMPLE).subquery()
    return d.execute(c, sa.select(first).where(first.c.attempts > 0))


def _died(c: Connection, d: Dialect, now: datetime) -> Iterable[Row[Any]]:
    last = sa.select(*_SEEN).where(in_state("dead"), JOB.c.finished_at >= now - LATELY)
    return d.execute(c, last.order_by(JOB.c.finished_at.desc()).limit(SAMPLE))


def _troubles(rows: Iterable[Row[Any]], *, dead: bool) -> list[Trouble]:
    """Grouped by kind and error, the largest group first."""
    groups: dict[tuple[Any, ...], list[Row[Any]]] = defaultdict(list)
    seen = 0
    for row in rows:
        groups[row.kind, row.last_error_kind, row.last_error_code].append(row)
        seen += 1
    made = [
        Trouble(
            kind=kind,
            error_kind=error_kind,
            error_code=code,
            count=Count(len(members), more=seen >= SAMPLE),
            example=members[0].id,
            resource_key=members[0].resource_key,
            error=members[0].last_error,
            next_at=None if dead else min(row.run_at for row in members),
        )
        for (kind, error_kind, code), members in groups.items()
    ]
    return sorted(made, key=lambda t: -int(t.count))
