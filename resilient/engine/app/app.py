"""The app: the one place that wires.

`Resilient` holds what a program declares (handlers, providers, policies, schedules) and the database; everything else
is reached through it. It starts nothing by itself: `worker()` makes the process that runs jobs.
"""

from __future__ import annotations

import weakref
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, overload

from resilient.core.base.errors import SetupError
from resilient.core.base.frames import frameless
from resilient.core.base.loggers import logger
from resilient.core.base.misfit import explained, is_whole
from resilient.core.base.tracing import Tracing
from resilient.core.gates.policy import BreakerPolicy, Policies
from resilient.engine import alerts as alerts_
from resilient.engine.accounts.connections import Connections
from resilient.engine.accounts.grants import Grants
from resilient.engine.accounts.whoami import RequestTests
from resilient.engine.alerts import Alerts
from resilient.engine.app.sync_side import Credentials, SyncSide
from resilient.engine.events.inbox import Inbox
from resilient.engine.events.outbox import DEFAULT_SOURCE, Outbox
from resilient.engine.events.webhooks import Webhooks
from resilient.engine.gates.api import Resources, TestSenders
from resilient.engine.ground import audited
from resilient.engine.ground.chores import do_all
from resilient.engine.ground.counts import Counts
from resilient.engine.ground.encoder import Encoder, Enqueued, Foresight, checked_name
from resilient.engine.ground.garbage import no_collections
from resilient.engine.ground.ground import DEFAULT_CONCURRENCY, GRACE, LEASE, STUCK_PATIENCE, Ground, Tables
from resilient.engine.ground.kinds import Handler, Kind, by_kind
from resilient.engine.ground.providers import caps_of, http_by_name, limits_of, registry, tenancies_of, warn_of_roots
from resilient.engine.ground.sessions import SessionEngines, Transactions, to_the_end
from resilient.engine.inspect import retention as retention_
from resilient.engine.inspect.audit import Audit
from resilient.engine.inspect.erasure import Accounts
from resilient.engine.jobs import queue
from resilient.engine.jobs.api import Jobs
from resilient.engine.jobs.queue import Queue
from resilient.engine.jobs.workflows import SyncWorkflow, Workflow, Workflows
from resilient.engine.run.relay import by_name, default_caps, make_relays
from resilient.engine.schedules.schedules import Schedules
from resilient.engine.sync import Streams
from resilient.store.accounts.secrets import KeyRing, from_environment
from resilient.store.db import pool
from resilient.store.db.address import for_listening
from resilient.store.db.database import Database
from resilient.store.db.wake import Waker

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from datetime import datetime
    from types import TracebackType
    from typing import Self, Unpack

    from sqlalchemy import URL, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from resilient.core.alerts.rules import Alerting, Sink
    from resilient.core.events.message import Message
    from resilient.core.gates.rate_limit import Limit
    from resilient.core.inspect.retention import Pruned, Retention, Span
    from resilient.core.provider.facts import Provider
    from resilient.engine.accounts.access import Access, CredentialStore, SyncCredentialStore
    from resilient.engine.events.outbox import Event
    from resilient.engine.events.webhooks import Inbound
    from resilient.engine.ground.chores import Chore
    from resilient.engine.ground.encoder import Item, JobOptions
    from resilient.engine.ground.sessions import CallersSession
    from resilient.engine.run.worker import Worker
    from resilient.engine.schedules.declaration import Schedule
    from resilient.wire.publishers.base import Destination
    from resilient.wire.requests.pool import PoolSettings


log = logger("app")
P = TypeVar("P")
MAX_PAYLOAD: Final = 256 * 1024
_MOST_CONNECTIONS: Final = 10_000


class Resilient:
    """A program's jobs, resources and the database they live in.

    ``database`` is an address (``sqlite:///app.db``, ``postgresql://...``) or the program's own Engine or AsyncEngine.
    ``limits``, ``concurrency`` and ``breakers`` are by resource pattern (``{"github/*": [Limit(5000, per="1h")]}``)
    and can be overridden per resource at runtime. Throttles teach a limit where none is declared: ``learn``, by
    pattern too, is False, requests a second at least and at most, ``"concurrency"``, ``"rate"`` or ``"latency"``.
    ``pace={"crm/*": "even"}`` spreads what a provider says is left of a window, ``reserve={"crm/*": {5: 0.2}}`` keeps
    a part of it for jobs of that priority and above. ``schema`` puts the tables into a PostgreSQL schema.
    ``listen_url`` is a direct connection for LISTEN/NOTIFY where the pool cannot (PgBouncer). ``connections``: to
    PostgreSQL, the most this process has; an engine that is handed over has its own pool. ``generic_plans=False``:
    PostgreSQL chooses its plans itself, which Citus needs (it cannot plan without values). ``max_payload`` is in
    bytes. ``deps`` is anything the handlers need, as ``job.deps``. ``upgrade`` makes or updates the tables when the
    app is first used; by default on SQLite only (on PostgreSQL run ``resilient db upgrade`` with the deployment).
    ``clock`` is for tests: the only time there is then (see ``resilient.testing.FakeClock``). ``session_factory``
    makes the sessions that handlers write with: AsyncSessions for ``async def`` handlers, Sessions for plain ones, on
    this same database.
    ``destinations`` names where events are published to, ``routes`` which events go there; ``event_source`` is their
    CloudEvents ``source``.
    ``secrets`` are the keys that credentials and sealed payloads are stored under, the current one first (default:
    ``RESILIENT_SECRETS``; ``resilient secrets new`` makes one). ``credentials`` is the app's own table of tokens,
    instead of ours. ``on_needs_reauth``: the kind of job, with a `NeedsReauth` as its payload, that is enqueued when an
    account's customer has to connect it again, in the transaction that marks it. ``webhooks``: what providers may call.
    ``tracing``: where spans go, and what they may say; by default to the program's global OpenTelemetry provider.
    ``http``: proxy, certificates and bounds of requests (`PoolSettings`), for all or by provider (``"*"``: all others).

    Raises `SetupError` for anything that cannot work, before any connection is opened.
    """

    @frameless
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
        learn: Mapping[str, bool | tuple[float, float] | str] | None = None,
        pace: Mapping[str, Literal["even"]] | None = None,
        reserve: Mapping[str, Mapping[int, float]] | None = None,
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
        tracing: Tracing | None = None,
        http: Mapping[str, PoolSettings] | PoolSettings | None = None,
    ) -> None:
        self.database = _opened(database, connections, schema=schema, clock=clock, generic_plans=generic_plans)
        to = by_name(destinations)
        self.kinds: Mapping[str, Handler[Any, Any]] = by_kind([*handlers, *make_relays(to)])
        self.declared: Mapping[str, Kind[Any]] = {**{k.kind: k for k in kinds}, **self.kinds}
        self.providers = registry(providers)
        self.policies = _policies(
            self.providers.values(), to, limits, concurrency, breakers=breakers, learn=learn, pace=pace, reserve=reserve
        )
        self.deps = deps
        self.session_engines = SessionEngines(self.database, session_factory)
        self.listen_url = None if listen_url is None else for_listening(listen_url)
        queue.listen()
        alerting, ring = alerts_.checked(alerts), KeyRing(from_environment() if secrets is None else secrets)
        self.ground = ground = self._make_ground(
            max_payload, ring, tracing or Tracing(), http, upgrade=upgrade, has_handlers=len(self.kinds) > len(to)
        )
        self._queue, self._plain_queue = Queue(ground), Queue(ground, here=True)
        self.jobs = Jobs(ground, self.listen_url)
        self.workflows, self.streams = Workflows(ground), Streams(ground)
        self.audit, self.inbox = Audit(ground), Inbox(ground)
        self.outbox = Outbox(ground, to, routes, event_source)
        self.schedules = Schedules(ground, schedules, own_table=credentials is not None)

        def credentials_on(ground: Ground) -> Credentials:
            collector = Alerts(ground, alerting, self.schedules.declared)
            grants = Grants(ground, collector, ring, credentials, on_needs_reauth)
            return Credentials(collector, grants, RequestTests(ground, grants, collector))

        self.alerts, self.grants, tests = credentials_on(ground)
        self._side = side = SyncSide(ground, credentials_on)
        self.resources = Resources(ground, TestSenders(tests.send, side.test))
        self.connections, self.webhooks = Connections(ground, self.grants), Webhooks(ground, webhooks)
        self.accounts = Accounts(ground, self.grants.accounts.forget)
        self.retention, self.pruned_to = retention_.checked(retention), dict[str, Any]()
        self.sync = SyncApp(self, side)

    def _make_ground(
        self, max_payload: int, ring: KeyRing, tracing: Tracing, http: Any, *,
        upgrade: bool | None, has_handlers: bool,
    ) -> Ground:  # fmt: skip
        """What every feature needs to work; ``has_handlers``: of the program's own."""
        counts = Counts(self.declared, self.providers, self.policies.roots)
        self.database.on_commit = counts.transaction
        return Ground(
            database=self.database,
            tables=Tables(self.database, upgrade=self.database.is_sqlite if upgrade is None else upgrade),
            policies=self.policies,
            providers=self.providers,
            kinds=self.kinds,
            encoder=Encoder(self.declared, max_payload, ring),
            foresight=Foresight(self.declared, self.providers, runs=has_handlers),
            waker=Waker(self.database, listen_url=self.listen_url),
            workers=weakref.WeakSet(),
            counts=counts,
            tracing=tracing,
            http=http_by_name(http, self.providers),
        )

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
        await self.ground.ready()

    def ready_sync(self) -> None:
        """`ready` for synchronous programs."""
        self.ground.ready_sync()

    async def close(self) -> None:
        """Close connections and threads opened here; an engine that was handed in stays open.

        What is in use, such as by a handler that has not ended, is closed once it is given back.
        An app that is used again, such as by the next test's ``lifespan``, opens new ones.
        """
        await self.grants.close()
        await self._side.aclose()
        await self.alerts.close()
        self.ground.waker.end()  # the database waits for its thread
        await self.session_engines.close()
        await self.database.close()
        self.ground.tables.are_ready = False  # tables in memory are gone now

    @explained
    async def credentials(self, key: str) -> Access:
        """What requests of an account carry, refreshed if need be: for code that sends them without a job.

        Raises `ConnectionNotFound`, or `ResourceStopped` while there is no usable token.
        """
        await self.ready()
        return await self.grants.required(key)

    def now(self) -> datetime:
        """The host's clock (or the test clock). Decisions about jobs use the database's."""
        return self.ground.now()

    # -- enqueueing -----------------------------------------------------------------------------------------------

    @overload
    async def enqueue(
        self,
        kind: Kind[None],
        payload: None = None,
        *,
        resource_key: str,
        session: CallersSession = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued: ...
    @overload
    async def enqueue(
        self,
        kind: Kind[P],
        payload: P,
        *,
        resource_key: str,
        session: CallersSession = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued: ...
    @overload
    async def enqueue(
        self,
        kind: str,
        payload: Any = None,
        *,
        resource_key: str,
        session: CallersSession = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued: ...
    @explained
    async def enqueue(
        self,
        kind: Kind[Any] | str,
        payload: Any = None,
        *,
        resource_key: str,
        session: CallersSession = None,
        **options: Unpack[JobOptions],
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
        return await self._queue.enqueue(kind, payload, resource_key=resource_key, session=session, **options)

    @overload
    def enqueue_sync(
        self,
        kind: Kind[None],
        payload: None = None,
        *,
        resource_key: str,
        session: CallersSession = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued: ...
    @overload
    def enqueue_sync(
        self,
        kind: Kind[P],
        payload: P,
        *,
        resource_key: str,
        session: CallersSession = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued: ...
    @overload
    def enqueue_sync(
        self,
        kind: str,
        payload: Any = None,
        *,
        resource_key: str,
        session: CallersSession = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued: ...
    @explained
    def enqueue_sync(
        self,
        kind: Kind[Any] | str,
        payload: Any = None,
        *,
        resource_key: str,
        session: CallersSession = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued:
        """`enqueue` for synchronous programs."""
        enqueueing = self._plain_queue.enqueue(kind, payload, resource_key=resource_key, session=session, **options)
        return to_the_end(enqueueing)

    @explained
    async def enqueue_many(
        self,
        kind: Kind[P] | str,
        payloads: Iterable[P | Item],
        *,
        resource_key: str | None = None,
        session: CallersSession = None,
        **options: Unpack[JobOptions],
    ) -> list[Enqueued]:
        """Enqueue many jobs of one kind in one transaction: payloads, or `Item` objects where more differs."""
        queue = self._queue
        return await queue.enqueue_many(kind, payloads, resource_key=resource_key, session=session, **options)

    @explained
    def enqueue_many_sync(
        self,
        kind: Kind[P] | str,
        payloads: Iterable[P | Item],
        *,
        resource_key: str | None = None,
        session: CallersSession = None,
        **options: Unpack[JobOptions],
    ) -> list[Enqueued]:
        """`enqueue_many` for synchronous programs."""
        queue = self._plain_queue
        return to_the_end(queue.enqueue_many(kind, payloads, resource_key=resource_key, session=session, **options))

    def poke(self, is_open: Callable[[], bool] | None = None) -> None:
        """Wake the workers of this process and of others, because there may be work.

        ``is_open`` says whether the transaction with that work is still being committed: they are woken once it is not.
        """
        self.ground.poke(is_open)

    # -- running --------------------------------------------------------------------------------------------------

    @explained
    def worker(
        self,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        kinds: Sequence[str] | None = None,
        except_kinds: Sequence[str] = (),
        resources: Sequence[str] = (),
        lease: float = LEASE,
        grace: float = GRACE,
        patience: float = STUCK_PATIENCE,
        rng: random.Random | None = None,
    ) -> Worker:
        """A worker of this process: ``await app.worker().run()``.

        ``concurrency`` jobs run at once, of ``kinds`` (by default all) but for ``except_kinds``, and of ``resources``
        alone (patterns: ``github/*`` takes each account with what lies below it; by default all); ``lease`` is how many
        seconds a vanished worker's jobs wait for others; ``grace`` how many seconds running jobs get when the worker
        stops; ``patience`` for how many seconds after its timeout a handler that does not end keeps its job, before the
        job goes on without it. Raises `SetupError`.
        """
        with no_collections():  # half of the engine: a program that only enqueues has none
            from resilient.engine.run.execution import Features  # noqa: PLC0415
            from resilient.engine.run.worker import Worker  # noqa: PLC0415

        features = Features(
            ground=self.ground, alerts=self.alerts, grants=self.grants, sessions=self.session_engines,
            destinations=self.outbox.destinations, listen_url=self.listen_url, tick_schedules=self.schedules.step,
            chores=self._chores, app=self, deps=self.deps,
        )  # fmt: skip
        return Worker(
            features, concurrency=concurrency, kinds=kinds, except_kinds=except_kinds, resources=resources, lease=lease,
            grace=grace, patience=patience, rng=rng,
        )  # fmt: skip

    async def keep_house(self) -> None:
        """The app's own chores, as the elected worker does them: alerts, accounts, retention."""
        await do_all(self._chores)

    @property
    def _chores(self) -> Sequence[Chore]:
        return (self.alerts.keep_house, self.grants.fuse.keep_house, self.grants.keep_house, self._prune_old)

    async def _prune_old(self) -> None:
        await retention_.keep(self.database, self.retention, self.pruned_to)

    def acting(self, who: str, why: str | None = None) -> AbstractContextManager[None]:
        """``with app.acting("ann", "they asked by letter"):`` whose changes those within are, in the audit.

        In coroutines, and in threads that carry the context. Without it: ``program``, in a handler ``handler <kind>``.
        """
        return audited.acting(who, why)

    @explained
    async def prune(
        self,
        *,
        older_than: Span | None = None,
        state: str | Iterable[str] | None = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> Pruned:
        """Delete what is over: by default everything that is older than the app's `Retention`.

        ``older_than`` (a span such as ``"7d"``) and ``state`` select finished jobs alone: those older, in those states.
        ``limit`` bounds how many jobs are deleted. A dry run only counts, up to 100,000 of each sort.

        Raises `InvalidInput`.
        """
        return await self._prune(Transactions(self.ground), older_than, state, limit, dry_run)

    async def _prune(self, db: Transactions, older_than: Any, state: Any, limit: Any, dry_run: Any) -> Pruned:
        walk = retention_.walk_of(self.retention, older_than=older_than, state=state, limit=limit, dry_run=dry_run)
        words = {"older_than": older_than, "state": state, "limit": limit, "dry_run": dry_run}
        return await audited.noting(db, "prune", words, lambda: retention_.walk(db, walk))

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
        return to_the_end(self._prune(Transactions(self.ground, here=True), older_than, state, limit, dry_run))

    # -- workflows ------------------------------------------------------------------------------------------------

    def workflow(self, name: str, *, session: CallersSession = None, resource_key: str | None = None) -> Workflow:
        """``async with app.workflow("order") as wf:`` its steps are written when the block ends without an error.

        With ``session`` they exist only if that transaction commits. ``resource_key`` is for steps that name none.
        """
        return Workflow(self.ground, checked_name("the name of a workflow", name), session, resource_key, None)

    def workflow_sync(
        self, name: str, *, session: CallersSession = None, resource_key: str | None = None
    ) -> SyncWorkflow:
        """`workflow` for synchronous programs: ``with app.sync.workflow("order") as wf:``."""
        return SyncWorkflow(self.ground, checked_name("the name of a workflow", name), session, resource_key, None)


def _policies(
    providers: Collection[Provider],
    destinations: Mapping[str, Destination],
    limits: Mapping[str, Sequence[Limit]] | None,
    concurrency: Mapping[str, int] | None,
    **others: Any,
) -> Policies:
    """The policies of resources: what the program declares overrides its providers' facts."""
    rates, caps = {**limits_of(providers), **(limits or {})}, {**caps_of(providers), **(concurrency or {})}
    patterns = chain(limits or (), concurrency or (), *(one or () for one in others.values()))
    made = Policies(rates, caps, tenancies=tenancies_of(providers), usual=default_caps(destinations), **others)
    warn_of_roots(patterns, {provider.name for provider in providers})
    return made


def _opened(target: Any, connections: int, **options: Any) -> Database:
    if isinstance(target, Database):
        return target
    if not is_whole(connections, pool.LEAST, _MOST_CONNECTIONS):
        raise SetupError(
            f"connections={connections!r}: a process takes a whole number of them, from {pool.LEAST} to"
            f" {_MOST_CONNECTIONS:,}"
        )
    return Database(target, connections=connections, **options)


class SyncApp:
    """The synchronous face of an app: the same names, for threads and scripts."""

    def __init__(self, app: Resilient, side: SyncSide) -> None:
        self.enqueue = app.enqueue_sync
        self.enqueue_many = app.enqueue_many_sync
        self.workflow = app.workflow_sync
        self.workflows = app.workflows.sync
        self.jobs = app.jobs.sync
        self.resources = app.resources.sync
        self.streams = app.streams.sync
        self.inbox = app.inbox.sync
        self.outbox = app.outbox.sync
        self.schedules = app.schedules.sync
        self.connections = app.connections.sync
        self.webhooks = app.webhooks.sync
        self.accounts = app.accounts.sync
        self.alerts, self.audit = app.alerts.sync, app.audit.sync
        self.prune = app.prune_sync
        self.credentials, self.close = side.credentials, side.close
