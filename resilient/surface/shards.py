"""Several databases behind one program: an app for each shard, and the way to the right one.

A shard is a database of its own, or a PostgreSQL schema. An account lives in one, with its jobs, credentials and gates;
``of`` says in which. Nothing is shared between two: no transaction spans them, breakers, fuses and what throttles teach
are each one's own, and so are workflows, schedules, the outbox and the audit. What a provider allows all accounts
together is divided by declared shares (`core/gates/rate_limit.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from resilient.core.base.errors import DatabaseUnreachable, InvalidInput, ResilientError, SetupError
from resilient.core.base.loggers import logger, shard
from resilient.core.base.misfit import explained, explained_class
from resilient.core.base.resource_key import account, check
from resilient.core.gates.rate_limit import bounded, check_shares, divided, divided_caps, divided_learning, is_shared
from resilient.engine.app.app import Resilient
from resilient.engine.ground.encoder import Item
from resilient.engine.ground.garbage import rare_collections
from resilient.engine.ground.providers import caps_of, limits_of
from resilient.engine.ground.signals import SignalCount, hear

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
    from typing import Self, Unpack

    from sqlalchemy import URL

    from resilient.core.gates.rate_limit import Limit
    from resilient.core.provider.facts import Provider
    from resilient.engine.accounts.access import Access
    from resilient.engine.events.webhooks import Webhooks
    from resilient.engine.ground.encoder import Enqueued, JobOptions
    from resilient.engine.ground.ground import Ground
    from resilient.engine.ground.kinds import Kind
    from resilient.engine.ground.sessions import CallersSession
    from resilient.engine.run.worker import Worker
    from resilient.engine.schedules.declaration import Schedule

P = TypeVar("P")
log = logger("app")
_PORT: Final = 5432


@explained_class
@dataclass(frozen=True)
class Shard:
    """One shard: its database (as `Resilient` takes it), and a schema there.

    ``share``: its part of what providers allow all accounts together, above 0; those of all shards are 1 at most.
    """

    database: Any
    schema: str | None = None
    share: float | None = None
    listen_url: str | None = None


class Shards:
    """One program over several databases: ``Shards({"eu": url, "us": url}, of=shard_of, handlers=[...])``.

    ``of`` gets the account of a resource key (``github/acct-7``; of a root, the root) and returns the name of its
    shard; it must always say the same. Values are addresses, or `Shard`. All other options are `Resilient`'s, and are
    each shard's own; limits and caps of whole providers are divided by the shares. A schedule with a ``resource_key``
    ticks in its shard alone, one with ``for_each`` in all, for the accounts of each. Raises `SetupError`.
    """

    def __init__(
        self,
        shards: Mapping[str, Any],
        *,
        of: Callable[[str], str],
        providers: Iterable[Provider] = (),
        schedules: Iterable[Schedule] = (),
        limits: Mapping[str, Sequence[Limit]] | None = None,
        concurrency: Mapping[str, int] | None = None,
        learn: Mapping[str, bool | tuple[float, float] | str] | None = None,
        **options: Any,
    ) -> None:
        declared = {name: one if isinstance(one, Shard) else Shard(one) for name, one in shards.items()}
        _check(declared, of)
        providers = list(providers)
        rates, caps = {**limits_of(providers), **(limits or {})}, {**caps_of(providers), **(concurrency or {})}
        shared = [pattern for pattern in (*rates, *caps, *bounded(learn or {})) if is_shared(pattern)]
        shares = check_shares({name: one.share for name, one in declared.items()}, shared)
        self._of, self._names = of, tuple(declared)
        ticking = _by_shard(declared, schedules, self.name_of)
        every: dict[str, Any] = {name: list(v) if isinstance(v, Iterator) else v for name, v in options.items()}
        self.apps: Mapping[str, Resilient] = {
            name: Resilient(
                one.database, schema=one.schema, listen_url=one.listen_url, providers=providers,
                schedules=ticking[name], limits=divided(rates, shares[name], name),
                concurrency=divided_caps(caps, shares[name], name), learn=divided_learning(learn or {}, shares[name]),
                **every,
            )
            for name, one in declared.items()
        }  # fmt: skip
        _check_places(declared, self.apps)
        for name, app in self.apps.items():
            app.ground.foresight.place = partial(self._require, name)
            app.webhooks.ground_of = self._ground_of

    def __getitem__(self, name: str) -> Resilient:
        """The app of a shard. Raises `InvalidInput` if there is none of that name."""
        if name not in self.apps:
            raise InvalidInput(f"there is no shard {name!r}: these are {', '.join(self.apps)}")
        return self.apps[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.apps)

    def __len__(self) -> int:
        return len(self.apps)

    def name_of(self, resource_key: str) -> str:
        """The name of the shard in which a resource lives. Raises `InvalidInput`."""
        key, of = account(check(resource_key)), getattr(self._of, "__name__", "of")
        try:
            name = self._of(key)
        except ResilientError:
            raise
        except Exception as error:
            raise InvalidInput(f"of={of} fails for {key}: {type(error).__name__}: {error}") from error
        if not isinstance(name, str) or name not in self._names:
            raise InvalidInput(f"of={of} says {name!r} of {key}, which is no shard: these are {', '.join(self._names)}")
        return name

    def app(self, resource_key: str) -> Resilient:
        """The app of the shard in which a resource lives: its ``jobs``, ``connections``, ``resources`` and the rest."""
        return self.apps[self.name_of(resource_key)]

    @property
    def webhooks(self) -> Webhooks:
        """Takes deliveries for the accounts of all shards: each job is stored where its account lives.

        So does the one of every single shard; counts and the log are those of the first.
        """
        return next(iter(self.apps.values())).webhooks

    @property
    def providers(self) -> Mapping[str, Provider]:
        """The facts of each provider, by name: the same in every shard."""
        return next(iter(self.apps.values())).providers

    def _ground_of(self, resource_key: str) -> Ground:
        return self.app(resource_key).ground

    def _require(self, shard: str, resource_key: str) -> None:
        """Raise `InvalidInput` for a resource of another shard: its limits, circuit and credentials are there."""
        if (home := self.name_of(resource_key)) != shard:
            raise InvalidInput(
                f"{resource_key} lives in shard {home!r}, as of= says, and this is the app of {shard!r}: use"
                f" shards.app({resource_key!r}), or the shards' own enqueue, which go there"
            )

    # -- life -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """See `ready`."""
        try:
            await self.ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Close what was opened here."""
        await self.close()

    @asynccontextmanager
    async def lifespan(self, _server: Any = None) -> AsyncIterator[None]:
        """For web frameworks, as `Resilient.lifespan`."""
        async with self:
            yield

    async def ready(self) -> None:
        """See that the tables fit this code. A shard that cannot be reached is said in the log, unless none can.

        Raises `DatabaseUnreachable`, `SchemaOutdated` or `SchemaTooNew`.
        """
        ends = await asyncio.gather(*(app.ready() for app in self.apps.values()), return_exceptions=True)
        errors = {name: end for name, end in zip(self.apps, ends, strict=True) if end is not None}
        away = {name: error for name, error in errors.items() if isinstance(error, DatabaseUnreachable)}
        for error in errors.values():
            if error not in away.values() or len(away) == len(self.apps):
                raise error
        for name, error in away.items():
            log.warning("shard %s cannot be reached: %s", name, error)

    async def close(self) -> None:
        """Close connections and threads opened here, of every shard."""
        async with AsyncExitStack() as stack:  # one that fails keeps no other open
            for app in self.apps.values():
                stack.push_async_callback(app.close)

    # -- enqueueing -----------------------------------------------------------------------------------------------

    @explained
    async def enqueue(
        self,
        kind: Kind[P] | str,
        payload: P | None = None,
        *,
        resource_key: str,
        session: CallersSession = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued:
        """`Resilient.enqueue` in the resource's shard. Raises `InvalidInput` for a session at another database."""
        app: Any = self._joined(resource_key, session)
        done: Enqueued = await app.enqueue(kind, payload, resource_key=resource_key, session=session, **options)
        return done

    @explained
    def enqueue_sync(
        self,
        kind: Kind[P] | str,
        payload: P | None = None,
        *,
        resource_key: str,
        session: CallersSession = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued:
        """`enqueue` for synchronous programs."""
        app: Any = self._joined(resource_key, session)
        done: Enqueued = app.enqueue_sync(kind, payload, resource_key=resource_key, session=session, **options)
        return done

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
        """`Resilient.enqueue_many`, one transaction in each shard that is met: if one fails, those before it stay."""
        done: dict[int, Enqueued] = {}
        for app, numbers, some in self._parts(payloads, resource_key, session):
            rows = await app.enqueue_many(kind, some, resource_key=resource_key, session=session, **options)
            done |= dict(zip(numbers, rows, strict=True))
        return [done[n] for n in sorted(done)]

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
        done: dict[int, Enqueued] = {}
        for app, numbers, some in self._parts(payloads, resource_key, session):
            rows = app.enqueue_many_sync(kind, some, resource_key=resource_key, session=session, **options)
            done |= dict(zip(numbers, rows, strict=True))
        return [done[n] for n in sorted(done)]

    def _parts(
        self, payloads: Iterable[P | Item], resource_key: str | None, session: Any
    ) -> list[tuple[Resilient, list[int], list[P | Item]]]:
        """Each shard's app with the numbers of what goes there, and that itself. Raises `InvalidInput`."""
        many, places = list(payloads), dict[str, list[int]]()
        for n, one in enumerate(many):
            own = one.resource_key if isinstance(one, Item) else None
            key: Any = resource_key if own is None else own
            if (name := self.name_of(key)) not in places:
                self._joined(key, session)
                places[name] = []
            places[name].append(n)
        return [(self.apps[name], numbers, [many[n] for n in numbers]) for name, numbers in places.items()]

    async def credentials(self, key: str) -> Access:
        """`Resilient.credentials` of an account, in its shard."""
        return await self.app(key).credentials(key)

    def _joined(self, resource_key: str, session: Any) -> Resilient:
        """The resource's app. Raises `InvalidInput` for a session at another shard's database."""
        name = self.name_of(resource_key)
        place = None if session is None else _place(session)
        if place is not None and place != _place_of(self.apps[name].database.url):
            raise InvalidInput(
                f"{resource_key} lives in shard {name!r}, and this session is at another database: no transaction spans"
                " two (an engine at the same database says its address as the shard does, or is Shard(engine))"
            )
        return self.apps[name]

    # -- running --------------------------------------------------------------------------------------------------

    def worker(self, *names: str, **options: Any) -> ShardWorkers:
        """A worker for each of these shards (by default all) in this process; options are those of `Resilient.worker`.

        Each has its own slots, and one whose database is away keeps no other waiting.
        """
        return ShardWorkers({name: self[name].worker(**options) for name in names or self.apps})


class ShardWorkers:
    """The workers of several shards in one process."""

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self.workers = workers
        self._signals = SignalCount()

    async def run(self, *, signals: bool = True) -> None:
        """Work until `stop` (or a signal, see `hear`); a second signal hands back what runs. See `Worker.run`."""
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            if signals:
                stack.callback(hear(loop, self._signalled))
                stack.enter_context(rare_collections())
            await self._run()

    async def _run(self) -> None:
        """Until all have ended. One that fails takes the others with it, once they have finished what runs."""
        for name, worker in self.workers.items():
            log.info("shard %s is served by worker %s", name, worker.id)
        tasks = {
            asyncio.create_task(worker.run(signals=False), context=_context_of(name)): name
            for name, worker in self.workers.items()
        }
        errors, running = list[BaseException](), set(tasks)
        try:
            while running:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                ended = [task for task in tasks if task not in running]
                for task in ended:
                    if (error := self._failure(tasks.pop(task), task)) is not None:
                        errors.append(error)
                        self.stop()
            for error in errors:
                raise error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    def _failure(name: str, task: asyncio.Task[None]) -> BaseException | None:
        """The error that a worker's task ended with, which is logged; None if it ended well."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        how = "was cancelled" if task.cancelled() else "failed"
        if error is not None:
            log.error("shard %s: its worker %s, so those of all shards stop: %s", name, how, error)
        return error

    async def drain(self) -> int:
        """Run what is due in every shard, for tests; returns how many executions ended."""
        return sum([await worker.drain() for worker in self.workers.values()])

    def stop(self) -> None:
        """Claim nothing more, then finish or hand back what is running. Call it from the workers' loop."""
        for worker in self.workers.values():
            worker.stop()

    def _signalled(self) -> None:
        number = self._signals.next()
        if number == 0:
            return
        for worker in self.workers.values():
            (worker.stop if number == 1 else worker.hand_back)()


def _context_of(name: str) -> Context:
    """A copy of the caller's context, in which records say that they are a shard's."""
    context = copy_context()
    context.run(shard.set, name)
    return context


def _check(declared: Mapping[str, Shard], of: Any) -> None:
    """Raise `SetupError` for what cannot be meant."""
    if not declared:
        raise SetupError("Shards takes at least one shard, such as {'eu': 'postgresql://...'}")
    if not callable(of):
        raise SetupError("of= is a function that says in which shard an account lives")
    if inspect.iscoroutinefunction(of):
        raise SetupError("of= is a plain function: it is called for each resource key, and waits for nothing")


def _check_places(declared: Mapping[str, Shard], apps: Mapping[str, Resilient]) -> None:
    """Raise `SetupError` for two shards with the same tables, as far as addresses say so."""
    places: dict[tuple[Any, ...], str] = {}
    for name, app in apps.items():
        place = _place_of(app.database.url)
        if place is not None and (other := places.setdefault((*place, declared[name].schema), name)) != name:
            raise SetupError(
                f"the shards {other!r} and {name!r} have the same tables: give one another database or schema"
            )


def _by_shard(
    declared: Mapping[str, Shard], schedules: Iterable[Schedule], name_of: Callable[[str], str]
) -> dict[str, list[Schedule]]:
    """The schedules of each shard. Raises `SetupError`."""
    parts: dict[str, list[Schedule]] = {name: [] for name in declared}
    for one in schedules:
        try:
            names = [name_of(one.resource_key)] if getattr(one, "resource_key", "") else list(declared)
        except InvalidInput as error:
            raise SetupError(f"schedule {one.name!r}: {error}") from error
        for name in names:
            parts[name].append(one)
    return parts


def _place(session: Any) -> tuple[Any, ...] | None:
    """Which database a session or connection is at; None if it does not say."""
    session = getattr(session, "sync_session", None) or getattr(session, "sync_connection", None) or session
    with contextlib.suppress(SQLAlchemyError, AttributeError):
        bind = session.get_bind() if hasattr(session, "get_bind") else session
        return _place_of(bind.engine.url)
    return None


def _place_of(url: URL) -> tuple[Any, ...] | None:
    """Server and database; None for one in memory, of which there are many."""
    backend, database = url.get_backend_name(), url.database
    if backend == "sqlite":
        return None if not database or database == ":memory:" else (backend, str(Path(database).resolve()))
    return backend, url.host or url.query.get("host"), str(url.port or url.query.get("port") or _PORT), database
