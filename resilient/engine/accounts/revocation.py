"""A refresh that ends after its grant was given up: its tokens are revoked, because nobody keeps them.

`Connections.disconnect` revokes what is stored. A refresh that is under way meanwhile brings newer tokens, which the
provider would take for as long as they last. Not if somebody connected the account anew: many a provider would revoke
all tokens of the application with the older one. Best effort: a failure is logged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from resilient.core.accounts import tokens
from resilient.core.accounts.tokens import GrantState
from resilient.core.base.loggers import logger
from resilient.store.accounts import grants

if TYPE_CHECKING:
    from resilient.core.accounts.tokens import Credentials
    from resilient.core.base.errors import Failure
    from resilient.engine.accounts.grants import Grants
    from resilient.engine.ground.ground import Ground
    from resilient.store.accounts.grants import Grant

log = logger("grants")


async def revoke_if_unwanted(
    of_app: Grants, ground: Ground, key: str, before: Grant, old: Credentials, fresh: Credentials
) -> Literal[True]:
    """Revoke what a refresh brought, if its grant was given up or deleted since it began (``before``)."""
    account, secret = of_app.accounts.peek(key), tokens.revocable(fresh, before.flow)
    oauth = None if account is None else account.provider.oauth
    if oauth is None or not oauth.revoke_url or not secret or secret == tokens.revocable(old, before.flow):
        return True
    failure: Failure | Exception | None
    try:
        row: Grant | None = await ground.database.transaction(grants.read, before.id)
        if row is not None and row.state is not GrantState.REVOKED:
            return True
        failure = await of_app.client_of(before.provider).revoke(oauth, secret, ground.now())
    except Exception as error:  # noqa: BLE001 - the refresh is over, whatever becomes of its tokens
        failure = error
    if failure is None:
        log.info("%s was disconnected during a refresh: the token that came was revoked", key)
    else:
        reason = type(failure).__name__ if isinstance(failure, Exception) else failure.code
        log.warning("%s was disconnected during a refresh: the token that came could not be revoked (%s)", key, reason)
    return True
