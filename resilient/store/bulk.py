"""Many jobs at once on PostgreSQL: COPY, which takes half of what an INSERT from a JSON document takes.

Only for jobs that nobody can refuse: one with a unique key needs ON CONFLICT (`jobs.insert_unique`).
"""

from __future__ import annotations

from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from resilient.store import direct, turns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.store.dialect import Dialect
    from resilient.store.jobs import NewJob

LEAST: Final = 50  # fewer go quicker as one INSERT
_LINES: Final = 500  # sent at a time, so that the server works while the next are written
_COLUMNS: Final = (
    "id, resource_key, payload, state, waits, order_no, kind, payload_version, priority, run_at, expires_at,"
    " max_attempts, idempotency_key, tags, trace, ordering_key, ordering_policy, followed, created_at, updated_at"
)
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t"})


def fits(c: Connection, d: Dialect, jobs: Sequence[NewJob]) -> bool:
    """Whether `copy` can write them."""
    return len(jobs) >= LEAST and d.is_postgresql and direct.can_copy(c) and all(j.unique_key is None for j in jobs)


def copy(c: Connection, d: Dialect, jobs: Sequence[NewJob]) -> None:
    """Insert jobs, and a turn for each resource that got ready ones."""
    best: dict[str, int] = {}
    direct.copy(c, d.named("COPY {job} (" + _COLUMNS + ") FROM STDIN"), _chunks(jobs, d.now(c), best))
    turns.insert(c, d, best)


def _chunks(jobs: Sequence[NewJob], now: datetime, best: dict[str, int]) -> Iterator[str]:
    lines = _lines(jobs, now, best)
    while some := "".join(islice(lines, _LINES)):
        yield some


def _lines(jobs: Sequence[NewJob], now: datetime, best: dict[str, int]) -> Iterator[str]:
    """One line a job; what many have in common is written once. Notes the best priority of each key with ready ones."""
    common: dict[tuple[Any, ...], tuple[str, str]] = {}
    for j in jobs:
        shared = (j.kind, *j[4:-2])
        known = common.get(shared)
        if known is None:
            known = common[shared] = _shared(j, now)
        state, rest = known
        if j.waits > 0:
            state = "blocked"
        elif state == "ready" and j.priority > best.get(j.resource_key, -32768):
            best[j.resource_key] = j.priority
        order_no = r"\N" if j.order_no is None else j.order_no
        yield f"{j.id.hex}\t{_text(j.resource_key)}\t{_text(j.payload)}\t{state}\t{j.waits}\t{order_no}\t{rest}\n"


def _shared(j: NewJob, now: datetime) -> tuple[str, str]:
    later = j.run_at is not None or j.delay is not None
    run_at = j.run_at or (now + timedelta(seconds=j.delay or 0))
    values = (
        j.kind, j.payload_version, j.priority, run_at, j.expiry(now), j.max_attempts, j.idempotency_key, j.tags,
        j.trace, j.ordering_key, j.ordering_policy, j.followed, now, now,
    )  # fmt: skip
    return "scheduled" if later else "ready", "\t".join(r"\N" if v is None else _text(str(v)) for v in values)


def _text(value: str) -> str:
    """As COPY reads it back."""
    return value if value.isprintable() and "\\" not in value else value.translate(_ESCAPES)
