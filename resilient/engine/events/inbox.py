"""`app.inbox`: a consumer handles each message once, in its own transaction. `app.sync.inbox`: synchronous.

A broker delivers at least once, and so does our outbox. The consumer writes the message's id in the transaction of its
own work; both are committed or neither is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.core.base.errors import InvalidInput
from resilient.core.base.misfit import explained_calls, is_whole
from resilient.engine.ground.sessions import CallersSession, SyncFacade, Transactions, blocking
from resilient.store import events as store

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from resilient.core.events.message import Arrival
    from resilient.engine.ground.ground import Ground
    from resilient.store.db.dialect import Dialect

_HIGHEST = 2**63 - 1


@explained_calls("app.inbox")
class Inbox:
    """The inbox of one app. Raises `InvalidInput` for what cannot be a consumer, a message, a key or a number."""

    def __init__(self, ground: Ground, *, here: bool = False) -> None:
        self._ground, self._db = ground, Transactions(ground, here=here)

    @property
    def sync(self) -> SyncInbox:
        """The same for synchronous programs."""
        return SyncInbox(Inbox(self._ground, here=True))

    async def first(self, session: CallersSession, consumer: str, message_id: str) -> bool:
        """Whether ``consumer`` gets a message for the first time; if so, it is noted in ``session``'s transaction.

        ``consumer`` names a program that handles messages (``"billing"``): each handles a message once. Call it before
        anything else in the transaction: of two transactions with one message the second waits here for the first.
        """
        _check(session, consumer, message_id)
        return await self._db.write(session, _first, consumer, message_id)

    async def arrived(
        self, session: CallersSession, consumer: str, message_id: str, *, key: str, number: int, gapless: bool = False
    ) -> Arrival:
        """`first` with order: whether a message is the next of its ordering key; only then it is noted.

        ``number`` counts the messages of a ``key`` from 1 (events of our outbox carry it as ``sequence``). A number not
        higher than the highest noted is `Arrival.OUTDATED`. With ``gapless`` a number after a gap is `Arrival.EARLY`;
        the first message of a key may have any number.
        """
        _check(session, consumer, message_id)
        if not key or not is_whole(number, most=_HIGHEST):
            raise InvalidInput(f"a message in order has a key and a number from 1 up, not {key!r} and {number!r}")
        return await self._db.write(session, _arrived, consumer, message_id, key, number, gapless=gapless)


class SyncInbox(SyncFacade[Inbox]):
    """`Inbox` for synchronous programs: the same methods, without ``await``."""

    first = blocking(Inbox.first)
    arrived = blocking(Inbox.arrived)


def _check(session: CallersSession, consumer: str, message_id: str) -> None:
    if session is None:
        raise InvalidInput("the inbox is written in the consumer's own transaction: give it the session")
    if not 0 < len(consumer) <= store.LONGEST or not consumer.isprintable():
        raise InvalidInput(f"a consumer is named by 1 to 255 printable characters, not {consumer[:40]!r}")
    if not message_id:
        raise InvalidInput(f"a message for {consumer!r} has no id: without one a duplicate cannot be told")


def _first(c: Connection, d: Dialect, consumer: str, message_id: str) -> bool:
    return store.first_seen(c, d, consumer, message_id, d.now(c))


def _arrived(
    c: Connection, d: Dialect, consumer: str, message_id: str, key: str, number: int, *, gapless: bool
) -> Arrival:
    return store.arrived(c, d, consumer, message_id, key, number, d.now(c), gapless=gapless)
