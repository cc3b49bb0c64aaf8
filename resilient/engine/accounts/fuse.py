"""Deaths of grants: who is told of them, when they are doubted, and how a doubt ends.

A death gates the grant's accounts; their alerts and the app's own job (``on_needs_reauth``) are written in the same
transaction. Too many deaths at once (`core.accounts.fuse`) are doubted: the grants are `suspect`, their provider is
gated, and the elected worker probes it. If a suspect can be refreshed, the provider erred. If a suspect is refused
while a grant without a doubt is refreshed, the deaths are real. Where neither can be probed (API keys cannot be
refreshed), an operator decides: ``resilient connections release`` or ``confirm``. If none does, the doubt ends by
itself (`core.accounts.fuse.is_over`): the suspects are used once more, and one that is refused again is dead.
"""

from __future__ import annotations

from datetime import datetime  # noqa: TC003 - pydantic reads annotations at run time
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel

from resilient.core.accounts.fuse import APP_REFUSED, FIRST, SHUT, SUSPECT_AUTH, is_over, probe_every
from resilient.core.accounts.tokens import GrantState
from resilient.core.alerts.rules import of_credentials
from resilient.core.base.errors import DatabaseUnreachable, ResilientError
from resilient.core.base.loggers import logger
from resilient.engine.ground.sessions import Transactions
from resilient.engine.jobs import queue
from resilient.store import alerts
from resilient.store.accounts import fuse as store
from resilient.store.accounts import grants
from resilient.store.accounts.fuse import notices_of
from resilient.store.gates import controls as gates
from resilient.store.gates import resources
from resilient.store.jobs.changes import Cancel, Sweep
from resilient.store.jobs.filters import JobFilter
from resilient.store.schedules import ticks as schedules

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.core.gates.admission import ResourceFacts
    from resilient.engine.accounts.access import Accounts
    from resilient.engine.alerts import Alerts
    from resilient.engine.ground.encoder import JobRequest
    from resilient.engine.ground.ground import Ground
    from resilient.engine.ground.kinds import Kind
    from resilient.store.accounts.grants import Grant
    from resilient.store.db.dialect import Dialect

log = logger("grants")
_PROBED: Final = 3  # suspects in one round of probes, and as many grants without a doubt
_ACCOUNT: Final = "account"  # the tag of a notice: whose customer it tells


class NeedsReauth(BaseModel):
    """The payload of ``Resilient(on_needs_reauth=...)``: an account whose customer has to connect it again.

    ``code`` is the provider's, ``at`` the time at which the engine noticed it.
    """

    resource_key: str
    provider: str
    code: str | None = None
    at: datetime


class Fuse:
    """Judges the deaths of one app's grants."""

    def __init__(
        self,
        ground: Ground,
        alerts: Alerts,
        accounts: Accounts,
        probe: Callable[[str], Awaitable[bool | None]],
        on_needs_reauth: Kind[Any] | None,
    ) -> None:
        """``probe`` refreshes an account and says whether its grant lives: see `Grants.probe`."""
        self._ground, self._alerts, self._accounts = ground, alerts, accounts
        self._probe_account, self._kind = probe, on_needs_reauth
        self._db = Transactions(ground)

    # -- deaths ----------------------------------------------------------------------------------------------

    async def died(self, grant: Grant, code: str | None) -> store.Death:
        """A refresh under the grant's lease was refused for good."""
        return self._report(await self._run(store.die_if_held, grant, code, self), code)

    async def refused(self, grant: Grant, code: str | None, *, certain: bool = False) -> store.Death:
        """A request was refused, and its credentials cannot be renewed. ``certain``: see `die_if_version`."""
        return self._report(await self._run(store.die_if_version, grant, code, self, certain=certain), code)

    def _report(self, death: store.Death, code: str | None) -> store.Death:
        grant = death.grant
        if grant is None or not death.died:
            return death
        if grant.state is GrantState.SUSPECT:
            if death.blown:
                log.error(
                    "too many accounts of %s die at once (%s): none is marked, all wait until a probe or"
                    " `resilient connections release|confirm %s` decides", grant.provider, code, grant.provider,
                )  # fmt: skip
                self._alerts.add(of_credentials(grant.provider, SUSPECT_AUTH, grant.state_since))
        else:
            self._alerts.soon()
            self._ground.poke()
        return death

    def tell(self, c: Connection, d: Dialect, dead: Sequence[Grant]) -> None:
        """See `DeathListener`. Alerts are due at once, the app's jobs after `FIRST`: until then the fuse may blow."""
        accounts = [(key, grant) for grant in dead for key in grants.keys_of(c, d, grant.id)]
        if not accounts:
            return
        if self._alerts.config.wants("needs_reauth"):
            findings = [of_credentials(key, grant.state.value, grant.state_since) for key, grant in accounts]
            alerts.record(c, d, findings, d.now(c), lasting=True)
        if self._kind is not None:
            queue.write(c, d, [self._notice_job(self._kind, key, grant) for key, grant in accounts])

    def hush(self, c: Connection, d: Dialect, provider: str, keys: Sequence[str]) -> None:
        """See `store.accounts.fuse.DeathListener`; alerts are withdrawn by the store."""
        if self._kind is None:
            return
        kind, where = (self._kind.kind,), (notices_of(provider),)
        for key in keys:  # by the index of tags
            waiting = JobFilter(kind=kind, resource=where, state=("scheduled", "ready"), tags=((_ACCOUNT, key),))
            sweep = Sweep(Cancel(), waiting)
            while not sweep.step(c, d):
                pass

    def _notice_job(self, kind: Kind[Any], key: str, grant: Grant) -> JobRequest:
        notice = NeedsReauth(resource_key=key, provider=grant.provider, code=grant.last_code, at=grant.state_since)
        return self._ground.encoder.encode(kind, notice, notices_of(grant.provider), delay=FIRST, tags={_ACCOUNT: key})

    async def app_refused(self, provider: str, code: str | None) -> None:
        """Gate a provider that refuses the application itself: its accounts wait for the operator, no grant is dead."""
        log.error("%s refuses this app (%s): check client_id and client_secret", provider, code)
        since = await self._run(_gate_provider, provider, APP_REFUSED)
        self._alerts.add(of_credentials(provider, APP_REFUSED, since))

    # -- doubts ----------------------------------------------------------------------------------------------

    async def keep_house(self) -> None:
        """Probe the providers whose credentials are gated, at growing intervals; the elected worker calls it."""
        names = sorted(self._ground.providers)
        rows = await self._run(resources.read, names) if names else {}
        for name, facts in rows.items():
            try:
                if facts.auth in SHUT and await self._run(_is_turn, name, facts):
                    await self._probe_provider(name, facts)
            except DatabaseUnreachable:
                raise
            except Exception as error:  # noqa: BLE001 - one provider's keeps no other waiting; the next round probes again
                log.warning("cannot find out whether %s is well again (%s)", name, _log_text(error))

    async def _probe_provider(self, provider: str, facts: ResourceFacts) -> None:
        """Probe once; see the top of this file for what the answers mean."""
        if facts.auth == APP_REFUSED:
            await self.probe(await self._run(store.well, provider))
            return
        suspects = await self._run(store.suspects, provider)
        answers = [await self._probe_grant(one) for one in suspects[:_PROBED]]
        _require_some(answers)
        if True in answers or not suspects:
            cleared = await self.release(provider, believed=True)
            log.warning("%s erred: %d grants that it had called dead are used again", provider, cleared)
        elif False in answers and await self.probe(await self._run(store.well, provider)):
            dead = await self.confirm(provider)
            log.warning("%s is well and still refuses %d grants: their customers are told", provider, dead)
            self._alerts.soon()
        elif await self._run(_is_over, provider):
            cleared = await self.release(provider, believed=False)
            log.warning("nobody can say whether %s erred: %d grants are tried once more", provider, cleared)

    async def release(self, provider: str, *, believed: bool) -> int:
        """See `Connections.release`."""
        cleared = await self._db.write(None, store.release, provider, believed=believed)
        self._accounts.forget()
        return len(cleared)

    async def confirm(self, provider: str) -> int:
        """See `Connections.confirm`."""
        dead = await self._db.write(None, store.confirm, provider, self)
        self._accounts.forget()
        return len(dead)

    async def probe(self, ids: Sequence[UUID]) -> bool | None:
        """Probe these grants until one gives an answer; return whether it lives, or None if none can be probed."""
        answers: list[bool | Exception | None] = []
        for id_ in ids[:_PROBED]:
            answer = await self._probe_grant(id_)
            if isinstance(answer, bool):
                return answer
            answers.append(answer)
        _require_some(answers)
        return None

    async def _probe_grant(self, id_: UUID) -> bool | Exception | None:
        """Whether a grant lives; None if it cannot be probed; the error of its account, which is no other account's."""
        try:
            keys = await self._run(grants.keys_of, id_)
            return await self._probe_account(keys[0]) if keys else None
        except DatabaseUnreachable:
            raise
        except Exception as error:  # noqa: BLE001 - raised if every account has one
            log.warning("cannot probe grant %s (%s)", id_, _log_text(error))
            return error

    async def _run(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        return await self._ground.database.transaction(fn, *args, **kwargs)


def _require_some(answers: Sequence[bool | Exception | None]) -> None:
    """Raise the first error if there is nothing else: then nobody could be asked."""
    errors = [one for one in answers if isinstance(one, Exception)]
    if errors and len(errors) == len(answers):
        raise errors[0]


def _log_text(error: Exception) -> object:
    """What a log may say of it: the text of the program's own errors may hold secrets."""
    return error if isinstance(error, ResilientError) else type(error).__name__


def _gate_provider(c: Connection, d: Dialect, provider: str, auth: str) -> datetime:
    if gates.lock_auth(c, d, provider) not in SHUT:
        gates.set_auth(c, d, provider, auth)
    return d.now(c)


def _is_over(c: Connection, d: Dialect, provider: str) -> bool:
    """Whether the doubt about a provider's grants ends by itself."""
    facts, now = resources.read(c, d, [provider])[provider], d.now(c)
    return is_over(now - (facts.auth_since or now), probed=store.can_be_asked(c, d, provider))


def _is_turn(c: Connection, d: Dialect, provider: str, facts: ResourceFacts) -> bool:
    """Whether this worker is to probe the provider now."""
    now = d.now(c)
    shut_for = now - (facts.auth_since or now)
    return shut_for >= FIRST and schedules.elect(c, d, store.chore(provider), probe_every(shut_for))
