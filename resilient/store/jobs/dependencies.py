"""Dependencies: jobs that wait for other jobs, their blockers.

An edge (`resilient_dependency`) is inserted unresolved together with the waiting job, whose ``waits`` counts it. It is
resolved under the locks of both jobs (`resolve`): a blocker that is over by then is dealt with on the spot, any other
is marked ``followed``, so that the transaction that ends it looks for edges (`ended`). A blocker that finishes
meanwhile strands no job: both transactions lock its row, and the second one reads what the first one wrote.

Whoever ends a blocker deletes the edges that are done with and lowers the counts of the waiting jobs by what was
deleted. Jobs are locked before edges, waiting jobs in the order of their ids. `resolve` waits for nobody: what is
locked is left for the next look. A job that ends while it waits keeps its edges: if it is retried, it waits again for
those blockers that are not over by then (`wait_again`).

Every path on which a job ends (succeeds, dies, is cancelled, expires) or is deleted calls `release_followers` in the
same transaction, for two sorts of jobs: those with an ordering key, and those whose column ``followed`` is set, because
they waited for others, or others may wait for them, or they are steps of a workflow. Any other job costs nothing here.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.core.jobs.states import TERMINAL, JobState
from resilient.store.db.dialect import ID
from resilient.store.jobs import order, ready, workflows
from resilient.store.jobs.columns import AT_THE_END_SQL

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.store.db.dialect import Dialect


RESOLVE_LIMIT: Final = 500
_FIELDS: Final = {"job_id": "uuid", "blocker_id": "uuid", "on_dead": "text"}
_THESE: Final = "{dependency}.job_id = p.job_id AND {dependency}.blocker_id = p.blocker_id"


class Edge(NamedTuple):
    """``job_id`` waits for ``blocker_id``; ``on_dead``: what becomes of it if that one dies or is cancelled."""

    job_id: UUID
    blocker_id: UUID
    on_dead: str = "cancel"  # or "wait", "run"


class Ended(NamedTuple):
    """How a blocker ended; state None: it does not exist."""

    state: str | None
    kind: str = ""


GONE: Final = Ended(None)


def insert(c: Connection, d: Dialect, edges: Iterable[Edge]) -> None:
    """Insert edges, unresolved."""
    if doc := _document(d, edges):
        d.run(
            c,
            "INSERT INTO {dependency} (job_id, blocker_id, on_dead, resolved)"
            f" SELECT job_id, blocker_id, on_dead, false FROM {d.records('doc', _FIELDS)} AS p WHERE true",
            {"doc": json.dumps(doc)},
        )


def _document(d: Dialect, edges: Iterable[Edge]) -> list[dict[str, Any]]:
    return [
        {"job_id": d.id(e.job_id), "blocker_id": d.id(e.blocker_id), "on_dead": e.on_dead} for e in sorted(set(edges))
    ]


def resolve(
    c: Connection, d: Dialect, now: datetime, waiting: Collection[UUID] | None = None
) -> tuple[int, list[UUID]]:
    """Resolve the edges of these waiting jobs, or some of all; never waits for a lock.

    Returns how many edges were dealt with, and which waiting jobs were cancelled over it.
    """
    count, cancelled, last = 0, list["UUID"](), ""
    while True:
        rows = _open(c, d, waiting, last)
        if rows:
            count, cancelled = _resolve(c, d, rows, now)
        if count or waiting is not None or len(rows) < RESOLVE_LIMIT:
            return count, cancelled
        last = d.id(rows[-1][0])  # somebody holds all of these: others are behind them


def _open(c: Connection, d: Dialect, waiting: Collection[UUID] | None, last: str) -> Sequence[tuple[UUID, UUID]]:
    """The unresolved edges of these waiting jobs, or some of those behind the job ``last``."""
    among = _after(d, "job_id") if waiting is None else f"job_id {d.among('ids', 'uuid')}"
    params: dict[str, Any] = {"limit": RESOLVE_LIMIT, "after_job_id": last}
    rows: Sequence[tuple[UUID, UUID]] = d.run(
        c,
        f"SELECT job_id, blocker_id FROM {{dependency}} WHERE NOT resolved AND {among} ORDER BY job_id"
        + (" LIMIT :limit" if waiting is None else ""),
        params if waiting is None else {"ids": d.pack_ids(sorted(waiting))},
        job_id=ID,
        blocker_id=ID,
    ).all()
    return rows


def _resolve(c: Connection, d: Dialect, rows: Sequence[tuple[UUID, UUID]], now: datetime) -> tuple[int, list[UUID]]:
    """Deal with those of these edges whose jobs are not locked."""
    jobs = _locked(c, d, {r[0] for r in rows} | {r[1] for r in rows})
    absent = _absent(c, d, {i for r in rows for i in r if i not in jobs})
    edges = _unresolved(c, d, [r[0] for r in rows if r[0] in jobs or r[0] in absent])
    over: list[tuple[Edge, Ended]] = []
    open_: list[Edge] = []
    idle: list[Edge] = []
    for e in edges:
        child = jobs.get(e.job_id)
        blocker = GONE if e.blocker_id in absent else jobs.get(e.blocker_id)
        if child is None:
            idle.append(e)
        elif blocker is None:  # somebody has locked it
            continue
        elif child.state != JobState.BLOCKED:  # it ended before its edges were looked at
            (idle if _is_done(e, blocker) or blocker is GONE else open_).append(e)
        elif blocker is GONE or (blocker.state in TERMINAL and not _keeps_waiting(e, blocker)):
            over.append((e, blocker))
        else:
            open_.append(e)
    _mark(c, d, [*open_, *(e for e, blocker in over if blocker is not GONE and not _is_done(e, blocker))])
    _delete(c, d, idle)
    return len(over) + len(open_) + len(idle), _settle(c, d, over, now)


def ended(c: Connection, d: Dialect, ids: Sequence[UUID], now: datetime, *, gone: bool = False) -> list[UUID]:
    """Deal with those that waited for these ended jobs.

    Returns which waiting jobs were cancelled over it. ``gone``: the jobs are about to be deleted.
    """
    packed = {"ids": d.pack_ids(ids)}
    rows = d.run(
        c,
        "SELECT e.job_id, e.blocker_id, e.on_dead, j.state, j.kind FROM {dependency} e JOIN {job} j"
        f" ON j.id = e.blocker_id WHERE e.blocker_id {d.among('ids', 'uuid')} AND e.resolved",
        packed,
        job_id=ID,
        blocker_id=ID,
        on_dead=None,
        state=None,
        kind=None,
    ).all()
    if gone:
        d.run(c, f"DELETE FROM {{dependency}} WHERE job_id {d.among('ids', 'uuid')}", packed)
    ends = [(Edge(*r[:3]), GONE if gone and r[3] != JobState.SUCCEEDED else Ended(r[3], r[4])) for r in rows]
    over = [(e, blocker) for e, blocker in ends if not _keeps_waiting(e, blocker)]
    if not over:
        return []
    d.run(
        c,
        f"SELECT id FROM {{job}} WHERE id {d.among('ids', 'uuid')} ORDER BY id {{row_lock}}",
        {"ids": d.pack_ids(sorted({e.job_id for e, _ in over}))},
    ).all()
    return _settle(c, d, over, now)


def _keeps_waiting(e: Edge, blocker: Ended) -> bool:
    return e.on_dead == "wait" and blocker.state in (JobState.DEAD, JobState.CANCELLED)


def _is_done(e: Edge, blocker: Ended) -> bool:
    """Whether nothing of this blocker is waited for any more."""
    return blocker.state == JobState.SUCCEEDED or (
        e.on_dead == "run" and (blocker.state is None or blocker.state in TERMINAL)
    )


def _settle(c: Connection, d: Dialect, over: Sequence[tuple[Edge, Ended]], now: datetime) -> list[UUID]:
    """Let waiting jobs, which are locked, go on or end over blockers that are over; returns those cancelled."""
    doomed = {e.job_id: _reason(e.blocker_id, blocker) for e, blocker in over if not _is_done(e, blocker)}
    _delete(c, d, [e for e, blocker in over if blocker is GONE and not _is_done(e, blocker)])
    fewer = Counter(e.job_id for e in _delete(c, d, [e for e, blocker in over if _is_done(e, blocker)]))
    ready.unblock(c, d, {i: n for i, n in fewer.items() if i not in doomed}, now)
    return _cancel(c, d, doomed, now)


def blockers_of(c: Connection, d: Dialect, ids: Sequence[UUID]) -> set[UUID]:
    """What these jobs wait for, or waited for when they ended."""
    rows = d.run(
        c,
        f"SELECT DISTINCT blocker_id FROM {{dependency}} WHERE job_id {d.among('ids', 'uuid')}",
        {"ids": d.pack_ids(sorted(ids))},
        blocker_id=ID,
    )
    return {row.blocker_id for row in rows}


def wait_again(c: Connection, d: Dialect, ids: Collection[UUID], retried: Collection[UUID]) -> Counter[UUID]:
    """Let locked jobs that are about to be retried wait again; returns for how many blockers each of them waits.

    Edges to blockers that are over, and not ``retried`` with them, are deleted. The others become unresolved, also
    those to ``retried`` jobs: one may not be marked followed, because nobody has resolved its edge yet.
    """
    if not ids:
        return Counter()
    rows = d.run(
        c,
        "SELECT e.job_id, e.blocker_id, e.on_dead, j.state FROM {dependency} e LEFT JOIN {job} j ON j.id = e.blocker_id"
        f" WHERE e.job_id {d.among('ids', 'uuid')}",
        {"ids": d.pack_ids(sorted(ids))},
        job_id=ID,
        blocker_id=ID,
        on_dead=None,
        state=None,
    ).all()
    is_over = {Edge(*row[:3]): row[1] not in retried and (row[3] is None or row[3] in TERMINAL) for row in rows}
    _delete(c, d, [e for e, over in is_over.items() if over])
    edges = [e for e, over in is_over.items() if not over]
    _unresolve(c, d, edges)
    return Counter(e.job_id for e in edges)


def _unresolve(c: Connection, d: Dialect, edges: Sequence[Edge]) -> None:
    if edges:
        d.run(
            c,
            f"UPDATE {{dependency}} SET resolved = false FROM {d.records('doc', _FIELDS)} AS p WHERE {_THESE}",
            {"doc": json.dumps(_document(d, edges))},
        )


def _reason(id_: UUID, blocker: Ended) -> tuple[str, str]:
    if blocker.state is None:
        return f"job {id_}, for which it waited, does not exist: it was never committed, or deleted", "blocker_gone"
    what = "is dead" if blocker.state == JobState.DEAD else "was cancelled"
    return f"job {id_} ({blocker.kind}), for which it waited, {what}", f"blocker_{blocker.state}"


def _cancel(c: Connection, d: Dialect, doomed: Mapping[UUID, tuple[str, str]], now: datetime) -> list[UUID]:
    if not doomed:
        return []
    doc = [{"id": d.id(i), "error": error, "code": code} for i, (error, code) in sorted(doomed.items())]
    rows = d.run(
        c,
        "UPDATE {job} SET state = 'cancelled', waits = 0, version = {job}.version + 1,"
        f" last_error = p.error, last_error_code = p.code, finished_at = :now, updated_at = :now, {AT_THE_END_SQL}"
        f" FROM {d.records('doc', {'id': 'uuid', 'error': 'text', 'code': 'text'})} AS p"
        " WHERE {job}.id = p.id AND {is_blocked} RETURNING {job}.id",
        {"doc": json.dumps(doc), "now": now},
        id=ID,
    ).all()
    return [r[0] for r in rows]


# -- reading and writing edges -----------------------------------------------------------------------------------------


def _locked(c: Connection, d: Dialect, ids: Collection[UUID]) -> dict[UUID, Ended]:
    """Lock those of these jobs that are not locked."""
    rows = d.run(
        c,
        f"SELECT id, state, kind FROM {{job}} WHERE id {d.among('ids', 'uuid')} ORDER BY id {{leaf_lock}}",
        {"ids": d.pack_ids(sorted(ids))},
        id=ID,
    )
    return {r[0]: Ended(r[1], r[2]) for r in rows}


def _absent(c: Connection, d: Dialect, ids: Collection[UUID]) -> set[UUID]:
    """Those that do not exist; the others are only locked."""
    if not ids:
        return set()
    rows = d.run(
        c,
        f"SELECT id FROM {{job}} WHERE id {d.among('ids', 'uuid')}",
        {"ids": d.pack_ids(sorted(ids))},
        id=ID,
    )
    return set(ids) - {r[0] for r in rows}


def _unresolved(c: Connection, d: Dialect, waiting: Collection[UUID]) -> list[Edge]:
    """Read the unresolved edges once more, under the locks."""
    if not waiting:
        return []
    rows = d.run(
        c,
        "SELECT job_id, blocker_id, on_dead FROM {dependency}"
        f" WHERE NOT resolved AND job_id {d.among('ids', 'uuid')}",
        {"ids": d.pack_ids(sorted(set(waiting)))},
        job_id=ID,
        blocker_id=ID,
    )
    return [Edge(*r) for r in rows]


def _mark(c: Connection, d: Dialect, edges: Sequence[Edge]) -> None:
    """Mark edges resolved, and blockers followed. A blocker's fence stays, so that its worker can finish it."""
    if not edges:
        return
    d.run(
        c,
        f"UPDATE {{dependency}} SET resolved = true FROM {d.records('doc', _FIELDS)} AS p WHERE {_THESE}",
        {"doc": json.dumps(_document(d, edges))},
    )
    d.run(
        c,
        f"UPDATE {{job}} SET followed = true WHERE id {d.among('ids', 'uuid')} AND NOT followed",
        {"ids": d.pack_ids(sorted({e.blocker_id for e in edges}))},
    )


def _delete(c: Connection, d: Dialect, edges: Sequence[Edge]) -> list[Edge]:
    if not edges:
        return []
    here = f"SELECT 1 FROM {d.records('doc', _FIELDS)} AS p WHERE {_THESE}"
    rows = d.run(
        c,
        f"DELETE FROM {{dependency}} WHERE job_id {d.among('ids', 'uuid')} AND EXISTS ({here})"
        " RETURNING job_id, blocker_id, on_dead",
        {"doc": json.dumps(_document(d, edges)), "ids": d.pack_ids(sorted({e.job_id for e in edges}))},
        job_id=ID,
        blocker_id=ID,
    )
    return [Edge(*r) for r in rows]


# -- repair ------------------------------------------------------------------------------------------------------------

WINDOW: Final = 2_000


class Walk(NamedTuple):
    """How far a walk through all edges and all blocked jobs has come: the last of each; empty: the start."""

    edge: tuple[str, str] = ("", "")  # waiting job and blocker: one job may have more edges than a window
    job: str = ""


def repair(c: Connection, d: Dialect, walk: Walk, now: datetime) -> tuple[list[UUID], Walk]:
    """Check the next edges and the next blocked jobs; lets stranded ones go on and returns them.

    Stranded are jobs with an edge whose blocker ended without releasing it (it is made unresolved again), and jobs that
    wait without any edge. There are none, unless the engine has a bug.
    """
    rows = d.run(
        c,
        "SELECT e.job_id, e.blocker_id, e.resolved AND (b.id IS NULL OR b.state = 'succeeded' OR NOT b.followed"
        "  OR (w.state = 'blocked' AND b.state IN ('dead', 'cancelled') AND e.on_dead <> 'wait')) AS stale"
        f" FROM (SELECT * FROM {{dependency}} WHERE {_after(d, 'job_id', 'blocker_id')}"
        "  ORDER BY job_id, blocker_id LIMIT :limit) e"
        " LEFT JOIN {job} w ON w.id = e.job_id LEFT JOIN {job} b ON b.id = e.blocker_id"
        " ORDER BY e.job_id, e.blocker_id",
        {"after_job_id": walk.edge[0], "after_blocker_id": walk.edge[1], "limit": WINDOW},
        job_id=ID,
        blocker_id=ID,
        stale=None,
    ).all()
    stale = [Edge(r[0], r[1]) for r in rows if r[2]]
    _unresolve(c, d, stale)
    blocked = d.run(
        c,
        "SELECT j.id, j.waits, EXISTS (SELECT 1 FROM {dependency} e WHERE e.job_id = j.id) AS has_edge FROM"
        f" (SELECT id, waits FROM {{job}} WHERE state = 'blocked' AND ordering_key IS NULL AND {_after(d, 'id')}"
        "  ORDER BY id LIMIT :limit) j ORDER BY j.id",
        {"after_id": walk.job, "limit": WINDOW},
        id=ID,
        waits=None,
        has_edge=None,
    ).all()
    alone = {r[0]: max(1, r[1]) for r in blocked if not r[2]}
    ready.unblock(c, d, alone, now)
    further = Walk()
    if len(rows) == WINDOW:
        further = further._replace(edge=(d.id(rows[-1][0]), d.id(rows[-1][1])))
    if len(blocked) == WINDOW:
        further = further._replace(job=d.id(blocked[-1][0]))
    return sorted({e.job_id for e in stale} | alone.keys()), further


def _after(d: Dialect, *columns: str) -> str:
    """The condition that ids are greater than the parameters ``after_<column>``; empty ones are smaller than all."""
    least = "00000000-0000-0000-0000-000000000000"
    value = f"CAST(coalesce(nullif(:after_%s, ''), '{least}') AS uuid)" if d.is_postgresql else ":after_%s"
    return f"({', '.join(columns)}) > ({', '.join(value % column for column in columns)})"


# -- the end of jobs, and what follows from it -------------------------------------------------------------------------


class Ends:
    """The jobs that one transaction ends in several statements.

    Here and everywhere locks are taken on jobs first (by id), then on unique keys, then on ordering keys (in their
    order), then on workflows (by id). So call `add` after each statement, or `note` after each and `release` after the
    last; then write new jobs with ordering keys, and call `go_on` last: in a program's session at its commit
    (`engine/jobs/queue.py`).
    """

    __slots__ = ("_followed", "_over", "again", "in_order", "workflows")

    def __init__(self) -> None:
        self._followed: set[UUID] = set()  # noted, and not yet released
        self._over: set[UUID] = set()
        self.in_order: set[UUID] = set()
        self.workflows: set[UUID] = set()  # that somebody cancelled
        self.again = False  # whether some of them run once more

    @property
    def released(self) -> bool:
        """Whether something may be ready now that was not."""
        return self.again or bool(self.in_order) or bool(self._over) or bool(self.workflows)

    def take(self, other: Ends) -> None:
        """Add the jobs of another one."""
        self._over |= other._over
        self.in_order |= other.in_order
        self.workflows |= other.workflows
        self.again = self.again or other.again

    def add(
        self,
        c: Connection,
        d: Dialect,
        followed: Iterable[UUID],
        in_order: Iterable[UUID],
        now: datetime,
        *,
        gone: bool = False,
    ) -> None:
        """Add ended jobs, and deal with those that waited for them; see `release_followers`.

        ``gone`` is true of these alone: a job that is cancelled over one of them stays.
        """
        self.in_order.update(in_order)
        just = sorted(followed)
        while just:
            self._over.update(just)
            just, gone = ended(c, d, just, now, gone=gone), False  # those that are cancelled now have followers too
            self.in_order.update(just)

    def note(self, followed: Iterable[UUID], in_order: Iterable[UUID]) -> None:
        """Add ended jobs; what waited for them is dealt with by `release`, once the transaction has all its own jobs.

        A follower is a job too: locked before the last of them, it may be what makes two transactions wait in a circle.
        """
        self._followed.update(followed)
        self.in_order.update(in_order)

    def release(self, c: Connection, d: Dialect, now: datetime) -> None:
        """Deal with those that waited for the noted jobs; see `add`."""
        followed, self._followed = self._followed, set()
        self.add(c, d, followed, (), now)

    def go_on(self, c: Connection, d: Dialect, now: datetime, *, gone: bool = False) -> None:
        """Advance their ordering keys, cancel workflows, and ask for a look at those of the jobs."""
        if self.in_order:
            order.advance(c, d, self.in_order, now, gone=gone)
        if self.workflows:
            workflows.cancel(c, d, self.workflows, self._over, now)
        if self._over:
            workflows.ask(c, d, self._over, now)


def release_followers(
    c: Connection,
    d: Dialect,
    followed: Iterable[UUID],
    in_order: Iterable[UUID],
    now: datetime,
    *,
    gone: bool = False,
) -> None:
    """Let what waited for these jobs go on, in the transaction that ended them and after the statement that did.

    ``in_order``: those that have an ordering key, ``followed`` or not. ``gone``: they are finished and are about to be
    deleted; call it before that.
    """
    ends = Ends()
    ends.add(c, d, followed, in_order, now, gone=gone)
    ends.go_on(c, d, now, gone=gone)


def resolve_dependencies(c: Connection, d: Dialect, now: datetime, waiting: Collection[UUID] | None = None) -> int:
    """`resolve`, and release what waited for the jobs that it cancelled; returns how many edges were dealt with."""
    count, cancelled = resolve(c, d, now, waiting)
    release_followers(c, d, cancelled, cancelled, now)
    return count
