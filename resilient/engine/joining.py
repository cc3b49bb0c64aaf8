"""Writing jobs into the caller's transaction.

Plain jobs are written where the call stands. Jobs with a unique or ordering key would make other transactions wait for
this one's end (and so would a look at what a job waits for), so in a caller's Session they are buffered and written,
sorted, in the outermost commit's hook: the wait then lasts one commit. Lanes come last of all: their numbers are given
in the order of commits. SQLAlchemy fires ``before_commit`` at savepoint releases too (ignored), and not at all for a
session that sits on a connection whose transaction somebody else began (there, and on plain connections, they are
written at once). A rolled-back savepoint takes its buffered jobs with it, and so does whatever is closed without a
commit, of which no rollback tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from resilient.core.errors import InvalidInput
from resilient.engine import sessions
from resilient.engine.enqueue import Enqueued, Ordered
from resilient.engine.writing import write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from resilient.store.dialect import Dialect

_BUFFER: Final = "resilient.buffered"


@dataclass(slots=True)
class _Buffered:
    ordered: Ordered
    within: tuple[Any, ...]  # the session's transactions, innermost first, when it was ordered


def join(target: Any, d: Dialect, ordered: Sequence[Ordered], on_commit: Callable[[], None]) -> list[Enqueued]:
    """Write into the caller's transaction: a sync Session or Connection."""
    target, c = sessions.enter(target, on_commit)
    if isinstance(target, Connection):
        return write(c, d, ordered, last=False)
    foreign = isinstance(target.get_bind(), Connection)
    direct = [o for o in ordered if foreign or not o.waits_for_commit]
    later = [o for o in ordered if o.waits_for_commit and not foreign]
    written = dict(zip([o.row.id for o in direct], write(c, d, direct, last=False), strict=True)) if direct else {}
    if later:
        _buffer(target, d, later)
    return [written.get(o.row.id) or Enqueued(o.row.id, created=None) for o in ordered]


async def join_async(
    target: Any, d: Dialect, ordered: Sequence[Ordered], on_commit: Callable[[], None]
) -> list[Enqueued]:
    """Write into the caller's transaction: any of the four."""
    target = sessions.unscoped(target)
    if isinstance(target, (AsyncSession, AsyncConnection)):
        return await target.run_sync(join, d, ordered, on_commit)
    return join(target, d, ordered, on_commit)


def buffer(session: Session, d: Dialect, ordered: Iterable[Ordered], on_commit: Callable[[], None]) -> None:
    """Write with the outermost commit whatever it is, without any I/O now: for `outbox.publish`.

    What sort of connection the session gets is seen only then: one that commits each statement makes the commit fail.
    """
    sessions.on_outermost_commit(session, on_commit)
    _buffer(session, d, ordered)


def _buffer(session: Session, d: Dialect, ordered: Iterable[Ordered]) -> None:
    pending: _Pending | None = session.info.get(_BUFFER)
    if pending is None:
        pending = session.info[_BUFFER] = _Pending(d)
        event.listen(session, "before_commit", _before_commit)  # the session's own: after the program's listeners
        _listen()
    within = _transactions(session)
    if pending.written is not None and pending.written in within:
        raise InvalidInput("this transaction is being committed: enqueue and publish before its commit begins")
    pending.waiting.extend(_Buffered(o, within) for o in ordered)


class _Pending:
    """What one session has buffered."""

    def __init__(self, d: Dialect) -> None:
        self.dialect = d
        self.waiting: list[_Buffered] = []
        self.released: set[Any] = set()  # savepoints on their way to the outer transaction, with what was in them
        self.written: Any = None  # the transaction whose jobs are written: what comes now would come too late

    def drop(self, over: Any) -> None:
        """A transaction was rolled back."""
        if self.waiting:
            self.waiting = [b for b in self.waiting if over not in b.within]


def _before_commit(session: Session) -> None:
    pending: _Pending = session.info[_BUFFER]
    if session.in_nested_transaction():
        pending.released.add(session.get_nested_transaction())
        return
    if pending.waiting:
        session.flush()
        c = session.connection()
        sessions.require_transaction(c, "session")
        write(c, pending.dialect, [b.ordered for b in pending.waiting])
        pending.waiting = []
        pending.written = session.get_transaction()


@cache
def _listen() -> None:
    """Once for all sessions, which costs those that have nothing to do with it one look into a dictionary."""
    event.listen(Session, "after_soft_rollback", _rolled_back)
    event.listen(Session, "after_transaction_end", _over)


def _rolled_back(session: Session, over: Any) -> None:
    if (pending := session.info.get(_BUFFER)) is not None:
        pending.drop(over)


def _over(session: Session, over: Any) -> None:
    """Closed without a commit is rolled back too, and no event says so."""
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
