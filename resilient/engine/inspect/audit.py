"""`app.audit`: who changed what, why and when; `app.sync.audit` is the synchronous face.

The dashboard, the command line and every method of the app that changes something note it before it is made: what
cannot be noted is not done. ``with app.acting("ann", "by letter"):`` says who it is. Around several changes that are
one to people: ``async with app.audit.change("ann", "customer deleted", key):``; nothing within is noted again.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from resilient.core.base.errors import InvalidInput
from resilient.core.base.misfit import check_storable, explained_calls
from resilient.engine.ground.audited import noted
from resilient.engine.ground.sessions import SyncFacade, Transactions, blocking
from resilient.store.inspect import audit as store

if TYPE_CHECKING:
    import builtins
    from collections.abc import AsyncIterator, Iterator, Mapping

    from resilient.core.jobs.records import AuditInfo
    from resilient.engine.ground.ground import Ground


@explained_calls("app.audit")
class Audit:
    """The audit of one app."""

    def __init__(self, ground: Ground, *, here: bool = False) -> None:
        self._ground, self._db = ground, Transactions(ground, here=here)

    @property
    def sync(self) -> SyncAudit:
        """The same for synchronous programs."""
        return SyncAudit(Audit(self._ground, here=True))

    async def list(
        self, *, who: str | None = None, subject: str | None = None, limit: int = 100, after: int | None = None
    ) -> builtins.list[AuditInfo]:
        """The latest changes first; the next page is ``after`` the last one's ``id``."""
        if not 1 <= limit <= store.PAGE_LIMIT:
            raise InvalidInput(f"limit={limit}: ask for 1 to {store.PAGE_LIMIT:,} changes at a time")
        if after is not None and not 0 <= after < 2**63:
            raise InvalidInput(f"after={after}: this is not the number of a change")
        for what, text in (("who", who), ("subject", subject)):
            check_storable(what, text or "")
        return await self._db.read(None, store.page, who=who, subject=subject, after=after, limit=limit)

    async def begin(
        self, who: str, action: str, subject: str = "", *, why: str | None = None, via: str = "program"
    ) -> int:
        """Note a change that is about to be made; the number is for `settle`."""
        return await self._db.write(None, store.begin, who=who, via=via, action=action, subject=subject, why=why)

    async def settle(self, number: int, outcome: Mapping[str, Any]) -> None:
        """Note what the change brought; once it is noted, it stays."""
        await self._db.write(None, store.settle, number, outcome)

    @asynccontextmanager
    async def change(
        self, who: str, action: str, subject: str = "", *, why: str | None = None, via: str = "program"
    ) -> AsyncIterator[dict[str, Any]]:
        """``async with app.audit.change(...) as outcome:`` around a change; put into ``outcome`` what it brought."""
        number, outcome = await self.begin(who, action, subject, why=why, via=via), dict[str, Any]()
        try:
            with noted():
                yield outcome
        except BaseException as error:
            await self.settle(number, {**outcome, "error": f"{type(error).__name__}: {error}"[:500]})
            raise
        await self.settle(number, outcome)


class SyncAudit(SyncFacade[Audit]):
    """`Audit` for synchronous programs: the same methods, the same arguments."""

    list = blocking(Audit.list)
    begin = blocking(Audit.begin)
    settle = blocking(Audit.settle)

    @contextmanager
    def change(
        self, who: str, action: str, subject: str = "", *, why: str | None = None, via: str = "program"
    ) -> Iterator[dict[str, Any]]:
        """`Audit.change` for synchronous programs."""
        number, outcome = self.begin(who, action, subject, why=why, via=via), dict[str, Any]()
        try:
            with noted():
                yield outcome
        except BaseException as error:
            self.settle(number, {**outcome, "error": f"{type(error).__name__}: {error}"[:500]})
            raise
        self.settle(number, outcome)
