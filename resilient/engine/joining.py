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
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from resilient.engine import sessions
from resilient.engine.enqueue import Enqueued, Ordered
from resilient.engine.writing import write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sqlalchemy.orm import Session

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
    buffered: list[_Buffered] = session.info.setdefault(_BUFFER, [])
    within = _transactions(session)
    buffered.extend(_Buffered(o, within) for o in ordered)
    if session.info.get(_BUFFER + ".hooked"):
        return
    session.info[_BUFFER + ".hooked"] = True
    released: set[Any] = set()  # savepoints on their way to the outer transaction, with what was buffered within

    def drop(s: Session, over: Any) -> None:
        waiting: list[_Buffered] = s.info.get(_BUFFER) or []
        waiting[:] = [b for b in waiting if over not in b.within]

    @event.listens_for(session, "before_commit")
    def _(s: Session) -> None:
        if s.in_nested_transaction():
            released.add(s.get_nested_transaction())
            return
        waiting: list[_Buffered] = s.info.get(_BUFFER) or []
        if waiting:
            s.flush()
            c = s.connection()
            sessions.require_transaction(c, "session")
            write(c, d, [b.ordered for b in waiting])
            waiting.clear()

    event.listen(session, "after_soft_rollback", drop)

    @event.listens_for(session, "after_transaction_end")
    def _(s: Session, over: Any) -> None:
        """Closed without a commit is rolled back too, and no event says so."""
        if over in released:
            released.discard(over)
        else:
            drop(s, over)


def _transactions(session: Session) -> tuple[Any, ...]:
    found, current = [], session.get_nested_transaction() or session.get_transaction()
    while current is not None:
        found.append(current)
        current = current.parent
    return tuple(found)
