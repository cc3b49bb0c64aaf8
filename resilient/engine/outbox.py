"""`app.outbox`: events written with the business rows they tell of, and published afterwards. `app.sync.outbox`.

`publish` only checks and buffers: the session's outermost commit writes the event, one job for each destination, by
the mechanism of `enqueue.py`. What is rolled back, a savepoint's part too, was never there. So an event is published
if, and only if, its transaction was committed: at least once, and in the order of the commits for each key.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session
from uuid_utils import uuid7

from resilient.core.errors import InvalidInput
from resilient.core.events import EventInfo, Replayed
from resilient.core.events import destination as destination_of
from resilient.core.message import numbered
from resilient.core.misfit import explained_calls
from resilient.engine import joining, sessions, trace
from resilient.engine.event import data_of
from resilient.engine.forms import Forms, checked_routes, known
from resilient.engine.sessions import CallersSession, Face, Transactions, blocking
from resilient.engine.writing import write, write_back
from resilient.store import outbox as store
from resilient.store.filters import JobFilter

if TYPE_CHECKING:
    import builtins
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime, timedelta
    from uuid import UUID

    from resilient.core.records import JobInfo
    from resilient.engine.app import Resilient
    from resilient.engine.enqueue import Encoder, Ordered
    from resilient.engine.event import Event
    from resilient.store.dialect import Dialect
    from resilient.wire.publishers.base import Destination

DEFAULT_SOURCE: Final = "/resilient"
_MOST: Final = 10_000  # counted by a dry run
_BATCH: Final = 500
_REPLAY: Final = '{"replay":"true"}'


@explained_calls("app.outbox")
class Outbox:
    """The outbox of one app.

    ``routes`` says where the events of a class (and of those derived from it) go.
    """

    def __init__(
        self,
        app: Resilient,
        encoder: Encoder,
        destinations: Mapping[str, Destination],
        routes: Mapping[type[Event], Sequence[str]] | None,
        source: str = DEFAULT_SOURCE,
        *,
        here: bool = False,
    ) -> None:
        self._app, self._encoder, self._db = app, encoder, Transactions(app, here=here)
        self.destinations, self.source = destinations, source
        self.routes = checked_routes(routes, destinations)
        self._forms = Forms(encoder, destinations, self.routes, source)

    @property
    def sync(self) -> SyncOutbox:
        """The same for synchronous programs."""
        return SyncOutbox(Outbox(self._app, self._encoder, self.destinations, self.routes, self.source, here=True))

    # -- publishing ----------------------------------------------------------------------------------------------

    def publish(
        self,
        session: CallersSession,
        event: Event,
        *,
        key: str | None = None,
        subject: str | None = None,
        to: Sequence[str] | None = None,
        traceparent: str | None = None,
    ) -> str:
        """Publish an event if ``session``'s transaction commits; returns the event's id.

        A plain function, for asynchronous sessions too: nothing is written before the commit. Events of one ``key``
        (an aggregate's id, say) reach each destination in the order of the commits; without one they have no order.
        ``subject`` is CloudEvents' (what the event is about), ``to`` names destinations instead of the route.
        ``traceparent`` is by default the current span's.

        Raises `InvalidInput` (one of its kinds) for an event without a route, a value that fits no attribute, or a
        session that would commit it at once; then nothing will be written.
        """
        form = self._forms.of(event)
        parent, state = (traceparent, None) if traceparent is not None else trace.current()
        id_, data = str(uuid7()), data_of(event)
        text = form.envelope.text(
            id_, self._app.now(), data, subject=subject, key=key, traceparent=parent, tracestate=state
        )
        self._write(session, self._forms.ordered(self._names(event, form.route, to), text, key))
        return id_

    def _names(self, event: Event, route: tuple[str, ...] | None, to: Sequence[str] | None) -> tuple[str, ...]:
        if to is not None:
            return known(to, self.destinations, f"event {event.event_type!r}")
        if route is None:
            raise InvalidInput(
                f"event {event.event_type!r} has no route: say Resilient(routes={{{type(event).__name__}: [...]}}),"
                " or to=[...]"
            )
        return route

    def _write(self, target: Any, ordered: Sequence[Ordered]) -> None:
        """Into the caller's transaction: with its outermost commit, or at once where nobody tells of that."""
        session = target.sync_session if isinstance(target, AsyncSession) else target
        if isinstance(session, Session):
            bind = sessions.require_committable(session)
            if not isinstance(bind, Connection):
                joining.buffer(session, self._app.database.dialect, ordered, self._app.poke)
            elif session is target:
                joining.join(session, self._app.database.dialect, ordered, self._app.poke)
            else:
                raise InvalidInput(
                    "this AsyncSession sits on a connection whose transaction is not its own, so nobody tells of its"
                    " end: write await session.run_sync(app.outbox.publish, event)"
                )
        elif isinstance(target, Connection):
            joining.join(target, self._app.database.dialect, ordered, self._app.poke)
        elif (found := sessions.unscoped(target)) is not target:
            self._write(found, ordered)
        elif isinstance(target, AsyncConnection):
            raise InvalidInput(
                "publish takes a session: on an AsyncConnection write await"
                " connection.run_sync(app.outbox.publish, event)"
            )
        else:
            raise InvalidInput(f"publish takes a Session or AsyncSession, not {type(target).__name__}")

    # -- looking -------------------------------------------------------------------------------------------------

    async def list(
        self,
        *,
        type: str | Iterable[str] = (),  # noqa: A002 - the attribute's name
        destination: str | Iterable[str] | None = None,
        state: str | Iterable[str] = (),
        key: str | None = None,
        created_after: datetime | timedelta | None = None,
        created_before: datetime | timedelta | None = None,
        limit: int = 100,
        after: UUID | str | None = None,
        order: store.Order = "newest",
        session: CallersSession = None,
    ) -> builtins.list[EventInfo]:
        """A page of events, each at each of its destinations; the next one is ``after`` the last one's ``job_id``."""
        f = _filter(_words(destination), state=state, created_after=created_after, created_before=created_before)
        words: dict[str, Any] = {"types": _words(type) or (), "key": key, "limit": limit, "order": order}
        last = None if after is None else store.as_id(after)
        return [EventInfo.of(job) for job in await self._db.read(session, store.page, f, after=last, **words)]

    async def get(self, event_id: str, *, session: CallersSession = None) -> builtins.list[EventInfo]:
        """One event, at each of its destinations; replays of it too. By the event's id."""
        f = _filter(None)
        found = await self._db.read(session, store.page, f, event_id=event_id, order="oldest")
        return [EventInfo.of(job) for job in found]

    # -- replaying -----------------------------------------------------------------------------------------------

    async def replay(
        self,
        *,
        since: datetime | timedelta,
        until: datetime | timedelta | None = None,
        type: str | Iterable[str] = (),  # noqa: A002 - the attribute's name
        destination: str | Iterable[str] | None = None,
        key: str | None = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> Replayed:
        """Publish once more what was published from ``since`` on (a timedelta: that long ago), before ``until``.

        For what a broker lost after it had confirmed it, or a new consumer. Events keep their ids and numbers, so
        consumers with an inbox take only what they miss; they are next in their key's line, in the order of their
        numbers. What is dead was never published: retry it (`app.jobs.retry`).

        In batches, each in a transaction of its own. A dry run counts, up to 10,000. Raises `InvalidInput`, also for a
        destination that is not declared.
        """
        if limit is not None and limit < 1:
            raise InvalidInput(f"limit={limit}: replay at least 1 event, or give no limit")
        names = known(_words(destination) or tuple(self.destinations), self.destinations, "the replay")
        if not names:
            return Replayed()
        now = await self._db.read(None, _now)  # what is published meanwhile, the replayed ones too, is not replayed
        f = _filter(names, finished_after=since, finished_before=until or now).at(now)
        words: dict[str, Any] = {"types": _words(type) or (), "key": key}
        if dry_run:
            most = min(limit or _MOST, _MOST)
            where = await self._db.read(None, store.where_published, f, **words, limit=most + 1)
            return _replayed(Counter(where[:most]), more=len(where) > most)
        done, behind = Counter[str](), None
        while limit is None or done.total() < limit:
            size = _BATCH if limit is None else min(_BATCH, limit - done.total())
            words |= {"behind": behind, "limit": size}
            found = await self._db.write(None, self._replay, f, words)
            done.update(destination_of(job.resource_key) for job in found)
            if len(found) < size:
                break
            behind = found[-1].finished_at, found[-1].id
        return _replayed(done)

    def _replay(self, c: Connection, d: Dialect, f: JobFilter, words: dict[str, Any]) -> builtins.list[JobInfo]:
        found = store.published(c, d, f, **words)
        events = [(EventInfo.of(job), text) for job, text in found]
        again = [self._again(info, text) for info, text in events if info.id]
        write(c, d, [o for o in again if o.row.order_no is None])
        write_back(c, d, [o.row for o in again if o.row.order_no is not None])
        return [job for job, _ in found]

    def _again(self, info: EventInfo, text: str) -> Ordered:
        """The same event with the number it had: a number of its own would be missed among those of the new ones."""
        (ordered,) = self._forms.ordered([info.destination], _numbered(text, info), info.key, _REPLAY)
        return ordered._replace(row=ordered.row._replace(order_no=None if info.key is None else info.sequence))


def _numbered(text: str, info: EventInfo) -> str:
    return text if info.sequence is None or "sequence" in info.event else numbered(text, info.sequence)


def _replayed(counts: Counter[str], *, more: bool = False) -> Replayed:
    return Replayed(counts.total(), more=more, by_destination=dict(counts))


def _now(c: Connection, d: Dialect) -> datetime:
    return d.now(c)


class SyncOutbox(Face[Outbox]):
    """`Outbox` for synchronous programs: the same methods, without ``await``."""

    list = blocking(Outbox.list)
    get = blocking(Outbox.get)
    replay = blocking(Outbox.replay)

    def publish(
        self,
        session: CallersSession,
        event: Event,
        *,
        key: str | None = None,
        subject: str | None = None,
        to: Sequence[str] | None = None,
        traceparent: str | None = None,
    ) -> str:
        """See `Outbox.publish`: it is a plain function anyway."""
        return self._inner.publish(session, event, key=key, subject=subject, to=to, traceparent=traceparent)


def _filter(destinations: Sequence[str] | None, **criteria: Any) -> JobFilter:
    given: Any = {"resource": store.resources(destinations), **criteria}
    return JobFilter.of(given)


def _words(value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    return value if value is None else (value,) if isinstance(value, str) else tuple(value)
