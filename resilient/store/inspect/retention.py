"""Deleting what is over: finished jobs with their history, old history, idle resources, old notes.

Each function is one short transaction over a bounded number of rows and never waits for a lock: what somebody holds
is left for the next time. A walk goes on where the last batch ended instead of starting over, because deleted rows
stay in the index until a vacuum, and an old snapshot somewhere can keep them there for hours.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from resilient.core.base.errors import InvalidInput
from resilient.core.events.message import RESOURCE
from resilient.core.jobs.states import TERMINAL, JobState
from resilient.store.db.dialect import ID, TIME
from resilient.store.jobs import order, workflows
from resilient.store.jobs.dependencies import release_followers
from resilient.store.schedules import programs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.store.db.dialect import Dialect

WINDOW: Final = 5_000  # resource rows looked at in one transaction
UNDECLARED_KEPT: Final = timedelta(hours=1)  # a limit that nobody declared, once its window is over
_LIMIT_ID: Final = {"resource_key": "text", "name": "text"}
Place: TypeAlias = "tuple[datetime, UUID]"  # of a finished job among the others
_IN_OUTBOX: Final = f"(resource_key >= '{RESOURCE}/' AND resource_key < '{RESOURCE}0')"  # '0' follows '/'


def prune_finished(
    c: Connection, d: Dialect, state: JobState | str, before: datetime, *, since: datetime | None = None, limit: int
) -> tuple[int, datetime | None]:
    """Delete up to ``limit`` jobs that finished in ``state`` before a time, oldest first, with their history.

    Returns how many, and the ``since`` of the next batch (None: there is none).
    """
    rows = d.run(
        c,
        "SELECT id, finished_at, followed, ordering_key IS NOT NULL AS is_ordered FROM {job} WHERE "
        f"{_finished(state, since)}{_not_awaited(state)}"
        " ORDER BY finished_at LIMIT :limit {skip_locked}",
        {"before": before, "limit": limit} | ({} if since is None else {"since": since}),
        id=ID,
        finished_at=TIME,
    ).all()
    _delete(c, d, rows)
    return len(rows), rows[-1].finished_at if len(rows) == limit else None


def prune_succeeded(
    c: Connection, d: Dialect, before: datetime, *, events: bool, behind: Place | None = None, limit: int, most: int
) -> tuple[int, Place | None]:
    """Delete events of the outbox that were published before a time, or succeeded jobs that are none, as above.

    Reads the next ``limit`` succeeded jobs of both sorts, and deletes at most ``most`` of the sort that is asked for.
    Returns how many it deleted, and where the next batch begins (None: there is none).
    """
    passed = "" if behind is None else " AND NOT (finished_at = :since AND id <= :last_id)"
    rows = d.run(
        c,
        "SELECT id, finished_at, followed, ordering_key IS NOT NULL AS is_ordered, resource_key FROM {job} WHERE "
        f"{_finished(JobState.SUCCEEDED, behind and behind[0])}{_not_awaited(JobState.SUCCEEDED)}{passed}"
        " ORDER BY finished_at, id LIMIT :limit {skip_locked}",
        {"before": before, "limit": limit}
        | ({} if behind is None else {"since": behind[0], "last_id": d.id(behind[1])}),
        id=ID,
        finished_at=TIME,
    ).all()
    gone = [r for r in rows if r.resource_key.startswith(f"{RESOURCE}/") is events][:most]
    _delete(c, d, gone)
    return len(gone), (rows[-1].finished_at, rows[-1].id) if len(rows) == limit else None


def _delete(c: Connection, d: Dialect, rows: Sequence[Any]) -> None:
    """Delete jobs whose rows are locked, with their history; release what waited for them."""
    if not rows:
        return
    ids = {"ids": d.pack_ids([r.id for r in rows])}
    followed, in_order = [r.id for r in rows if r.followed], [r.id for r in rows if r.is_ordered]
    release_followers(c, d, followed, in_order, d.now(c), gone=True)
    d.run(c, f"DELETE FROM {{attempt}} WHERE job_id {d.among('ids', 'uuid')}", ids)
    d.run(c, f"DELETE FROM {{job}} WHERE id {d.among('ids', 'uuid')}", ids)


def _not_awaited(state: str) -> str:
    """A condition that spares jobs for which others wait, whatever their age: they would run out of order, or never.

    Its sub-selects have one value each, found by one index: an EXISTS might be planned as a hash over all of a table's
    rows, and a join from its other end.
    """
    of_workflow = "".join(
        " AND NOT (followed AND (SELECT (SELECT w.id FROM {workflow} w WHERE w.id = s.workflow_id"
        f" AND w.finished_at IS NULL) FROM {{step}} s WHERE s.{column} = {{job}}.id LIMIT 1) IS NOT NULL)"
        for column in ("job_id", "undo_job_id")
    )
    if state == JobState.SUCCEEDED:
        return of_workflow
    lane = "resource_key = {job}.resource_key AND %s.ordering_key = {job}.ordering_key"
    return of_workflow + (
        " AND NOT (followed AND (SELECT e.job_id FROM {dependency} e WHERE e.blocker_id = {job}.id AND (SELECT w.id"
        " FROM {job} w WHERE w.id = e.job_id AND w.finished_at IS NULL) IS NOT NULL LIMIT 1) IS NOT NULL)"
        " AND NOT (state = 'dead' AND ordering_policy = 'block'"
        f" AND (SELECT o.head_id FROM {{order}} o WHERE o.{lane % 'o'}) = {{job}}.id"
        # Not by its number: replays of earlier events wait behind it, too. One row of the index, however many wait.
        f" AND (SELECT b.id FROM {{job}} b WHERE b.state = 'blocked' AND b.{lane % 'b'} LIMIT 1) IS NOT NULL)"
    )


def count_finished(
    c: Connection, d: Dialect, state: JobState | str, before: datetime, *, limit: int, events: bool | None = None
) -> int:
    """How many `prune_finished`, or with ``events`` `prune_succeeded`, would find, counted up to ``limit``."""
    of_outbox = "" if events is None else f" AND {'' if events else 'NOT '}{_IN_OUTBOX}"
    number: int = d.run(
        c,
        f"SELECT count(*) FROM (SELECT 1 FROM {{job}} WHERE {_finished(state, None)}{_not_awaited(state)}{of_outbox}"
        " LIMIT :limit) AS found",
        {"before": before, "limit": limit},
    ).scalar_one()
    return number


def _finished(state: JobState | str, since: datetime | None) -> str:
    """The condition, with the state written out: its index is partial."""
    if state not in TERMINAL:
        raise InvalidInput(f"{state} jobs are not over: only {', '.join(sorted(TERMINAL))} ones are pruned")
    later = "" if since is None else " AND finished_at >= :since"
    return f"state = '{state}' AND finished_at IS NOT NULL AND finished_at < :before{later}"


def prune_attempts(c: Connection, d: Dialect, before: datetime, limit: int) -> tuple[int, bool]:
    """Delete up to ``limit`` of the oldest executions, if they ended before a time and no workflow needs them.

    Returns how many, and whether there may be more.
    """
    gone = d.run(
        c,
        f"DELETE FROM {{attempt}} WHERE id {_oldest(d)} AND finished_at < :before",
        {"before": before, "limit": limit},
    ).rowcount
    return int(gone), gone >= limit


def count_attempts(c: Connection, d: Dialect, before: datetime, limit: int) -> int:
    """How many of the ``limit`` oldest `prune_attempts` would delete."""
    number: int = d.run(
        c,
        f"SELECT count(*) FROM {{attempt}} WHERE id {_oldest(d)} AND finished_at < :before",
        {"before": before, "limit": limit},
    ).scalar_one()
    return number


def _oldest(d: Dialect) -> str:
    """A condition: among the oldest by number, which is the order of writing; an array, lest a plan read all."""
    oldest = f"SELECT a.id FROM {{attempt}} a WHERE NOT {workflows.IS_NEEDED} ORDER BY a.id LIMIT :limit"
    return f"= ANY(ARRAY({oldest}))" if d.is_postgresql else f"IN ({oldest})"


def forget_idle(
    c: Connection, d: Dialect, before: datetime, after: str, *, dry_run: bool = False
) -> tuple[int, str | None]:
    """Forget idle resources among the next rows by key.

    Returns how many, and the ``after`` of the next call (None: there is none).

    Idle: not used since ``before``, nothing waits or runs there, its gates are open and nobody overrode its policy.
    If it is used again, a new row gives the same answers: its limits are full again by then. Limits that nobody
    declared are deleted too (`_forget_undeclared`), also those of resources that stay; if a whole batch of limits was
    deleted, the next call begins at the same ``after``, because there may be more.
    """
    window = [
        r[0]
        for r in d.run(
            c,
            "SELECT key FROM {resource} WHERE key > :after_key ORDER BY key LIMIT :limit",
            {"after_key": after, "limit": WINDOW},
        )
    ]
    idle = _idle(c, d, window, before, lock="" if dry_run else "{skip_locked}") if window else []
    if idle and not dry_run:
        keys = {"keys": d.pack_keys(idle)}
        d.run(c, f"DELETE FROM {{resource}} WHERE key {d.among('keys', 'text')}", keys)
        d.run(c, f"DELETE FROM {{rate_limit}} WHERE resource_key {d.among('keys', 'text')}", keys)
    last = window[-1] if len(window) == WINDOW else None
    if not dry_run and _forget_undeclared(c, d, after, last) >= WINDOW:
        return len(idle), after
    return len(idle), last


def _forget_undeclared(c: Connection, d: Dialect, after: str, last: str | None) -> int:
    """Forget limits that only answers stated or throttles taught, and that nobody has used since their windows ended.

    A provider may give its budgets ever new names and sizes, so without this their number would grow without end. A
    draw locks the limit's row, and inserts it if there is none: so no draw is lost while this deletes.
    """
    rows = d.run(
        c,
        "SELECT resource_key, name FROM {rate_limit} WHERE resource_key > :after_key AND name LIKE '~%'"
        + ("" if last is None else " AND resource_key <= :last_key")
        + " AND tat < :epoch AND coalesce(reset_at, 0) < :epoch AND coalesce(observed_at, 0) < :epoch"
        " ORDER BY resource_key, name LIMIT :limit {skip_locked}",
        {"after_key": after, "epoch": (d.now(c) - UNDECLARED_KEPT).timestamp(), "limit": WINDOW}
        | ({} if last is None else {"last_key": last}),
    )
    doc = [{"resource_key": key, "name": name} for key, name in rows]
    if doc:
        ids = f"SELECT resource_key, name FROM {d.records('doc', _LIMIT_ID)} AS v"
        d.run(c, f"DELETE FROM {{rate_limit}} WHERE (resource_key, name) IN ({ids})", {"doc": json.dumps(doc)})
    return len(doc)


def _idle(c: Connection, d: Dialect, keys: Sequence[str], before: datetime, lock: str) -> list[str]:
    r = "{resource}.key"
    rows = d.run(
        c,
        f"SELECT key FROM {{resource}} WHERE key {d.among('keys', 'text')} AND updated_at < :before"
        " AND breaker = 'closed' AND auth = 'ok' AND paused_at IS NULL AND policy IS NULL"
        " AND (blocked_until IS NULL OR blocked_until < :before)"
        f" AND NOT EXISTS (SELECT 1 FROM {{turn}} t WHERE t.resource_key = {r} AND t.parked_on IS NULL)"
        f" AND NOT EXISTS (SELECT 1 FROM {{turn}} t WHERE t.resource_key = {r} AND t.parked_on IS NOT NULL)"
        f" AND NOT EXISTS (SELECT 1 FROM {{turn}} t WHERE t.parked_on = {r})"
        + "".join(
            f" AND NOT EXISTS (SELECT 1 FROM {{job}} j WHERE j.state = '{state}' AND {where})"
            for state in ("ready", "running")
            # '0' follows '/' among the bytes, so the second is everything below the key
            for where in (f"j.resource_key = {r}", f"j.resource_key > {r} || '/' AND j.resource_key < {r} || '0'")
        )
        + f" AND NOT EXISTS (SELECT 1 FROM {{rate_limit}} l WHERE l.resource_key = {r}"
        "   AND (l.tat > :epoch OR coalesce(l.reset_at, 0) > :epoch OR coalesce(l.observed_at, 0) > :epoch))"
        f" ORDER BY key {lock}",
        {"keys": d.pack_keys(keys), "before": before, "epoch": before.timestamp()},
    )
    return [r[0] for r in rows]


def forget_notes(c: Connection, d: Dialect, before: datetime) -> int:
    """Forget old resolved alerts, removed schedules, programs that are gone, workflows that are over, idle orders."""
    gone = d.run(c, "DELETE FROM {alert} WHERE resolved_at < :before", {"before": before}).rowcount
    removed = d.run(  # locked, so that no program declares one again meanwhile
        c,
        f"SELECT name FROM {{schedule}} WHERE (removed OR kind IS NULL AND name LIKE '{programs.PREFIX}%')"
        " AND updated_at < :before ORDER BY name {skip_locked}",
        {"before": before},
    )
    if names := [row[0] for row in removed]:
        packed = {"names": d.pack_keys(names)}
        d.run(c, f"DELETE FROM {{schedule_account}} WHERE schedule {d.among('names', 'text')}", packed)
        gone += d.run(c, f"DELETE FROM {{schedule}} WHERE name {d.among('names', 'text')}", packed).rowcount
    gone += workflows.prune(c, d, before) + order.prune(c, d, before)
    return int(gone)
