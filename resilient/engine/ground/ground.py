"""What every feature of an app stands on: its database, what it declares, and how workers hear of work.

`Resilient` makes one and hands it to each feature (jobs, resources, connections, ...). So a feature names what it
needs, and none knows the app: what it needs of another feature is handed to it beside the ground.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Protocol,
)

from resilient.store.db import schema as schemas

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Mapping

    from resilient.core.base.tracing import Tracing
    from resilient.core.gates.admission import ResourceFacts
    from resilient.core.gates.policy import Policies
    from resilient.core.provider.facts import Provider
    from resilient.engine.ground.counts import Counts, Figures
    from resilient.engine.ground.encoder import Encoder, Foresight
    from resilient.engine.ground.kinds import Handler
    from resilient.store.db.database import Database
    from resilient.store.db.wake import Waker
    from resilient.wire.requests.pool import PoolSettings


DEFAULT_CONCURRENCY: Final = 50
LEASE: Final = 60.0  # seconds, unless a heartbeat renews it
GRACE: Final = 30.0  # seconds
STUCK_PATIENCE: Final = 300.0  # seconds for which a stuck handler keeps its job


class Wakeable(Protocol):
    """A worker of this process."""

    id: str

    def wake(self) -> None:
        """There may be work; called from any thread."""

    def figures(self) -> Figures:
        """How it stands; called from any thread."""


class Tables:
    """Whether the tables fit this code: looked at when the app is first used, and updated if ``upgrade``."""

    def __init__(self, database: Database, *, upgrade: bool) -> None:
        self._database, self.upgrade = database, upgrade
        self.are_ready = False

    async def ready(self) -> None:
        """See `Resilient.ready`."""
        if not self.are_ready:
            await (schemas.upgrade if self.upgrade else schemas.check)(self._database)
            self.are_ready = True

    def ready_sync(self) -> None:
        """`ready` for synchronous programs."""
        if not self.are_ready:
            (schemas.upgrade_sync if self.upgrade else schemas.check_sync)(self._database)
            self.are_ready = True


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Ground:
    """What a feature needs to work. ``workers`` are those of this process that run now."""

    database: Database
    tables: Tables
    policies: Policies
    providers: Mapping[str, Provider]
    kinds: Mapping[str, Handler[Any, Any]]  # that workers run
    encoder: Encoder
    foresight: Foresight
    waker: Waker
    workers: weakref.WeakSet[Wakeable]
    counts: Counts
    tracing: Tracing
    http: Mapping[str, PoolSettings]  # how requests are sent, by provider; "*": to all others

    def http_of(self, provider: str) -> PoolSettings | None:
        """How requests to a provider are sent, if the program says it."""
        return self.http.get(provider) or self.http.get("*")

    async def ready(self) -> None:
        """See `Resilient.ready`."""
        await self.tables.ready()

    def ready_sync(self) -> None:
        """`ready` for synchronous programs."""
        self.tables.ready_sync()

    def now(self) -> datetime:
        """The host's clock (or the test clock). Decisions about jobs use the database's."""
        return self.database.dialect.host_now() or datetime.now(UTC)

    def poke(self, is_open: Callable[[], bool] | None = None) -> None:
        """There may be work: tell the workers of this process and of others.

        ``is_open`` says whether the transaction that brings it is still being committed: they are told once it is not.
        """
        if is_open is not None and not self.database.is_sqlite:
            self.waker.call_after(is_open, self._wake_workers)
            return
        self._wake_workers()
        self.waker.poke()

    def _wake_workers(self) -> None:
        for worker in list(self.workers):
            worker.wake()

    def tell(self, resource_key: str) -> None:
        """Tell workers of other processes that a gate of this resource changed: they read it before they send."""
        self.waker.tell(resource_key)

    def note_cooldown(self, facts: ResourceFacts) -> None:
        """A resource began to rest, or rests longer: that is counted, and told to other processes."""
        self.counts.throttle(facts.key)
        self.tell(facts.key)

    def in_threads(self) -> Ground:
        """The same ground for the event loop of a thread: its transactions are synchronous."""
        return replace(self, database=self.database.in_threads())
