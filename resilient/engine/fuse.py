"""Deaths of grants, as the engine sees them: who is told, what is held back, and how a doubt ends.

One death marks its accounts; their alerts and the app's own job (``on_needs_reauth``) are written in the same
transaction. Of too many at once (`core.fuse`) none is believed: the provider is gated, the elected worker probes it. A
suspect that can be refreshed after all shows that the provider erred; one that is dead still, while a grant that
nobody doubts is refreshed as ever, shows that it knows what it says. Where neither can be had (API keys cannot be
refreshed), an operator decides: ``resilient connections release`` or ``confirm``; if none does, the doubt ends by
itself (`core.fuse.is_over`): the suspects are tried once more, and who is refused again is believed.
"""

from __future__ import annotations

import logging
from datetime import datetime  # noqa: TC003 - pydantic reads annotations at run time
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel

from resilient.core.alerts import of_credentials
from resilient.core.errors import ResilientError
from resilient.core.fuse import APP_REFUSED, FIRST, SHUT, SUSPECT_AUTH, is_over, probe_every
from resilient.core.tokens import GrantState
from resilient.engine import writing
from resilient.store import alerts, gates, grants, resources, schedules
from resilient.store import fuse as store
from resilient.store.changes import Cancel, Sweep
from resilient.store.filters import JobFilter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.core.admission import ResourceFacts
    from resilient.engine.app import Resilient
    from resilient.engine.enqueue import Ordered
    from resilient.engine.handler import Kind
    from resilient.store.dialect import Dialect
    from resilient.store.grants import Grant

log = logging.getLogger("resilient.grants")
_ASKED: Final = 3  # grants of a sort in one round of probes


class NeedsReauth(BaseModel):
    """The payload of ``Resilient(on_needs_reauth=...)``: an account whose customer has to connect it again.

    ``code`` is the provider's, ``at`` when it was found out.
    """

    resource_key: str
    provider: str
    code: str | None = None
    at: datetime


class Fuse:
    """Judges the deaths of one app's grants."""

    def __init__(self, app: Resilient, on_needs_reauth: Kind[Any] | None) -> None:
        self._app, self._kind = app, on_needs_reauth

    # -- deaths ----------------------------------------------------------------------------------------------

    async def died(self, held: Grant, code: str | None) -> store.Death:
        """A refresh under this lease found its grant dead."""
        return self._said(await self._run(store.die_if_held, held, code, self), code)

    async def refused(self, known: Grant, code: str | None) -> store.Death:
        """Credentials that cannot be renewed are refused."""
        return self._said(await self._run(store.die_if_version, known, code, self), code)

    def _said(self, death: store.Death, code: str | None) -> store.Death:
        grant = death.grant
        if grant is None or not death.died:
            return death
        if grant.state is GrantState.SUSPECT:
            if death.blown:
                log.error(
                    "too many accounts of %s die at once (%s): none is marked, all wait until a probe or"
                    " `resilient connections release|confirm %s` decides", grant.provider, code, grant.provider,
                )  # fmt: skip
                self._app.alerts.found(of_credentials(grant.provider, SUSPECT_AUTH, grant.state_since))
        else:
            self._app.alerts.soon()
            self._app.poke()
        return death

    def tell(self, c: Connection, d: Dialect, dead: Sequence[Grant]) -> None:
        """See `store.fuse.Voice`: alerts, and the app's own jobs a minute later: until then the fuse may blow."""
        accounts = [(key, grant) for grant in dead for key in grants.keys_of(c, d, grant.id)]
        if not accounts:
            return
        if self._app.alerts.config.wants("needs_reauth"):
            found = [of_credentials(key, grant.state.value, grant.state_since) for key, grant in accounts]
            alerts.record(c, d, found, d.now(c), lasting=True)
        if self._kind is not None:
            writing.write(c, d, [self._ordered(self._kind, key, grant) for key, grant in accounts])

    def hush(self, c: Connection, d: Dialect, provider: str) -> None:
        """See `store.fuse.Voice`; alerts are withdrawn by the store."""
        if self._kind is not None:
            waiting = JobFilter(kind=(self._kind.kind,), resource=(_told_by(provider),), state=("scheduled", "ready"))
            sweep = Sweep(Cancel(), waiting)
            while not sweep.step(c, d):
                pass

    def _ordered(self, kind: Kind[Any], key: str, grant: Grant) -> Ordered:
        lost = NeedsReauth(resource_key=key, provider=grant.provider, code=grant.last_code, at=grant.state_since)
        return self._app._encoder.encode(kind, lost, _told_by(grant.provider), delay=FIRST)  # noqa: SLF001 - of this app

    async def app_refused(self, provider: str, code: str | None) -> None:
        """The application itself is refused: no account is marked, all of them wait for the operator."""
        log.error("%s refuses this app (%s): check client_id and client_secret", provider, code)
        since = await self._run(_shut, provider, APP_REFUSED)
        self._app.alerts.found(of_credentials(provider, APP_REFUSED, since))

    # -- doubts ----------------------------------------------------------------------------------------------

    async def keep_house(self) -> None:
        """Probe the providers whose credentials are gated, now and then; by whichever worker was elected."""
        names = sorted(self._app.providers)
        known = await self._run(resources.read, names) if names else {}
        for name, facts in known.items():
            if facts.auth in SHUT and await self._run(_turn, name, facts):
                try:
                    await self._probe(name, facts)
                except ResilientError as error:  # a key is missing here, or the database is away: the next round
                    log.warning("cannot find out whether %s is well again (%s)", name, error)

    async def _probe(self, provider: str, facts: ResourceFacts) -> None:
        """One round of questions; see the top of this file."""
        if facts.auth == APP_REFUSED:
            await self.lives(await self._run(store.well, provider))
            return
        suspects = await self._run(store.suspects, provider)
        told = [await self.lives([one]) for one in suspects[:_ASKED]]
        if True in told or not suspects:
            cleared = await self._app.connections.release(provider)
            log.warning("%s erred: %d grants that it had called dead are used again", provider, cleared)
        elif False in told and await self.lives(await self._run(store.well, provider)):
            dead = await self._app.connections.confirm(provider)
            log.warning("%s is well and still refuses %d grants: their customers are told", provider, dead)
            self._app.alerts.soon()
        elif await self._run(_is_over, provider):
            cleared = await self._app.connections.release(provider, believed=False)
            log.warning("nobody can say whether %s erred: %d grants are tried once more", provider, cleared)

    async def lives(self, ids: Sequence[UUID]) -> bool | None:
        """Whether the first of these grants that can be asked lives; None if none can."""
        for id_ in ids[:_ASKED]:
            keys = await self._run(grants.keys_of, id_)
            lives = await self._app.grants.probe(keys[0]) if keys else None
            if lives is not None:
                return lives
        return None

    async def _run(self, fn: Any, *args: Any) -> Any:
        return await self._app.database.transaction(fn, *args)


def _told_by(provider: str) -> str:
    """The resource of the jobs that tell customers."""
    return f"connections/{provider}"


def _shut(c: Connection, d: Dialect, provider: str, auth: str) -> datetime:
    if gates.auth_of(c, d, provider) not in SHUT:
        gates.set_auth(c, d, provider, auth)
    return d.now(c)


def _is_over(c: Connection, d: Dialect, provider: str) -> bool:
    """Whether the doubt about a provider's grants ends by itself."""
    facts, now = resources.read(c, d, [provider])[provider], d.now(c)
    return is_over(now - (facts.auth_since or now), probed=store.can_be_asked(c, d, provider))


def _turn(c: Connection, d: Dialect, provider: str, facts: ResourceFacts) -> bool:
    """Whether this caller probes the provider now."""
    now = d.now(c)
    shut_for = now - (facts.auth_since or now)
    return shut_for >= FIRST and schedules.elect(c, d, store.chore(provider), probe_every(shut_for))
