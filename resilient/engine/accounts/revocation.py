"""A refresh that ends after its grant was given up: its tokens are revoked, because nobody keeps them.

`Connections.disconnect` revokes what is stored. A refresh that is under way meanwhile brings newer tokens, which the
provider would take for as long as they last. Not if the account has other credentials by now, whichever way it came to
them: many a provider would revoke all tokens of the application with the older one. Of a grant that several accounts
share its owner's count (`sharing.py`). Best effort: a failure is logged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.core.accounts import tokens
from resilient.core.accounts.tokens import GrantState
from resilient.core.base.loggers import logger
from resilient.store.accounts import connections, grants

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.core.accounts.tokens import Credentials
    from resilient.core.base.errors import Failure
    from resilient.core.provider.auth import OAuth2
    from resilient.engine.accounts.access import Account
    from resilient.engine.accounts.token_endpoints import TokenEndpoints
    from resilient.engine.ground.ground import Ground
    from resilient.store.accounts.grants import Grant
    from resilient.store.db.dialect import Dialect

log = logger("grants")


async def revoke_if_unwanted(
    endpoints: TokenEndpoints,
    ground: Ground,
    account: Account,
    oauth: OAuth2,
    before: Grant,
    old: Credentials,
    fresh: Credentials,
) -> None:
    """Revoke what a refresh of an account brought, if its grant was given up or deleted since then (``before``)."""
    key, secret = account.bound.resource_key, tokens.revocable(fresh, before.flow)
    if not oauth.revoke_url or not secret or secret == tokens.revocable(old, before.flow):
        return
    failure: Failure | Exception | None
    try:
        now = await ground.database.transaction(_unwanted_at, account.owners or (key,), before)
        if now is None:
            return
        failure = await endpoints.client_of(before.provider).revoke(oauth, secret, now)
    except Exception as error:  # noqa: BLE001 - the refresh is over, whatever becomes of its tokens
        failure = error
    if failure is None:
        log.info("%s was disconnected during a refresh: the token that came was revoked", key)
    else:
        reason = type(failure).__name__ if isinstance(failure, Exception) else failure.code
        log.warning("%s was disconnected during a refresh: the token that came could not be revoked (%s)", key, reason)


def _unwanted_at(c: Connection, d: Dialect, owners: Sequence[str], before: Grant) -> datetime | None:
    """The time; None if what the refresh brought is wanted."""
    return None if _is_wanted(c, d, owners, before) else d.now(c)


def _is_wanted(c: Connection, d: Dialect, owners: Sequence[str], before: Grant) -> bool:
    """Whether the grant is still there, or an owner of it uses another one.

    What a guest of it uses by now says nothing about the owners.
    """
    row = grants.read(c, d, before.id)
    if row is not None and (row.state is not GrantState.REVOKED or grants.keys_of(c, d, row.id)):
        return row.state is not GrantState.REVOKED
    present = [connections.find(c, d, key) for key in owners]
    return any(one is not None and one.grant.state is not GrantState.REVOKED for one in present)
