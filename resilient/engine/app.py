"""The app: the one place that wires.

`Resilient` holds what a program declares (handlers, providers, policies, schedules) and the database; everything else
is reached through it. It starts nothing by itself: `worker()` makes the process that runs jobs.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from resilient.core.errors import SetupError
from resilient.core.misfit import explained
from resilient.core.policy import BreakerPolicy, Policies
from resilient.engine import joining, writing
from resilient.engine import retention as retention_
from resilient.engine.alerts import Alerts
from resilient.engine.connections import Connections
from resilient.engine.defaults import DEFAULT_CONCURRENCY, GRACE, LEASE, STUCK_PATIENCE
from resilient.engine.enqueue import Encoder, Enqueued, checked_name
from resilient.engine.foresight import Foresight
from resilient.engine.grants import Grants
from resilient.engine.handler import Handler, Kind, by_kind
from resilient.engine.inbox import Inbox
from resilient.engine.jobs_api import Jobs
from resilient.engine.outbox import DEFAULT_SOURCE, Outbox
from resilient.engine.providers import caps_of, limits_of, registry, tenancies_of
from resilient.engine.relay import named, relays
from resilient.engine.resources_api import Resources
from resilient.engine.schedules import Schedules
from resilient.engine.session_engines import SessionEngines
from resilient.engine.steps import SyncWorkflow, Workflow
from resilient.engine.streams_api import Streams
from resilient.engine.sync_side import SyncApp
from resilient.engine.webhooks import Webhooks
from resilient.engine.workflows import Workflows
from resilient.store import pool
from resilient.store import schema as schemas
from resilient.store.address import for_listening
from resilient.store.database import Database
from resilient.store.secrets import from_environment
from resilient.store.wake import Waker

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from sqlalchemy import URL, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from resilient.core.admission import ResourceFacts
    from resilient.core.alerts import Alerting, Sink
    from resilient.core.limit import Limit
    from resilient.core.message import Message
    from resilient.core.provider import Provider
    from resilient.core.retention import Pruned, Retention, Span
    from resilient.engine.access import Access, CredentialStore, SyncCredentialStore
    from resilient.engine.event import Event
    from resilient.engine.schedule import Schedule
    from resilient.engine.sessions import CallersSession
    from resilient.engine.webhooks import Inbound
    from resilient.engine.worker import Worker
    from resilient.store.circuits import Change
    from resilient.wire.publishers.base import Destination

log = logging.getLogger("resilient.app")
MAX_PAYLOAD: Final = 256 * 1024


class Resilient:
    """A program's jobs, resources and the database they live in.

    ``database`` is an address (``sqlite:///app.db``, ``postgresql://...``) or the program's own Engine or AsyncEngine.
    ``limits``, ``concurrency`` and ``breakers`` are by resource pattern (``{"github/*": [Limit(5000, per="1h")]}``) and
    can be overridden per resource at runtime. ``schema`` puts the tables into a PostgreSQL schema. ``listen_url`` is a
    direct connection for LISTEN/NOTIFY where the pool cannot (PgBouncer). ``connections``: to PostgreSQL, the most
    this process has; an engine that is handed over has its own pool. ``generic_plans=False``: PostgreSQL chooses its
    plans itself, which Citus needs (it cannot plan without values). ``max_payload`` is in bytes. ``deps`` is anything
    the handlers need, as ``job.deps``. ``upgrade`` makes or updates the tables when the app is first used; by
    default on SQLite only (on PostgreSQL run ``resilient db upgrade`` with the deployment). ``clock`` is for tests: the
    only time there is then (see ``resilient.testing.FakeClock``). ``session_factory`` makes the sessions that
    handlers write with: AsyncSessions for ``async def`` handlers, Sessions for plain ones, on this same database.
    ``destinations`` names where events are published to, ``routes`` which events go there; ``event_source`` is their
    CloudEvents ``source``.
    ``secrets`` are the keys that credentials are stored under, the current one first (default:
    ``RESILIENT_SECRETS``; ``resilient secrets new`` makes one). ``credentials`` is the app's own table of tokens,
    instead of ours. ``on_needs_reauth``: the kind of job, with a `NeedsReauth` as its payload, that is enqueued when an
    account's customer has to connect it again, in the transaction that marks it. ``webhooks``: what providers may call.

    Raises `SetupError` for anything that cannot work, before any connection is opened.
    """

    @partial(explained, name="Resilient", error=SetupError)
    def __init__(
        self,
        database: str | URL | Engine | AsyncEngine | Database,
        *,
        handlers: Iterable[Handler[Any, Any]] = (),
        kinds: Iterable[Kind[Any]] = (),
        providers: Iterable[Provider] = (),
        schedules: Iterable[Schedule] = (),
        limits: Mapping[str, Sequence[Limit]] | None = None,
        concurrency: Mapping[str, int] | None = None,
        breakers: Mapping[str, BreakerPolicy] | None = None,
        schema: str | None = None,
        listen_url: str | None = None,
        connections: int = pool.DEFAULT,
        generic_plans: bool = True,
        max_payload: int = MAX_PAYLOAD,
        deps: Any = None,
        upgrade: bool | None = None,
        clock: Callable[[], datetime] | None = None,
        alerts: Alerting | Sink | Iterable[Sink] | None = None,
        retention: Retention | None = None,
        session_factory: Callable[[], Any] | None = None,
        secrets: Sequence[str] | None = None,
        credentials: CredentialStore | SyncCredentialStore | None = None,
        destinations: Mapping[str, Destination | Callable[[Message], Awaitable[Any]]] | None = None,
        routes: Mapping[type[Event], Sequence[str]] | None = None,
        event_source: str = DEFAULT_SOURCE,
        on_needs_reauth: Kind[Any] | None = None,
        webhooks: Iterable[Inbound] = (),
    ) -> None:
        self.database = (
            database
            if isinstance(database, Database)
            else _opened(database, schema=schema, clock=clock, connections=connections, generic_plans=generic_plans)
        )
        to = named(destinations)
        self.kinds: Mapping[str, Handler[Any, Any]] = by_kind([*handlers, *relays(to)])
        self.declared: Mapping[str, Kind[Any]] = {**{k.kind: k for k in kinds}, **self.kinds}
        self.providers = registry(providers)
        known = self.providers.values()
        self.policies = Policies(
            {**limits_of(known), **(limits or {})}, {**caps_of(known), **(concurrency or {})}, breakers,
            tenancies_of(known),
        )  # fmt: skip
        self.deps = deps
        self.session_factory = session_factory
        self.session_engines = SessionEngines(self.database)
        self.listen_url = None if listen_url is None else for_listening(listen_url)
        self.jobs = Jobs(self)
        self.resources = Resources(self)
        self.workflows = Workflows(self)
        self.streams = Streams(self)
        self.inbox = Inbox(self)
        self.grants = Grants(self, from_environment() if secrets is None else secrets, credentials, on_needs_reauth)
        self.connections = Connections(self)
        self.webhooks = Webhooks(self, webhooks)
        self.local_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        joining.listen()
        self._encoder = Encoder(self.declared, max_payload)
        self.foresight = Foresight(self.kinds, self.declared, self.providers)
        self.outbox = Outbox(self, self._encoder, to, routes, event_source)
        self.schedules = Schedules(self, schedules)
        self.alerts = Alerts(self, alerts)
        self.retention, self.pruned_to = retention_.checked(retention), dict[str, Any]()
        self.sync = SyncApp(self)
        self._waker = Waker(self.database, listen_url=self.listen_url)
        self._upgrade = self.database.is_sqlite if upgrade is None else upgrade
        self._ready = False

    # -- life -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Check the database; see `ready`. What was opened for that is closed if it is not ready."""
        try:
            await self.ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Close what was opened here."""
        await self.close()

    @asynccontextmanager
    async def lifespan(self, _server: Any = None) -> AsyncIterator[None]:
        """For web frameworks: ``Starlette(lifespan=app.lifespan)``, ``FastAPI(lifespan=app.lifespan)``.

        It brings nothing, because frameworks take what a lifespan brings for the state of their requests.
        """
        async with self:
            yield

    async def ready(self) -> None:
        """See that the tables fit this code.

        Raises `DatabaseUnreachable`, `SchemaOutdated` or `SchemaTooNew`, each with its remedy.
        """
        if not self._ready:
            await (schemas.upgrade if self._upgrade else schemas.check)(self.database)
            self._ready = True

    def ready_sync(self) -> None:
        """`ready` for synchronous programs."""
        if not self._ready:
            (schemas.upgrade_sync if self._upgrade else schemas.check_sync)(self.database)
            self._ready = True

    async def close(self) -> None:
        """Close connections and threads opened here; an engine that was handed in stays open.

        An app that is used again, such as by the next test's ``lifespan``, opens new ones.
        """
        await self.grants.close()
        await asyncio.to_thread(self.sync.close)
        await self.alerts.close()
        self._waker.close()
        await self.session_engines.close()
        await self.database.close()
        self._ready = False  # in memory the tables are gone too

    @explained
    async def credentials(self, key: str) -> Access:
        """What requests of an account carry, refreshed if need be: for code that sends them without a job.

        Raises `ConnectionNotFound`, or `ResourceStopped` while there is no usable token.
        """
        await self.ready()
        return await self.grants.required(key)

    def now(self) -> datetime:
        """The host's clock (or the test clock). Decisions about jobs use the database's."""
        return self.database.dialect.host_now() or datetime.now(UTC)

    # -- enqueueing -----------------------------------------------------------------------------------------------

    @explained
    async def enqueue(
        self,
        kind: Kind[Any] | str,
        payload: Any = None,
        *,
        resource_key: str,
        session: Any = None,
        **options: Any,
    ) -> Enqueued:
        """Enqueue one job; with ``session`` it exists only if that transaction commits.

        Options: ``priority`` (-100 to 100), ``delay`` (seconds or timedelta) or ``run_at`` (aware datetime),
        ``expires_at`` or ``expires_in``, ``max_attempts``, ``unique_key`` with ``unique_until`` ("start" or "finish"),
        ``on_conflict`` ("keep", "replace", "raise") and ``while_running`` ("drop", "once_more"), ``idempotency_key``,
        ``ordering_key`` (jobs of one resource and ordering key run one after the other, in the order of their commits)
        with ``ordering_policy`` (dead, it may "block" those behind it or "skip"), ``after`` (jobs, or
        their ids, that must succeed before it runs) with ``on_dead`` (what becomes of it if one of them dies or is
        cancelled: "cancel", "wait", "run"), ``tags``.

        Raises `InvalidInput` (one of its kinds) or `DuplicateJob`, and then nothing was written.
        """
        ordered = [self._encoder.encode(kind, payload, resource_key, **options)]
        self.foresight.look(ordered)
        if session is not None:
            return (await joining.join_async(session, self.database.dialect, ordered, self.poke))[0]
        await self.ready()
        run = self.database.statement if writing.is_one_statement(ordered[0]) else self.database.transaction
        (done,) = await run(writing.write, ordered)
        self.poke()
        return done

    @explained
    def enqueue_sync(
        self,
        kind: Kind[Any] | str,
        payload: Any = None,
        *,
        resource_key: str,
        session: Any = None,
        **options: Any,
    ) -> Enqueued:
        """`enqueue` for synchronous programs."""
        ordered = [self._encoder.encode(kind, payload, resource_key, **options)]
        self.foresight.look(ordered)
        if session is not None:
            return joining.join(session, self.database.dialect, ordered, self.poke)[0]
        self.ready_sync()
        plain = writing.is_one_statement(ordered[0])
        run = self.database.statement_sync if plain else self.database.transaction_sync
        (done,) = run(writing.write, ordered)
        self.poke()
        return done

    @explained
    async def enqueue_many(
        self,
        kind: Kind[Any] | str,
        payloads: Iterable[Any],
        *,
        resource_key: str | None = None,
        session: Any = None,
        **options: Any,
    ) -> list[Enqueued]:
        """Enqueue many jobs of one kind in one transaction: payloads, or `Item` objects where more differs."""
        ordered = self._encoder.encode_many(kind, payloads, resource_key, options)
        self.foresight.look(ordered)
        if session is not None:
            return await joining.join_async(session, self.database.dialect, ordered, self.poke)
        await self.ready()
        done = await self.database.transaction(writing.write_many, ordered)
        self.poke()
        return done

    @explained
    def enqueue_many_sync(
        self,
        kind: Kind[Any] | str,
        payloads: Iterable[Any],
        *,
        resource_key: str | None = None,
        session: Any = None,
        **options: Any,
    ) -> list[Enqueued]:
        """`enqueue_many` for synchronous programs."""
        ordered = self._encoder.encode_many(kind, payloads, resource_key, options)
        self.foresight.look(ordered)
        if session is not None:
            return joining.join(session, self.database.dialect, ordered, self.poke)
        self.ready_sync()
        done = self.database.transaction_sync(writing.write_many, ordered)
        self.poke()
        return done

    def poke(self, is_open: Callable[[], bool] | None = None) -> None:
        """There may be work: tell the workers of this process and of others.

        ``is_open`` says whether the transaction that brings it is still being committed: they are told once it is not.
        """
        if is_open is not None and not self.database.is_sqlite:
            self._waker.call_after(is_open, self.poke)
            return
        for worker in list(self.local_workers):
            worker.wake()
        self._waker.poke()

    # -- running --------------------------------------------------------------------------------------------------

    @explained
    def worker(
        self,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        kinds: Sequence[str] | None = None,
        lease: float = LEASE,
        grace: float = GRACE,
        patience: float = STUCK_PATIENCE,
        rng: random.Random | None = None,
    ) -> Worker:
        """A worker of this process: ``await app.worker().run()``.

        ``concurrency`` jobs run at once; ``lease`` is how many seconds a vanished worker's jobs wait for others;
        ``grace`` how many seconds running jobs get when the worker stops; ``patience`` for how many seconds after its
        timeout a handler that does not end keeps its job, before the job goes on without it. Raises `SetupError`.
        """
        from resilient.engine.worker import Worker  # noqa: PLC0415 - half of the engine: a program that only enqueues has none

        return Worker(self, concurrency=concurrency, kinds=kinds, lease=lease, grace=grace, patience=patience, rng=rng)

    async def tick_schedules(self) -> None:
        """Enqueue what is due by the schedules."""
        await self.schedules.step()

    async def keep_house(self) -> None:
        """The app's own chores, by whichever worker was elected."""
        await self.alerts.keep_house()
        await retention_.keep(self)
        await self.grants.fuse.keep_house()
        await self.grants.keep_house()

    @explained
    async def prune(
        self,
        *,
        older_than: Span | None = None,
        state: str | Iterable[str] | None = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> Pruned:
        """Delete what is over: by default everything the app's `Retention` keeps no longer.

        ``older_than`` (a span such as ``"7d"``) and ``state`` mean finished jobs alone: those older, in those states.
        ``limit`` bounds how many jobs go. A dry run only counts, up to 100,000 of each sort. Raises `InvalidInput`.
        """
        walk = retention_.walk_of(self.retention, older_than=older_than, state=state, limit=limit, dry_run=dry_run)
        await self.ready()
        return await retention_.walk(self, walk)

    @explained
    def prune_sync(
        self,
        *,
        older_than: Span | None = None,
        state: str | Iterable[str] | None = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> Pruned:
        """`prune` for synchronous programs."""
        walk = retention_.walk_of(self.retention, older_than=older_than, state=state, limit=limit, dry_run=dry_run)
        self.ready_sync()
        return retention_.walk_sync(self, walk)

    def circuit_changed(self, change: Change) -> None:
        """A circuit opened or closed."""
        self.alerts.circuit(change)
        self._waker.tell(change.after.key)

    def cooled_down(self, facts: ResourceFacts) -> None:
        """A resource rests: workers of other processes look at it again before they send."""
        self._waker.tell(facts.key)

    def noticed(self, execution: Any, transition: Any) -> None:
        """A job ended other than well."""
        self.alerts.noticed(execution, transition)

    # -- workflows ------------------------------------------------------------------------------------------------

    def workflow(self, name: str, *, session: CallersSession = None, resource_key: str | None = None) -> Workflow:
        """``async with app.workflow("order") as wf:`` its steps are written when the block ends without an error.

        With ``session`` they exist only if that transaction commits. ``resource_key`` is for steps that name none.
        """
        return Workflow(self, checked_name("the name of a workflow", name), session, resource_key, None)

    def workflow_sync(
        self, name: str, *, session: CallersSession = None, resource_key: str | None = None
    ) -> SyncWorkflow:
        """`workflow` for synchronous programs: ``with app.sync.workflow("order") as wf:``."""
        return SyncWorkflow(self, checked_name("the name of a workflow", name), session, resource_key, None)


def _opened(target: Any, *, connections: int, **options: Any) -> Database:
    if connections < pool.LEAST:
        raise SetupError(f"connections={connections}: a process needs at least {pool.LEAST}")
    return Database(target, connections=connections, **options)
