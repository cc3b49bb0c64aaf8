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


class Ends:
    """The jobs that one transaction ends in several statements, for what follows from that.

    Locks are taken on jobs first (by id), then on unique keys, then on lanes (by key), then on workflows (by id), here
    and everywhere: say `add` after each statement, then write the jobs that take places in lanes, and say `go_on` last.
    In a program's session that is its commit (`engine/joining.py`).
    """

    __slots__ = ("_over", "again", "in_lanes")

    def __init__(self) -> None:
        self._over: set[UUID] = set()
        self.in_lanes: set[UUID] = set()
        self.again = False  # whether some of them run once more

    @property
    def released(self) -> bool:
        """Whether something may be ready now that was not."""
        return self.again or bool(self.in_lanes) or bool(self._over)

    def take(self, other: Ends) -> None:
        """What it has heard of too."""
        self._over |= other._over
        self.in_lanes |= other.in_lanes
        self.again = self.again or other.again

    def add(
        self,
        c: Connection,
        d: Dialect,
        followed: Iterable[UUID],
        in_lanes: Iterable[UUID],
        now: datetime,
        *,
        gone: bool = False,
    ) -> None:
        """Deal with the jobs that waited for these; see `release_followers`."""
        self.in_lanes.update(in_lanes)
        just = sorted(followed)
        while just:
            self._over.update(just)
            just = dependencies.ended(c, d, just, now, gone=gone)  # those that are cancelled now have followers too
            self.in_lanes.update(just)

    def go_on(self, c: Connection, d: Dialect, now: datetime, *, gone: bool = False) -> None:
        """Their lanes and workflows go on."""
        if self.in_lanes:
            order.advance(c, d, self.in_lanes, now, gone=gone)
        if self._over:
            workflows.ask(c, d, self._over, now)


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
    ends = Ends()
    ends.add(c, d, followed, in_lanes, now, gone=gone)
    ends.go_on(c, d, now, gone=gone)


def resolve_dependencies(c: Connection, d: Dialect, now: datetime, waiting: Collection[UUID] | None = None) -> int:
    """Find out what these waiting jobs (by default: any) wait for; returns how many of their edges were dealt with."""
    dealt, cancelled = dependencies.resolve(c, d, now, waiting)
    release_followers(c, d, cancelled, cancelled, now)
    return dealt
