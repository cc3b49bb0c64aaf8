"""The program's app as Django's settings describe it, and enqueueing in Django's transactions."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import replace
from functools import wraps
from inspect import iscoroutinefunction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import django
from asgiref.sync import async_to_sync, sync_to_async
from django.apps import apps as registry
from django.db import close_old_connections, connections, transaction
from django.utils.module_loading import import_string

from resilient.core.base.errors import InvalidInput, SetupError
from resilient.django.connection import session
from resilient.django.settings import Settings, address, current, required_alias
from resilient.engine.app.app import Resilient
from resilient.store.db import pool

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    from sqlalchemy import URL

    from resilient.engine.events.outbox import Event
    from resilient.engine.ground.encoder import Enqueued, JobOptions
    from resilient.engine.ground.kinds import Handler, Kind

P = TypeVar("P")
R = TypeVar("R")
_APPS: Final[dict[tuple[Settings, URL], Resilient]] = {}
_LOCK: Final = threading.RLock()
_RUN: Final = 300.0  # seconds for the jobs of a test
_LOOK: Final = 1.0  # seconds between two looks for old connections of coroutines, which share a thread


def app() -> Resilient:
    """The program's app: what ``RESILIENT["APP"]`` names, made once a process, on first use.

    Its plain handlers begin and end with `close_old_connections`, as requests do. Raises `SetupError`.
    """
    if not (registry.ready or registry.loading):  # a process that `manage.py` did not start
        django.setup()
    settings, url = current(), address()
    with _LOCK:
        if (settings, url) not in _APPS:
            _APPS[settings, url] = _made(settings, url)
        return _APPS[settings, url]


def close() -> None:
    """Close the connections of the app, and those that Django keeps for its handlers' threads (``CONN_MAX_AGE``).

    What is used again opens anew. A test run does it before it drops its database. From a coroutine:
    ``await resilient.django.app().close()``, which leaves Django's own to Django.
    """
    with _LOCK:
        apps = list(_APPS.values())
    for one in apps:
        async_to_sync(one.close)()
    _KEPT.close()


def run_jobs(**options: Any) -> int:
    """For tests: run what is due, in this process, and return how many; ``options`` are the worker's.

    Raises `InvalidInput` in a transaction, where no worker sees the jobs.
    """
    if (alias := current().alias) is not None and connections[alias].in_atomic_block:
        raise InvalidInput("a TestCase commits nothing, so no worker sees its jobs: use a TransactionTestCase")

    async def run(made: Resilient) -> int:
        try:
            return await made.worker(**{"concurrency": 1, **options}).drain(timeout=_RUN)
        finally:
            await made.close()

    try:
        done: int = async_to_sync(run)(app())
    finally:
        _KEPT.close()  # its threads are over, and the collector would find their connections some time
    return done


def enqueue(
    kind: Kind[P] | str,
    payload: P | None = None,
    *,
    resource_key: str,
    using: str | None = None,
    **options: Unpack[JobOptions],
) -> Enqueued:
    """`Resilient.enqueue_sync` on Django's connection: in the `transaction.atomic` around it, or one of its own."""
    alias = required_alias(using)
    with transaction.atomic(alias, savepoint=False):
        kind_: Any = kind
        return app().enqueue_sync(kind_, payload, resource_key=resource_key, session=session(alias), **options)


async def aenqueue(
    kind: Kind[P] | str, payload: P | None = None, *, resource_key: str, using: str | None = None,
    **options: Unpack[JobOptions],
) -> Enqueued:  # fmt: skip
    """`enqueue` for coroutines, in the thread in which Django's models work for them."""
    call = sync_to_async(enqueue, thread_sensitive=True)
    done: Enqueued = await call(kind, payload, resource_key=resource_key, using=using, **options)
    return done


def publish(event: Event, *, using: str | None = None, **options: Any) -> str:
    """`Outbox.publish` on Django's connection: in the `transaction.atomic` around it, or one of its own."""
    alias = required_alias(using)
    with transaction.atomic(alias, savepoint=False):
        return app().outbox.publish(session(alias), event, **options)


def _made(settings: Settings, url: URL) -> Resilient:
    if settings.app is None:
        made = Resilient(url, schema=settings.schema)
    else:
        value = _named(settings.app)
        made = value if isinstance(value, Resilient) else value()
        if not isinstance(made, Resilient):
            raise SetupError(f"RESILIENT['APP'] {settings.app} makes no Resilient app but a {type(made).__name__}")
        _require_same_database(made, settings, url)
    if settings.alias is not None:  # else the tables are in a database that Django does not migrate
        made.database.dialect.upgrade_with = "manage.py migrate"
    kinds = cast("dict[str, Handler[Any, Any]]", made.kinds)  # the app's, its worker's and its ground's
    kinds.update({name: _with_fresh_connections(one) for name, one in kinds.items()})
    return made


def _named(name: str) -> Any:
    try:
        value = import_string(name.replace(":", "."))
    except ImportError as error:
        raise SetupError(f"RESILIENT['APP'] {name!r} cannot be imported: {error}") from error
    if not isinstance(value, Resilient) and not callable(value):
        raise SetupError(f"RESILIENT['APP'] {name} is neither a Resilient app nor a function that makes one")
    return value


def _require_same_database(made: Resilient, settings: Settings, url: URL) -> None:
    """An app that is made when its module is imported has the real database, and not the one of a test run."""
    d, name = made.database, url.database
    own = str(d.file) if d.file is not None else d.url.database
    if own != name and (name is None or d.file is None or d.file.resolve() != Path(name).resolve()):
        raise SetupError(
            f"the app of RESILIENT['APP'] is on {own!r} and Django on {name!r}: make it in a function, with"
            " `Resilient(resilient.django.address(), ...)`, and name that"
        )
    if d.dialect.schema != settings.schema:
        raise SetupError(
            f"the app of RESILIENT['APP'] has schema={d.dialect.schema!r} and RESILIENT['SCHEMA'] is"
            f" {settings.schema!r}: say the same in both"
        )


# -- connections of handlers ---------------------------------------------------------------------------------------


def _with_fresh_connections(handler: Handler[Any, Any]) -> Handler[Any, Any]:
    """The same handler, whose functions meet no connection of Django's that is too old or was cut off."""
    wrap = _fresh_async if handler.is_async else fresh
    reconcile = handler.reconcile and (_fresh_async if iscoroutinefunction(handler.reconcile) else fresh)(
        handler.reconcile
    )
    return replace(handler, fn=wrap(handler.fn), reconcile=reconcile)


def fresh(fn: Callable[..., R]) -> Callable[..., R]:
    """The same function, which begins and ends with `close_old_connections`, as requests do."""

    @wraps(fn)
    def run(*args: Any) -> R:
        closes = _KEPT.take()
        close_old_connections()
        try:
            return fn(*args)
        finally:
            close_old_connections()
            _KEPT.keep(closes)

    return run


class _Kept:
    """Django's connections at rest, which threads of handlers keep for their next jobs (``CONN_MAX_AGE``).

    A thread that ends closes none: whoever drops a database would wait for the collector.
    """

    def __init__(self) -> None:
        self.begin_anew()
        pool.renew_in_children(self)

    def begin_anew(self) -> None:
        """See `pool.renew_in_children`."""
        self._lock, self._wrappers, self._closes = threading.Lock(), weakref.WeakSet[Any](), 0

    def take(self) -> int:
        """This thread uses its own now; returns what `keep` needs."""
        with self._lock:
            self._wrappers.difference_update(connections.all(initialized_only=True))
            return self._closes

    def keep(self, closes: int) -> None:
        """This thread's rest from now on; after a `close` since it took them they are closed."""
        with self._lock:
            wrappers = [one for one in connections.all(initialized_only=True) if not one.in_atomic_block]
            if closes == self._closes:
                self._wrappers.update(wrappers)
                return
        for one in wrappers:
            one.close()

    def close(self) -> None:
        """Close what rests, whatever thread it is of."""
        with self._lock:
            self._closes += 1
            resting = list(self._wrappers)
            self._wrappers.clear()
            for one in resting:
                one.inc_thread_sharing()
                try:
                    one.close()
                finally:
                    one.dec_thread_sharing()


_KEPT: Final = _Kept()


class _Looks:
    """When the connections of coroutines were looked at: all of them share one thread, so once a second is enough."""

    last = 0.0


def _fresh_async(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(fn)
    async def run(job: Any) -> Any:
        if (now := time.monotonic()) >= _Looks.last + _LOOK:
            _Looks.last = now
            await sync_to_async(close_old_connections)()
        return await fn(job)

    return run
