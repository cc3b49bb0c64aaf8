"""`app.accounts`: erase what is stored about an account, or take it out. `app.sync.accounts`: synchronous.

An erasure first pauses the account, so that nothing of it starts, and refuses (or waits) while its jobs run. Then it
walks in short transactions. One that is broken off leaves the account paused; erase it again.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from resilient.core.accounts.endpoints import token_key
from resilient.core.base.errors import InvalidInput, ResilientError
from resilient.core.base.misfit import explained_calls
from resilient.core.inspect.erasure import Erased, checked, refusal
from resilient.core.jobs.records import without_sealed
from resilient.engine.ground.audited import actor
from resilient.engine.ground.sessions import SyncFacade, Transactions, blocking, one_by_one
from resilient.engine.inspect.audit import Audit
from resilient.store.accounts import connections
from resilient.store.gates import controls
from resilient.store.inspect import erasure as store

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Mapping

    from resilient.core.provider.facts import Provider
    from resilient.engine.ground.ground import Ground

REST: Final = 0.005  # seconds between two transactions at least: others write, too
LOOK_AGAIN: Final = 0.2  # seconds between two looks at jobs that run
PASSES: Final = 20  # over jobs that other transactions hold
_PAGE: Final = 500  # connections in one look for who shares a token endpoint


@explained_calls("app.accounts")
class Accounts:
    """What is stored about the accounts of one app."""

    def __init__(self, ground: Ground, forget: Callable[[], None], *, here: bool = False) -> None:
        self._ground, self._db, self._forget = ground, Transactions(ground, here=here), forget
        self._audit = Audit(ground, here=here)

    @property
    def sync(self) -> SyncAccounts:
        """The same for synchronous programs."""
        return SyncAccounts(Accounts(self._ground, self._forget, here=True))

    async def erase(
        self,
        key: str,
        *,
        dry_run: bool = False,
        timeout: float = 0,  # noqa: ASYNC109 - of jobs that run, not of the call
        who: str | None = None,
        why: str | None = None,
        via: str | None = None,
    ) -> Erased:
        """Delete everything that is stored about an account, or a resource of it, and what lies below it.

        Jobs with their history, dependencies and steps, those that tell its customer, events whose key or subject it
        is, webhooks that came for it, both with their notes of the inbox, connections with grants that nobody shares,
        the state of a token endpoint that is its own, cursors, limits, gates, ticks, alerts. ``who`` is noted in the
        audit with the numbers and stays there, without any content.

        ``timeout``: seconds to wait for jobs of it that run. Raises `InvalidInput` if they still do, or if a workflow
        with steps of it is not over, and then nothing is deleted.
        """
        if dry_run:
            name = await self._name_of(checked(key), with_orphans=True)
            return Erased(key, await self._walk(name, dry_run=True), dry_run=True)
        checked(key)
        caller = actor()
        who, why, via = who or caller.who, why or caller.why, via or caller.via
        async with self._audit.change(who, "erase", key, why=why, via=via) as outcome:
            name = await self._name_of(key, with_orphans=True)
            await self._stop(name, timeout)
            rows = await self._walk(name, dry_run=False)
            outcome.update(rows)
        self._forget()
        return Erased(key, rows)

    async def export(self, key: str) -> AsyncGenerator[dict[str, Any], None]:
        """Every stored row about an account, or a resource of it, as JSON objects; ``table`` says which.

        Secrets and sealed payloads are left out. It reads in short transactions: pause the account for a picture of one
        moment.
        """
        name = await self._name_of(checked(key))
        for table in store.EXPORTED:
            for row in await self._db.read(None, store.rows, name, table):
                yield {"table": table, **without_sealed(row)}
        for table in store.WINDOWS:
            place: store.Place | None = store.Place()
            while place is not None:
                rows, place = await self._db.read(None, store.windowed, name, table, place)
                for source, row in rows:
                    yield {"table": source, **without_sealed(row)}

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _name_of(self, key: str, *, with_orphans: bool = False) -> store.Name:
        """Whose rows are meant. A token endpoint is one's own if no other account's details lead to the same host.

        ``with_orphans``: with those that no account's details lead to, as after an erasure that was broken off.
        """
        provider = self._ground.providers.get(key.partition("/")[0])
        if provider is None or provider.oauth is None or not provider.oauth.at_tenants:
            return store.Name(key)
        own, others, after = set[str](), set[str](), ""
        if with_orphans:  # first: whoever connects meanwhile is seen below
            own.update(await self._db.read(None, store.endpoints_of, provider.name))
        while page := await self._db.read(
            None, connections.find_all, under=provider.name, state=None, after=after, limit=_PAGE
        ):
            after = page[-1].resource_key
            for bound in page:
                is_own = bound.resource_key == key or bound.resource_key.startswith(f"{key}/")
                (own if is_own else others).add(_endpoint_of(provider, bound.details))
        return store.Name(key, sorted(own - others - {token_key(provider.name, None, None)}))

    async def _stop(self, name: store.Name, seconds: float) -> None:
        """Let nothing start, and wait for what runs. Raises `InvalidInput` after that time."""
        key = name.key
        is_ours = await self._db.write(None, store.stop, key)
        deadline = time.monotonic() + seconds
        while (text := refusal(key, *await self._db.read(None, store.obstacles, name))) is not None:
            if time.monotonic() >= deadline:
                if is_ours:
                    await self._db.write(None, controls.resume, key)
                raise InvalidInput(text)
            await self._db.rest(LOOK_AGAIN)

    async def _walk(self, name: store.Name, *, dry_run: bool) -> dict[str, int]:
        tally, do = await self._jobs(name, 1, dry_run=dry_run), self._db.read if dry_run else self._db.write
        for visit in (store.attempts, store.steps):
            place: store.Place | None = store.Place()
            while place is not None:
                some, place = await do(None, visit, name, place, dry_run=dry_run)
                tally += some
                await self._db.rest(REST)
        for table in store.OTHERS:
            has_more = True
            while has_more:
                some, has_more = await do(None, store.others, name, table, dry_run=dry_run)
                tally += some
            if table == "connection" and not dry_run:  # nothing can be written to its customer any more
                tally += await self._jobs(name, PASSES, dry_run=False)
        return {table: number for table, number in sorted(tally.items()) if number}

    async def _jobs(self, name: store.Name, most: int, *, dry_run: bool) -> Counter[str]:
        """Pass over all jobs until a pass finds none: one may have been locked, or begun before the pause.

        ``most`` passes.
        """
        tally, do = Counter[str](), self._db.read if dry_run else self._db.write
        for _ in range(most):
            before = tally["job"]
            place: store.Place | None = store.Place()
            while place is not None:
                some, place = await do(None, store.jobs, name, place, dry_run=dry_run)
                tally += some
                await self._db.rest(REST)
            if dry_run or tally["job"] == before:
                break
        if not dry_run and (text := refusal(name.key, *await self._db.read(None, store.obstacles, name))) is not None:
            raise InvalidInput(f"{text}; erase it again: it is paused until then")
        return tally


def _endpoint_of(provider: Provider, details: Mapping[str, str]) -> str:
    """The resource of the token endpoint that an account's details lead to."""
    try:
        return token_key(provider.name, provider.oauth, provider.filled(**details).oauth)
    except ResilientError:  # they lead nowhere
        return token_key(provider.name, None, None)


class SyncAccounts(SyncFacade[Accounts]):
    """`Accounts` for synchronous programs: the same methods, without ``await``."""

    erase = blocking(Accounts.erase)

    def export(self, key: str) -> Iterator[dict[str, Any]]:
        """See `Accounts.export`."""
        return one_by_one(self._inner.export(key))
