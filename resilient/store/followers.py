"""What happens to others when a job is over.

Every path on which a job ends (succeeds, dies, is cancelled, expires) or is deleted calls `release_followers` in the
same transaction: for jobs whose column ``followed`` says that they waited for others, that others may wait for them, or
that they are steps of a workflow, and for those that have a place in a lane. Any other job costs nothing here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.store import dependencies, order, workflows

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.store.dialect import Dialect


def release_followers(
    c: Connection,
    d: Dialect,
    followed: Iterable[UUID],
    in_lanes: Iterable[UUID],
    now: datetime,
    *,
    gone: bool = False,
) -> None:
    """Let go on what waited for these jobs, in the transaction that ended them and after that was written.

    ``in_lanes``: those that have an ordering key, ``followed`` or not. ``gone``: they are finished and are about to be
    deleted; call it before that.
    """
    over: set[UUID] = set()
    lanes = set(in_lanes)
    just = sorted(followed)
    while just:
        over.update(just)
        just = dependencies.ended(c, d, just, now, gone=gone)  # those that are cancelled now have followers too
        lanes.update(just)
    if lanes:
        order.advance(c, d, lanes, now, gone=gone)
    if over:
        workflows.ask(c, d, over, now)


def resolve_dependencies(c: Connection, d: Dialect, now: datetime, waiting: Collection[UUID] | None = None) -> int:
    """Find out what these waiting jobs (by default: any) wait for; returns how many of their edges were dealt with."""
    dealt, cancelled = dependencies.resolve(c, d, now, waiting)
    release_followers(c, d, cancelled, cancelled, now)
    return dealt
