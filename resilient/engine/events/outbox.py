"""`app.outbox`: events, written with the business rows they report and published afterwards. `app.sync.outbox`.

An `Event` is a pydantic model with a name of its own. The name is part of the contract with consumers: it is written
out and does not follow the class when that is renamed.

`publish` only checks and buffers: the session's outermost commit writes the event, one job for each destination
(`jobs/queue.py`). What is rolled back, a savepoint's part too, was never there. So an event is published if, and only
if, its transaction was committed: at least once, and in the order of the commits for each key.

`publish` runs inside business transactions. So what all events of one class, and all events of one destination, have in
common is computed once (`EventEncoder`); each event costs only the checks of its data, key, subject and size.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from resilient.core.base.errors import BadPayload, InvalidInput, SetupError
from resilient.core.base.misfit import explained_calls, is_whole
from resilient.core.base.tracing import current
from resilient.core.events.message import RESOURCE, Envelope, EventInfo, Replayed, numbered
from resilient.core.events.message import destination as destination_of
from resilient.engine.ground import sessions
from resilient.engine.ground.audited import audited
from resilient.engine.ground.encoder import JobRequest, checked_name, new_id, with_trace
from resilient.engine.ground.kinds import json_fault, mask_fault
from resilient.engine.ground.sessions import CallersSession, SyncFacade, Transactions, blocking
from resilient.engine.jobs import queue
from resilient.engine.jobs.queue import write, write_back
from resilient.store import events as store
from resilient.store.jobs.filters import JobFilter

if TYPE_CHECKING:
    import builtins
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime, timedelta
    from uuid import UUID

    from resilient.core.jobs.records import JobInfo
    from resilient.engine.ground.encoder import Encoder
    from resilient.engine.ground.ground import Ground
    from resilient.engine.ground.kinds import Kind
    from resilient.store.db.dialect import Dialect
    from resilient.store.jobs.columns import NewJob
    from resilient.wire.publishers.base import Destination


PREFIX: Final = "outbox."  # of the kinds of jobs that events are
DEFAULT_SOURCE: Final = "/resilient"
_PLACEHOLDER_KEY: Final = "a key"
_MOST: Final = 10_000  # events that a dry run counts
_BATCH: Final = 500  # events in one transaction of a replay
_REPLAY: Final = '{"replay":"true"}'
_TYPE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,199}")


class Event(BaseModel):
    """Base of a program's events.

        class OrderPlaced(Event, type="order.placed"):
            order_id: int

    ``type`` is what consumers see; ``version`` is raised when the shape changes in a way they must know.
    A class without a type is a base for others and cannot be published. Raises `SetupError` for a bad type.
    """

    event_type: ClassVar[str] = ""
    event_version: ClassVar[int] = 1

    def __init_subclass__(cls, *, type: str = "", version: int = 1, **kwargs: Any) -> None:  # noqa: A002 - CloudEvents' word
        super().__init_subclass__(**kwargs)
        if type and not _TYPE.fullmatch(type):
            raise SetupError(f"{type!r} is not a type of events: use letters, digits and ._:+-, such as 'order.placed'")
        if not is_whole(version):
            raise SetupError(f"version of event {type!r} must be a whole number from 1 up, not {version!r}")
        cls.event_type, cls.event_version = type, version


def data_of(event: Event) -> str:
    """An event's data as JSON text; raises `BadPayload` if a value is not of its field's type."""
    try:
        text = event.model_dump_json(by_alias=True, warnings="error")
    except (PydanticSerializationError, ValueError) as error:
        raise BadPayload(f"event {type(event).event_type!r} is not what its fields say: {error}") from None
    plain = partial(event.model_dump, by_alias=True)
    if (problem := json_fault(text, plain) or mask_fault(text, plain)) is not None:
        raise BadPayload(f"event {type(event).event_type!r} is not JSON: {problem}")
    return text


class _EventClass(NamedTuple):
    """What all events of one class have in common: their envelope, and their destinations (None: no route)."""

    envelope: Envelope
    route: tuple[str, ...] | None


class _JobTemplate(NamedTuple):
    """What all jobs for one destination have in common: ``in_order`` is for events with an ordering key."""

    kind: Kind[str]
    plain: NewJob
    in_order: NewJob


class EventEncoder:
    """Encodes the events of one app as jobs. ``routes`` are checked already."""

    def __init__(
        self,
        encoder: Encoder,
        destinations: Mapping[str, Destination],
        routes: Mapping[type[Event], tuple[str, ...]],
        source: str,
    ) -> None:
        self._encoder, self._destinations, self._routes, self._source = encoder, destinations, routes, source
        self._classes: dict[type[Event], _EventClass] = {}
        self._templates: dict[str, _JobTemplate] = {}

    def class_of(self, event: Event) -> _EventClass:
        """The class of an event; raises `InvalidInput` for what is no event, or has no type."""
        kind = type(event)
        if (class_ := self._classes.get(kind)) is None:
            if not isinstance(event, Event) or not kind.event_type:
                raise InvalidInput(f"{kind.__name__} is no event: write `class {kind.__name__}(Event, type='...')`")
            routed = (self._routes[one] for one in kind.__mro__ if one in self._routes)
            envelope = Envelope(kind.event_type, kind.event_version, self._source)
            class_ = self._classes[kind] = _EventClass(envelope, next(routed, None))
        return class_

    def jobs(self, names: Sequence[str], text: str, key: str | None, tags: str | None = None) -> list[JobRequest]:
        """A job of one event for each destination. Raises `InvalidInput` for a bad key, `PayloadTooLarge`."""
        jobs = []
        if key is not None:
            checked_name("ordering_key", key)
        for name in names:
            kind, plain, in_order = self._templates.get(name) or self._template(name)
            self._encoder.text(kind, text)  # raises for its size
            if key is None:
                row = plain._replace(id=new_id(), payload=text, tags=tags)
            else:
                row = in_order._replace(id=new_id(), payload=text, ordering_key=key, tags=tags)
            jobs.append(JobRequest(row))
        return jobs

    def _template(self, name: str) -> _JobTemplate:
        kind, policy = self._encoder.kind_of(PREFIX + name), self._destinations[name].when_dead
        row = self._encoder.encode(
            kind, "", f"{RESOURCE}/{name}", ordering_key=_PLACEHOLDER_KEY, ordering_policy=policy
        ).row
        plain = row._replace(ordering_key=None, ordering_policy=None)
        template = self._templates[name] = _JobTemplate(kind, plain, row)
        return template


def checked_routes(
    routes: Mapping[type[Event], Sequence[str]] | None, destinations: Mapping[str, Destination]
) -> dict[type[Event], tuple[str, ...]]:
    """The destinations of each class of events. Raises `SetupError`."""
    by_class: dict[type[Event], tuple[str, ...]] = {}
    for kind, names in (routes or {}).items():
        if not (isinstance(kind, type) and issubclass(kind, Event)):
            raise SetupError(f"routes= maps classes of events to destinations, and {kind!r} is no Event")
        try:
            by_class[kind] = check_destinations(names, destinations, f"the route of {kind.__name__}")
        except InvalidInput as error:
            raise SetupError(str(error)) from None
    return by_class


def check_destinations(names: Sequence[str], destinations: Mapping[str, Destination], whose: str) -> tuple[str, ...]:
    """The names of destinations, each once. Raises `InvalidInput` for one that is not declared."""
    unique = (names,) if isinstance(names, str) else tuple(dict.fromkeys(names))
    if missing := [name for name in unique if name not in destinations]:
        declared = ", ".join(sorted(destinations)) or "none"
        raise InvalidInput(f"{whose} names destination {missing[0]!r}, which is not declared; known are: {declared}")
    return unique


@explained_calls("app.outbox")
class Outbox:
    """The outbox of one app.

    ``routes`` says where the events of a class (and of those derived from it) go; an empty route: nowhere.
    """

    def __init__(
        self,
        ground: Ground,
        destinations: Mapping[str, Destination],
        routes: Mapping[type[Event], Sequence[str]] | None,
        source: str = DEFAULT_SOURCE,
        *,
        here: bool = False,
    ) -> None:
        self._ground, self._db = ground, Transactions(ground, here=here)
        self.destinations, self.source = destinations, source
        self.routes = checked_routes(routes, destinations)
        self._encoder = EventEncoder(ground.encoder, destinations, self.routes, source)

    @property
    def sync(self) -> SyncOutbox:
        """The same for synchronous programs."""
        return SyncOutbox(Outbox(self._ground, self.destinations, self.routes, self.source, here=True))

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

        Raises `InvalidInput` (one of its kinds) for an event without a route, an empty ``to``, a value that fits no
        attribute, or a session that would commit it at once; then nothing will be written.
        """
        class_ = self._encoder.class_of(event)
        names, tracing = self._names(event, class_.route, to), self._ground.tracing
        id_, data = str(new_id()), data_of(event)
        with tracing.create(event.event_type) as span:
            if span is not None:
                span.note({"messaging.message.id": id_})
            parent, state = (traceparent, None) if traceparent is not None else current()
            text = class_.envelope.text(
                id_, self._ground.now(), data, subject=subject, key=key, traceparent=parent, tracestate=state
            )
            self._write(session, with_trace(self._encoder.jobs(names, text, key), tracing))
        return id_

    def _names(self, event: Event, route: tuple[str, ...] | None, to: Sequence[str] | None) -> tuple[str, ...]:
        if to is not None:
            if not (names := check_destinations(to, self.destinations, f"event {event.event_type!r}")):
                raise InvalidInput(
                    f"to=[]: event {event.event_type!r} would be published nowhere; name a destination, leave to= out"
                    " for its route, or do not publish it"
                )
            return names
        if route is None:
            raise InvalidInput(
                f"event {event.event_type!r} has no route: say Resilient(routes={{{type(event).__name__}: [...]}}),"
                " or to=[...]"
            )
        return route

    def _write(self, target: Any, requests: Sequence[JobRequest]) -> None:
        """Write in the caller's transaction: with its outermost commit, or at once where no event announces that."""
        session = target.sync_session if isinstance(target, AsyncSession) else target
        if isinstance(session, Session):
            bind = sessions.require_committable(session)
            if not isinstance(bind, Connection):
                queue.buffer(session, self._ground.database.dialect, requests, self._ground.poke)
            elif session is target:
                queue.join(session, self._ground.database.dialect, requests, self._ground.poke)
            else:
                raise InvalidInput(
                    "this AsyncSession sits on a connection whose transaction is not its own, so nobody tells of its"
                    " end: write await session.run_sync(app.outbox.publish, event)"
                )
        elif isinstance(target, Connection):
            queue.join(target, self._ground.database.dialect, requests, self._ground.poke)
        elif (inner := sessions.unscoped(target)) is not target:
            self._write(inner, requests)
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
        """A page of events, one line for each destination; the next page is ``after`` the last line's ``job_id``."""
        f = _filter(
            _destination_names(destination), state=state, created_after=created_after, created_before=created_before
        )
        options: dict[str, Any] = {"types": _as_tuple(type) or (), "key": key, "limit": limit, "order": order}
        last = None if after is None else store.as_id(after)
        return [EventInfo.of(job) for job in await self._db.read(session, store.page, f, after=last, **options)]

    async def get(self, event_id: str, *, session: CallersSession = None) -> builtins.list[EventInfo]:
        """The event of this id at each of its destinations, its replays too."""
        f = _filter(None)
        jobs = await self._db.read(session, store.page, f, event_id=event_id, order="oldest")
        return [EventInfo.of(job) for job in jobs]

    # -- replaying -----------------------------------------------------------------------------------------------

    @audited("outbox replay")
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
        names = check_destinations(
            _destination_names(destination) or tuple(self.destinations), self.destinations, "the replay"
        )
        if not names:
            return Replayed()
        now = await self._db.read(None, _now)  # the replay leaves out what is published from now on, its own events too
        f = _filter(names, finished_after=since, finished_before=until or now).at(now)
        criteria: dict[str, Any] = {"types": _as_tuple(type) or (), "key": key}
        if dry_run:
            most = min(limit or _MOST, _MOST)
            destinations = await self._db.read(None, store.where_published, f, **criteria, limit=most + 1)
            return _replay_result(Counter(destinations[:most]), more=len(destinations) > most)
        done, behind = Counter[str](), None
        while limit is None or done.total() < limit:
            size = _BATCH if limit is None else min(_BATCH, limit - done.total())
            criteria |= {"behind": behind, "limit": size}
            batch = await self._db.write(None, self._replay, f, criteria)
            done.update(destination_of(job.resource_key) for job in batch)
            if len(batch) < size:
                break
            behind = batch[-1].finished_at, batch[-1].id
        return _replay_result(done)

    def _replay(self, c: Connection, d: Dialect, f: JobFilter, criteria: dict[str, Any]) -> builtins.list[JobInfo]:
        rows = store.published(c, d, f, **criteria)
        events = [(EventInfo.of(job), text) for job, text in rows]
        requests = [self._replay_request(info, text) for info, text in events]
        write(c, d, [request for request in requests if request.row.order_no is None])
        write_back(c, d, [request.row for request in requests if request.row.order_no is not None])
        return [job for job, _ in rows]

    def _replay_request(self, info: EventInfo, text: str) -> JobRequest:
        """The same event with the number it had: with a new number, consumers would miss one among the new events."""
        (request,) = self._encoder.jobs([info.destination], _numbered(text, info), info.key, _REPLAY)
        return request._replace(row=request.row._replace(order_no=None if info.key is None else info.sequence))


def _numbered(text: str, info: EventInfo) -> str:
    return text if info.sequence is None or "sequence" in info.event else numbered(text, info.sequence)


def _replay_result(counts: Counter[str], *, more: bool = False) -> Replayed:
    return Replayed(counts.total(), more=more, by_destination=dict(counts))


def _now(c: Connection, d: Dialect) -> datetime:
    return d.now(c)


class SyncOutbox(SyncFacade[Outbox]):
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


def _filter(destinations: Sequence[str] | None, **filters: Any) -> JobFilter:
    merged: Any = {"resource": store.resources(destinations), **filters}
    return JobFilter.of(merged)


def _destination_names(destination: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """The names of destinations; None: all. Raises `InvalidInput` for an empty list: it would stand for all, too."""
    if (names := _as_tuple(destination)) == ():
        raise InvalidInput("destination=[] names none: give a destination's name, or leave it out for all of them")
    return names


def _as_tuple(value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    return value if value is None else (value,) if isinstance(value, str) else tuple(value)
