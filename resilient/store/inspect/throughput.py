"""Throughput: how many executions ended how in each minute, for charts.

A worker adds what it has counted with its heartbeat, in rows of its own: two workers never meet in one. Older rows are
put together by one elected worker, so that a chart of two days reads a row for each minute, kind, provider and outcome
and not that many times the workers. Kinds, providers and outcomes are what a program declares, never a tenant's words.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection

    from resilient.store.db.dialect import Dialect

KEPT: Final = timedelta(hours=48)
FRESH: Final = timedelta(minutes=10)  # rows that a worker may still add to, with time to spare
_MINUTE: Final = 60
_FIELDS: Final = {"kind": "text", "provider": "text", "outcome": "text", "count": "bigint"}


class Series(NamedTuple):
    """What executions are counted by."""

    kind: str
    provider: str
    outcome: str


@dataclass(frozen=True, slots=True)
class Throughput:
    """How many executions of one kind, through one provider, ended in one way in the span that begins ``at``."""

    at: datetime
    kind: str
    provider: str
    outcome: str
    count: int


def add(c: Connection, d: Dialect, worker: str, sums: Mapping[Series, int], now: datetime) -> None:
    """Add to this minute's rows of one worker."""
    rows = [{**series._asdict(), "count": count} for series, count in sorted(sums.items())]
    d.run(
        c,
        "INSERT INTO {throughput} AS t (minute, worker, kind, provider, outcome, count)"
        f" SELECT :minute, :worker, kind, provider, outcome, count FROM {d.records('rows', _FIELDS)} AS r WHERE true"
        " ON CONFLICT (minute, worker, kind, provider, outcome) DO UPDATE SET count = t.count + excluded.count",
        {"minute": _minute(now), "worker": worker, "rows": json.dumps(rows)},
    )


def fold(c: Connection, d: Dialect, now: datetime) -> int:
    """Put together what workers have ceased to add to, and delete what is too old; returns how many rows went.

    One caller at a time: two would count the same rows twice.
    """
    own = "worker <> '' AND minute < :fresh"
    params = {"fresh": _minute(now - FRESH)}
    d.run(
        c,
        "INSERT INTO {throughput} AS t (minute, worker, kind, provider, outcome, count)"
        f" SELECT minute, '', kind, provider, outcome, sum(count) FROM {{throughput}} WHERE {own}"
        " GROUP BY minute, kind, provider, outcome"
        " ON CONFLICT (minute, worker, kind, provider, outcome) DO UPDATE SET count = t.count + excluded.count",
        params,
    )
    gone = d.run(c, f"DELETE FROM {{throughput}} WHERE {own}", params).rowcount
    gone += d.run(c, "DELETE FROM {throughput} WHERE minute < :oldest", {"oldest": _minute(now - KEPT)}).rowcount
    return int(gone)


def throughput(
    c: Connection, d: Dialect, since: datetime | None = None, *, step: int = 1, kind: str | None = None
) -> list[Throughput]:
    """The sums of every ``step`` minutes from a time on (by default all that are kept), the oldest first.

    Spans begin at multiples of ``step``; one in which nothing ended has no row.
    """
    oldest = d.now(c) - KEPT if since is None else since
    params: dict[str, Any] = {"first": _minute(oldest) // step * step, "step": step}
    if kind is not None:
        params["kind"] = kind
    rows = d.run(
        c,
        "SELECT minute / :step * :step AS minute, kind, provider, outcome, CAST(sum(count) AS bigint) AS count"
        f" FROM {{throughput}} WHERE minute >= :first{'' if kind is None else ' AND kind = :kind'}"
        " GROUP BY 1, kind, provider, outcome ORDER BY 1, kind, provider, outcome",
        params,
    ).all()
    return [Throughput(_time(r.minute), r.kind, r.provider, r.outcome, int(r[-1])) for r in rows]


def _minute(at: datetime) -> int:
    return int(at.timestamp()) // _MINUTE


def _time(minute: int) -> datetime:
    return datetime.fromtimestamp(minute * _MINUTE, UTC)
