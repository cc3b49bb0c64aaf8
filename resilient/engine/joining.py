"""Writing jobs into the caller's transaction.

Plain jobs are written where the call stands. Jobs with a unique or ordering key would make other transactions wait for
this one's end (and so would a look at what a job waits for), so in a caller's Session they are buffered and written,
sorted, in the outermost commit's hook: the wait then lasts one commit. Lanes come last of all, in one order: their
numbers are given in the order of commits, and those whose jobs were cancelled or discarded here go on. SQLAlchemy fires
``before_commit`` at savepoint releases too (ignored), and not at all for a session that sits on a connection whose
transaction somebody else began (there, and on plain connections, they are written at once). A rolled-back savepoint
takes its buffered jobs with it, and so does whatever is closed without a commit, of which no rollback tells.

What comes after the hook (the commit's own flush calls the program's listeners, and so may `before_commit` itself) is
written when the connection is about to commit, if nothing was written before; else it is refused: numbers drawn twice
in one transaction could make two of them wait for each other.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from resilient.core.errors import InvalidInput
from resilient.engine import sessions
from resilient.engine.enqueue import Enqueued, Ordered
from resilient.engine.writing import write
from resilient.store.callers import shortest
from resilient.store.followers import Ends

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from resilient.store.dialect import Dialect

_BUFFER: Final = "resilient.buffered"
_COMMITTING: Final = "resilient.committing"  # the hook of the outermost commit is over


class _Buffered(NamedTuple):
    what: Ordered | Ends
    within: tuple[Any, ...]  # the session's transactions, innermost first, when it was ordered
    dialect: Dialect  # of its app: there may be two, in two schemas


def join(target: Any, d: Dialect, ordered: Sequence[Ordered], on_commit: sessions.Wake) -> list[Enqueued]:
    """Write into the caller's transaction: a sync Session or Connection."""
    target, c = sessions.enter(target, on_commit)
    if isinstance(target, Connection):
        return write(shortest(c), d, ordered, last=False)
    foreign = isinstance(target.get_bind(), Connection)
    at_once = [o for o in ordered if foreign or not o.waits_for_commit]
    later = [o for o in ordered if o.waits_for_commit and not foreign]
    written = (
        dict(zip([o.row.id for o in at_once], write(shortest(c), d, at_once, last=False), strict=True))
        if at_once
        else {}
    )
    if later:
        _buffer(target, d, later)
    return [written.get(o.row.id) or Enqueued(o.row.id, created=None) for o in ordered]


async def join_async(target: Any, d: Dialect, ordered: Sequence[Ordered], on_commit: sessions.Wake) -> list[Enqueued]:
    """Write into the caller's transaction: any of the four."""
    target = sessions.unscoped(target)
    if isinstance(target, (AsyncSession, AsyncConnection)):
        return await target.run_sync(join, d, ordered, on_commit)
    return join(target, d, ordered, on_commit)


def buffer(session: Session, d: Dialect, ordered: Iterable[Ordered], on_commit: sessions.Wake) -> None:
    """Write with the outermost commit whatever it is, without any I/O now: for `outbox.publish`.

    What sort of connection the session gets is seen only then: one that commits each statement makes the commit fail.
    """
    sessions.on_outermost_commit(session, on_commit)
    _buffer(session, d, ordered)


def ends(target: Any, d: Dialect, on_commit: sessions.Wake) -> Ends | None:
    """What ended in the caller's session: its lanes and workflows go on with the outermost commit. None: at once."""
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


def _buffer(session: Session, d: Dialect, what: Iterable[Ordered | Ends]) -> None:
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
                event.listen(c, end, lambda c, *_: _write(pending, session, c), once=True)
    elif not pending.own_hook and not _is_last(session):
        event.listen(session, "before_commit", _own_hook)
        pending.own_hook = True
    pending.waiting.extend([_Buffered(one, within, d) for one in what])


def taken(session: Session, d: Dialect) -> tuple[list[Ordered], Ends]:
    """What was buffered for the tables of ``d``: its taker writes it, as the last thing before the commit."""
    pending: _Pending | None = session.info.get(_BUFFER)
    if pending is None:
        return [], Ends()
    found = [b for b in pending.waiting if b.dialect.schema == d.schema]
    pending.waiting = [b for b in pending.waiting if b.dialect.schema != d.schema]
    return _sorted_out(found)


def _sorted_out(waiting: Iterable[_Buffered]) -> tuple[list[Ordered], Ends]:
    ordered, ends = list[Ordered](), Ends()
    for one in waiting:
        if isinstance(one.what, Ends):
            ends.take(one.what)
        else:
            ordered.append(one.what)
    return ordered, ends


class _Pending:
    """What one session has buffered."""

    def __init__(self) -> None:
        self.waiting: list[_Buffered] = []
        self.own_hook = False  # whether the session itself has the hook, after the program's
        self.released: set[Any] = set()  # savepoints on their way to the outer transaction, with what was in them
        self.written: Any = None  # the transaction whose jobs are written: what comes now would come too late

    def drop(self, over: Any) -> None:
        """A transaction was rolled back."""
        if self.waiting:
            self.waiting = [b for b in self.waiting if over not in b.within]


def _before_commit(session: Session) -> None:
    """The hook, for all sessions; those where the program's own listeners come later have it once more."""
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
        _write(pending, session, c)
    session.info[_COMMITTING] = True


def _write(pending: _Pending, session: Session, c: Connection) -> None:
    pending.waiting = [b for b in pending.waiting if not isinstance(b.what, Ends) or b.what.released]
    if pending.waiting:
        for d, waiting in _by_schema(pending.waiting):
            ordered, ends = _sorted_out(waiting)
            way = shortest(c)
            write(way, d, ordered, ended=ends.in_lanes)
            if ends.released:
                ends.go_on(way, d, d.now(way))
        pending.waiting = []
        pending.written = session.get_transaction()


def _by_schema(waiting: Iterable[_Buffered]) -> list[tuple[Dialect, list[_Buffered]]]:
    found: dict[str, tuple[Dialect, list[_Buffered]]] = {}
    for b in waiting:
        found.setdefault(b.dialect.schema or "", (b.dialect, []))[1].append(b)
    return [found[schema] for schema in sorted(found)]  # everybody's order, so that nobody waits in a circle


def _is_last(session: Session) -> bool:
    """Whether nobody else's listener comes after the hook that all sessions have."""
    *_, last = session.dispatch.before_commit
    return last is _before_commit


@cache
def listen() -> None:
    """Once for all sessions: a listener of its own costs a session as much as a statement.

    Those that have nothing to do with it pay a look into a dictionary. Called when an app is made, so that no commit
    is on its way already.
    """
    event.listen(Session, "before_commit", _before_commit)
    event.listen(Session, "after_soft_rollback", _rolled_back)
    event.listen(Session, "after_transaction_end", _over)


def _rolled_back(session: Session, over: Any) -> None:
    if (pending := session.info.get(_BUFFER)) is not None:
        pending.drop(over)


def _over(session: Session, over: Any) -> None:
    """Closed without a commit is rolled back too, and no event says so."""
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
    found, current = [], session.get_nested_transaction() or session.get_transaction()
    while current is not None:
        found.append(current)
        current = current.parent
    return tuple(found)
