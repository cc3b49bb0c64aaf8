"""Whether a provider that refused a refresh refuses the application or only that grant (`core.accounts.tokens`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.core.accounts import tokens
from resilient.core.accounts.fuse import APP_REFUSED
from resilient.store.accounts import fuse
from resilient.store.gates import controls as gates

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from resilient.core.base.errors import Failure
    from resilient.engine.accounts.access import Account
    from resilient.engine.accounts.fuse import Fuse
    from resilient.engine.ground.ground import Ground
    from resilient.store.accounts.fuse import Standing
    from resilient.store.accounts.grants import Grant


class Application:
    """Decides what a refusal refuses: one grant, or the application, whose OAuth client the provider knows."""

    def __init__(self, ground: Ground, judge: Fuse) -> None:
        self._ground, self._fuse = ground, judge
        self._witnesses: set[UUID] = set()  # grants that are refreshed only to see whether the application is refused

    async def is_refused(self, account: Account, grant: Grant, failure: Failure) -> bool:
        """Whether the provider refuses the application; if so, the provider is gated."""
        assert account.oauth is not None  # noqa: S101 - it was refreshed
        facts: Standing = await self._run(fuse.standing, grant)
        refusal = tokens.Refusal(
            explicit=tokens.is_explicit(failure, account.oauth), witness=grant.id in self._witnesses,
            tenant_owned=self.is_tenant_owned(account), credible=facts.credible, others=facts.others,
            accepted_lately=facts.accepted_lately,
        )  # fmt: skip
        verdict, provider = tokens.judge(refusal), account.provider.name
        if verdict is tokens.Verdict.OPEN:
            if facts.witnesses:
                return await self._ask_witness(provider, facts.witnesses)
            verdict = tokens.Verdict.APPLICATION
        if verdict is tokens.Verdict.APPLICATION:
            await self._fuse.app_refused(provider, failure.code)
        return verdict is tokens.Verdict.APPLICATION

    async def _ask_witness(self, provider: str, ids: Sequence[UUID]) -> bool:
        """Refresh a grant that has worked; return whether its provider's gate is closed after that."""
        for id_ in ids:
            self._witnesses.add(id_)
            try:
                is_well = await self._fuse.probe([id_])
            finally:
                self._witnesses.discard(id_)
            if await self._run(gates.auth_of, provider) == APP_REFUSED:
                return True
            if is_well is not None:
                break
        return False

    def is_tenant_owned(self, account: Account) -> bool:
        """Whether the customer owns the token endpoint, or the key that signs the requests to it."""
        facts = self._ground.providers[account.provider.name].oauth
        return (facts is not None and facts.at_tenants) or account.bound.grant.flow == "jwt_bearer"

    async def note_accepted(self, name: str) -> None:
        """Note that the provider accepted the application: accounts that waited because it was refused go on."""
        await self._run(fuse.note_accepted, name)

    async def _run(self, fn: Any, *args: Any) -> Any:
        return await self._ground.database.transaction(fn, *args)
