"""Enqueueing: writing checked and encoded jobs in a transaction of their own or in the caller's.

Plain jobs are written at the call. Jobs with a unique or ordering key would make other transactions wait for
this one's end (and so would a look at what a job waits for), so in a caller's Session they are buffered and written,
sorted, in the outermost commit's hook: the wait then lasts one commit. Ordering keys come last, sorted: their numbers
follow the order of commits, and the keys whose jobs were cancelled or discarded here go on. SQLAlchemy fires
``before_commit`` at savepoint releases too (ignored), and not at all for a session that sits on a connection whose
transaction somebody else began (there, and on plain connections, they are written at once). A rolled-back savepoint
takes its buffered jobs with it, and so does a session closed without a commit, for which no rollback event comes.

A job enqueued after the hook (by a listener of the program, in the commit's flush or in `before_commit`) is written
when the connection is about to commit, if the hook wrote nothing; else it is refused: two transactions that each draw
numbers twice could wait for each other.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from resilient.core.base.errors import DuplicateJob, InvalidInput
from resilient.core.jobs import marks
from resilient.engine.ground import sessions
from resilient.engine.ground.encoder import Enqueued, JobRequest, with_trace
from resilient.engine.ground.kinds import name_of
from resilient.engine.ground.sessions import Transactions
from resilient.store.db.direct import direct, operation, through_driver
from resilient.store.db.schema import missing_tables_explained
from resilient.store.jobs import dependencies, order, ready
from resilient.store.jobs import insert as jobs
from resilient.store.jobs.dependencies import Ends

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from typing import Unpack
    from uuid import UUID

    from resilient.engine.ground.encoder import Item, JobOptions
    from resilient.engine.ground.ground import Ground
    from resilient.engine.ground.kinds import Kind
    from resilient.engine.ground.sessions import CallersSession
    from resilient.store.db.dialect import Dialect
    from resilient.store.jobs.columns import NewJob


BATCH: Final = 10_000  # plain jobs that `write_many` writes at once


@direct
@operation("enqueue")
def write(
    c: Connection,
    d: Dialect,
    requests: Sequence[JobRequest],
    *,
    last: bool = True,
    ended: Collection[UUID] = (),
    alone: bool = False,
) -> list[Enqueued]:
    """Insert jobs in this transaction: plain ones, then those with a unique key, then those with an ordering key.

    ``last``: the commit follows, so to check what jobs wait for delays nobody; else staging checks it. ``ended``: jobs
    whose ordering keys go on in this transaction too. ``alone``: the transaction writes nothing else that a job reads.
    Raises `SchemaOutdated` where there are no tables.
    """
    with missing_tables_explained(c, d):
        return _write(c, d, requests, last=last, ended=ended, alone=alone)


def _write(
    c: Connection, d: Dialect, requests: Sequence[JobRequest], *, last: bool, ended: Collection[UUID], alone: bool
) -> list[Enqueued]:
    if len(requests) == 1 and not requests[0].after and not ended and jobs.can_append(d, row := requests[0].row):
        jobs.append(c, d, row)
        return [Enqueued(row.id)]  # the commonest case: the caller's transaction waits for it
    plain = [request.row for request in requests if request.row.unique_key is None and request.row.ordering_key is None]
    if plain:
        jobs.insert(c, d, plain)
    if len(plain) == len(requests) and not any(request.after for request in requests):
        return [Enqueued(row.id) for row in plain]
    results = {request.row.id: Enqueued(request.row.id) for request in requests}
    for request in sorted((request for request in requests if request.row.unique_key is not None), key=_unique_order):
        results[request.row.id] = _write_unique(c, d, request, alone=alone)
    in_lanes = [
        request.row for request in requests if request.row.ordering_key is not None and results[request.row.id].created
    ]
    if in_lanes:
        _write_in_lanes(c, d, in_lanes, ended)
    if waiting := [request for request in requests if request.after and results[request.row.id].created]:
        _write_edges(c, d, waiting, results, last=last)
    return [results[request.row.id] for request in requests]


@direct
@operation("enqueue")
def write_many(c: Connection, d: Dialect, requests: Sequence[JobRequest]) -> list[Enqueued]:
    """`write` in a transaction of its own, in statements of a bounded size.

    If other transactions may wait for one of the jobs, one batch holds all: two batches would lock out of order.
    """
    done, size = list[Enqueued](), BATCH
    if len(requests) > size and any(request.waits_for_commit for request in requests):
        size = len(requests)
    for start in range(0, len(requests), size):
        done += write(c, d, requests[start : start + size], alone=True)
    return done


@direct
def write_back(c: Connection, d: Dialect, rows: Sequence[NewJob]) -> None:
    """Insert jobs that have their order numbers already: each is the next of its ordering key."""
    if rows:
        jobs.insert(c, d, [row._replace(waits=1) for row in rows])
        order.put_back(c, d, {r.id: ((r.resource_key, r.ordering_key or ""), r.order_no or 0) for r in rows}, d.now(c))


def is_one_statement(request: JobRequest) -> bool:
    """Whether `write` of this job alone is one statement (PostgreSQL)."""
    return not request.waits_for_commit


def _write_edges(
    c: Connection, d: Dialect, waiting: Sequence[JobRequest], results: Mapping[UUID, Enqueued], *, last: bool
) -> None:
    """Insert the dependencies of jobs; if another job holds a blocker's unique key, they wait for that job."""
    edges = set()
    surplus = {}  # by the job that waits: how many of its blockers are the same job as another one
    for request in waiting:
        blockers = {results[i].id if i in results else i for i in request.after}
        edges |= {dependencies.Edge(request.row.id, i, request.on_dead) for i in blockers}
        if len(blockers) < len(request.after):
            surplus[request.row.id] = len(request.after) - len(blockers)
    dependencies.insert(c, d, edges)
    now = d.now(c)
    ready.unblock(c, d, surplus, now)
    if last:
        dependencies.resolve_dependencies(c, d, now, [request.row.id for request in waiting])


def _write_in_lanes(c: Connection, d: Dialect, rows: Sequence[NewJob], ended: Collection[UUID]) -> None:
    """Number jobs with an ordering key and insert them; those with a unique key too were inserted before, blocked."""
    newcomers = [order.Newcomer(r.id, r.resource_key, r.ordering_key or "") for r in rows]
    if ended:
        order.hold(c, d, newcomers, ended)
    if len(rows) == 1 and jobs.can_append(d, rows[0]):
        jobs.append(c, d, rows[0])
        return
    places = order.draw(c, d, newcomers)
    new = [
        r._replace(order_no=places[r.id].order_no, waits=r.waits + (not places[r.id].is_head))
        for r in rows
        if r.unique_key is None
    ]
    if new:
        jobs.insert(c, d, new)
    if len(new) < len(rows):
        order.settle(c, d, {r.id: places[r.id] for r in rows if r.unique_key is not None}, d.now(c))


def _unique_order(request: JobRequest) -> tuple[str, str]:
    return request.row.kind, request.row.unique_key or ""


def _write_unique(c: Connection, d: Dialect, request: JobRequest, *, alone: bool) -> Enqueued:
    """Insert a job, or hand it over to the job that holds its key. The unique index decides, not a select before."""
    row = request.row
    if row.unique_key is None:
        raise ValueError("a job without a unique key")
    new = row if row.ordering_key is None else row._replace(waits=row.waits + 1)
    for _ in range(5):
        if jobs.insert_unique(c, d, [new]):
            return Enqueued(row.id)
        holder = jobs.holder(c, d, row.kind, row.unique_key)
        if holder is None:  # it ended between the two statements
            continue
        if request.on_conflict == "raise":
            raise DuplicateJob(
                f"job {holder.id} ({row.kind}, {holder.state}) already holds unique_key {row.unique_key!r}"
            )
        if _hand_over(c, d, request, holder, alone=alone):
            return Enqueued(holder.id, created=False)
    raise DuplicateJob(f"unique_key {row.unique_key!r} of {row.kind!r} is taken and freed faster than it can be read")


def _hand_over(c: Connection, d: Dialect, request: JobRequest, holder: jobs.KeyHolder, *, alone: bool) -> bool:
    """Let the job that holds the key do what was requested; False if its state has changed meanwhile."""
    row, is_running = request.row, holder.state == "running"
    if (request.while_running != "once_more") if is_running else (request.on_conflict != "replace"):
        return is_running or alone or holder.state == "blocked" or jobs.keep_if_waiting(c, d, holder)
    if holder.resource_key != row.resource_key:
        raise DuplicateJob(
            f"job {holder.id} ({row.kind}, {holder.state}) of {holder.resource_key} holds unique_key"
            f" {row.unique_key!r} and does nothing for {row.resource_key}: name the resource in the key"
        )
    if request.after or holder.ordering_key != row.ordering_key:
        what = "after=" if request.after else f"ordering_key={row.ordering_key!r} and not {holder.ordering_key!r}"
        raise DuplicateJob(
            f"job {holder.id} ({row.kind}, {holder.state}) holds unique_key {row.unique_key!r} and cannot be given"
            f" {what}: what it waits for is said once, when it is enqueued. Cancel it first, or leave it as it is"
        )
    now = d.now(c)
    if is_running and holder.cancel_requested:
        raise DuplicateJob(
            f"job {holder.id} ({row.kind}) holds unique_key {row.unique_key!r} and is about to be cancelled, so that it"
            " cannot run once more: enqueue again when it has ended"
        )
    if is_running:
        return jobs.mark_once_more(c, d, holder.id, now, row if request.on_conflict == "replace" else None)
    if marks.unkeyed(holder.sent):
        raise DuplicateJob(
            f"job {holder.id} ({row.kind}, {holder.state}) holds unique_key {row.unique_key!r} and waits to look up a"
            " request that may have been received: it cannot be replaced before that"
        )
    return jobs.replace_if_waiting(c, d, holder, row, now)


_BUFFER: Final = "resilient.buffered"
_COMMITTING: Final = "resilient.committing"  # the hook of the outermost commit is over


class _Buffered(NamedTuple):
    what: JobRequest | Ends
    within: tuple[Any, ...]  # the session's transactions at that time, innermost first
    dialect: Dialect  # of its app: a program may have two apps, in two schemas


def join(target: Any, d: Dialect, requests: Sequence[JobRequest], on_commit: sessions.Wake) -> list[Enqueued]:
    """Write into the transaction of the caller's Session or Connection."""
    target, c = sessions.enter(target, on_commit)
    if isinstance(target, Connection):
        return _write_whole(c, d, requests)
    is_foreign = isinstance(target.get_bind(), Connection)
    at_once = [request for request in requests if is_foreign or not request.waits_for_commit]
    later = [request for request in requests if request.waits_for_commit and not is_foreign]
    written = (
        dict(zip([request.row.id for request in at_once], _write_whole(c, d, at_once), strict=True)) if at_once else {}
    )
    if later:
        _buffer(target, d, later)
    return [written.get(request.row.id) or Enqueued(request.row.id, created=None) for request in requests]


def _write_whole(c: Connection, d: Dialect, requests: Sequence[JobRequest]) -> list[Enqueued]:
    """Write all of them or, where a unique key is refused, none: its caller may catch `DuplicateJob`, and commit."""
    with sessions.savepoint(c) if len(requests) > 1 and any(map(_has_key, requests)) else nullcontext():
        return write(through_driver(c), d, requests, last=False)


def _has_key(request: JobRequest) -> bool:
    return request.row.unique_key is not None


async def join_async(
    target: Any, d: Dialect, requests: Sequence[JobRequest], on_commit: sessions.Wake
) -> list[Enqueued]:
    """`join` for a Session or Connection that may be asynchronous."""
    target = sessions.unscoped(target)
    if isinstance(target, (AsyncSession, AsyncConnection)):
        return await target.run_sync(join, d, requests, on_commit)
    return join(target, d, requests, on_commit)


def buffer(session: Session, d: Dialect, requests: Iterable[JobRequest], on_commit: sessions.Wake) -> None:
    """Buffer jobs of any sort until the outermost commit, without any I/O now: for `outbox.publish`.

    Only that commit sees the session's connection: if it is in autocommit, the commit raises `InvalidInput`.
    """
    sessions.on_outermost_commit(session, on_commit)
    _buffer(session, d, requests)


def ends(target: Any, d: Dialect, on_commit: sessions.Wake) -> Ends | None:
    """Collects jobs that end in the caller's session; what waits for them goes on at its commit. None: at once."""
    target = sessions.unscoped(target)
    session = target.sync_session if isinstance(target, AsyncSession) else target
    if not isinstance(session, Session) or isinstance(session.get_bind(), Connection):
        return None
    pending: _Pending | None = session.info.get(_BUFFER)
    if pending is not None and pending.written is not None and pending.written in _transactions(session):
        return None
    later = Ends()
    sessions.on_outermost_commit(session, on_commit)
    _buffer(session, d, [later])
    return later


def _buffer(session: Session, d: Dialect, what: Iterable[JobRequest | Ends]) -> None:
    listen()
    pending: _Pending | None = session.info.get(_BUFFER)
    if pending is None:
        pending = session.info[_BUFFER] = _Pending()
    within = _transactions(session)
    if pending.written is not None and pending.written in within:
        raise InvalidInput("this transaction is being committed: enqueue and publish before its commit begins")
    if _COMMITTING in session.info:
        c = session.connection()
        sessions.require_transaction(c, "session")
        if not pending.waiting:
            for end in ("commit", "prepare_twophase"):  # the second: with Session(twophase=True)
                event.listen(c, end, lambda c, *_: _write_buffered(pending, session, c), once=True)
    elif not pending.own_hook and not _is_last(session):
        event.listen(session, "before_commit", _own_hook)
        pending.own_hook = True
    pending.waiting.extend([_Buffered(one, within, d) for one in what])


def take_buffered(session: Session, d: Dialect) -> tuple[list[JobRequest], Ends]:
    """Remove and return what is buffered for the tables of ``d``; the caller writes it last, before the commit."""
    pending: _Pending | None = session.info.get(_BUFFER)
    if pending is None:
        return [], Ends()
    buffered = [b for b in pending.waiting if b.dialect.schema == d.schema]
    pending.waiting = [b for b in pending.waiting if b.dialect.schema != d.schema]
    return _by_sort(buffered)


def _by_sort(waiting: Iterable[_Buffered]) -> tuple[list[JobRequest], Ends]:
    requests, ends = list[JobRequest](), Ends()
    for one in waiting:
        if isinstance(one.what, Ends):
            ends.take(one.what)
        else:
            requests.append(one.what)
    return requests, ends


class _Pending:
    """The jobs and ends that one session has buffered."""

    def __init__(self) -> None:
        self.waiting: list[_Buffered] = []
        self.own_hook = False  # whether the session has a hook of its own, behind the program's listeners
        self.released: set[Any] = set()  # savepoints whose jobs go on to the outer transaction
        self.written: Any = None  # the transaction whose jobs are written: it takes no more

    def drop(self, over: Any) -> None:
        """Drop the jobs of a transaction that was rolled back."""
        if self.waiting:
            self.waiting = [b for b in self.waiting if over not in b.within]


def _before_commit(session: Session) -> None:
    """The hook of all sessions; one with a hook of its own, behind the program's listeners, is left to that."""
    pending: _Pending | None = session.info.get(_BUFFER)
    if pending is None or not pending.own_hook:
        _hook(session, pending)


def _own_hook(session: Session) -> None:
    _hook(session, session.info[_BUFFER])


def _hook(session: Session, pending: _Pending | None) -> None:
    if session.in_nested_transaction():
        if pending is not None:
            pending.released.add(session.get_nested_transaction())
        return
    if pending is not None and pending.waiting:
        session.flush()
        c = session.connection()
        sessions.require_transaction(c, "session")
        _write_buffered(pending, session, c)
    session.info[_COMMITTING] = True


def _write_buffered(pending: _Pending, session: Session, c: Connection) -> None:
    pending.waiting = [b for b in pending.waiting if not isinstance(b.what, Ends) or b.what.released]
    if pending.waiting:
        for d, waiting in _by_schema(pending.waiting):
            requests, ends = _by_sort(waiting)
            driver = through_driver(c)
            write(driver, d, requests, ended=ends.in_order)
            if ends.released:
                ends.go_on(driver, d, d.now(driver))
        pending.waiting = []
        pending.written = session.get_transaction()


def _by_schema(waiting: Iterable[_Buffered]) -> list[tuple[Dialect, list[_Buffered]]]:
    groups: dict[str, tuple[Dialect, list[_Buffered]]] = {}
    for b in waiting:
        groups.setdefault(b.dialect.schema or "", (b.dialect, []))[1].append(b)
    return [groups[schema] for schema in sorted(groups)]  # the same order everywhere, so that there is no deadlock


def _is_last(session: Session) -> bool:
    """Whether nobody else's listener comes after the hook that all sessions have."""
    *_, last = session.dispatch.before_commit
    return last is _before_commit


@cache
def listen() -> None:
    """Listen to all sessions, once: a listener of its own costs a session as much as a statement.

    A session without jobs pays a look into a dictionary. Called when an app is made, so that no commit is on its way
    already.
    """
    event.listen(Session, "before_commit", _before_commit)
    event.listen(Session, "after_soft_rollback", _rolled_back)
    event.listen(Session, "after_transaction_end", _over)


def _rolled_back(session: Session, over: Any) -> None:
    if (pending := session.info.get(_BUFFER)) is not None:
        pending.drop(over)


def _over(session: Session, over: Any) -> None:
    """A transaction ended: one that was closed without a commit is rolled back too, and no other event says so."""
    if over.parent is None:
        session.info.pop(_COMMITTING, None)
    pending: _Pending | None = session.info.get(_BUFFER)
    if pending is None:
        return
    if over in pending.released:
        pending.released.discard(over)
    else:
        pending.drop(over)
    if over is pending.written:
        pending.written = None


def _transactions(session: Session) -> tuple[Any, ...]:
    stack, current = [], session.get_nested_transaction() or session.get_transaction()
    while current is not None:
        stack.append(current)
        current = current.parent
    return tuple(stack)


P = TypeVar("P")


class Queue:
    """Enqueues the jobs of one app. With ``here`` it blocks the calling thread and never suspends."""

    def __init__(self, ground: Ground, *, here: bool = False) -> None:
        self._ground, self._here = ground, here
        self._db = Transactions(ground, here=here)

    async def enqueue(
        self,
        kind: Kind[P] | str,
        payload: P | None = None,
        *,
        resource_key: str,
        session: CallersSession = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued:
        """See `Resilient.enqueue`."""
        tracing = self._ground.tracing
        with tracing.enqueue(name_of(kind)) as span:
            requests = with_trace([self._ground.encoder.encode(kind, payload, resource_key, **options)], tracing)
            self._ground.foresight.look(requests)
            if span is not None:
                span.note({"messaging.message.id": str(requests[0].row.id)})
            if session is not None:
                return (await self._join(session, requests))[0]
            run = self._db.statement if is_one_statement(requests[0]) else self._db.transaction
            (done,) = await run(write_many, requests)
        self._accept(requests, [done])
        self._ground.poke()
        return done

    async def enqueue_many(
        self,
        kind: Kind[P] | str,
        payloads: Iterable[P | Item],
        *,
        resource_key: str | None = None,
        session: CallersSession = None,
        **options: Unpack[JobOptions],
    ) -> list[Enqueued]:
        """See `Resilient.enqueue_many`."""
        tracing = self._ground.tracing
        with tracing.enqueue(name_of(kind)) as span:
            requests = with_trace(self._ground.encoder.encode_many(kind, payloads, resource_key, options), tracing)
            self._ground.foresight.look(requests)
            if span is not None:
                span.note({"messaging.batch.message_count": len(requests)})
            if session is not None:
                return await self._join(session, requests)
            done = await self._db.transaction(write_many, requests)
        self._accept(requests, done)
        self._ground.poke()
        return done

    async def _join(self, session: CallersSession, requests: Sequence[JobRequest]) -> list[Enqueued]:
        d, poke = self._ground.database.dialect, self._ground.poke
        done = join(session, d, requests, poke) if self._here else await join_async(session, d, requests, poke)
        self._accept(requests, done)
        return done

    def _accept(self, requests: Sequence[JobRequest], done: Sequence[Enqueued]) -> None:
        """Count what is new, by kind."""
        new = zip(requests, done, strict=True)
        self._ground.counts.enqueue(request.row.kind for request, result in new if result.created is not False)
