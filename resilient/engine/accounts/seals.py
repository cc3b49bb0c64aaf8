"""Seals: a row of `resilient_connection` is used only as this program wrote it.

The secrets of a grant are encrypted for its row; which account uses that grant, and the details that fill the addresses
its token is sent to, stand in another row. Somebody who can write the database, but lacks the keys, could give one
customer's grant to another account, or have a token sent to a host of their choice. So key, grant and details are
signed by the key ring.

Such a person could also empty the column of the seal. So that a seal is required is noted within the encrypted secrets
(`SEALED`); older code keeps that note. Grants that older code wrote lack it: their connections are used without a seal
until they are connected again, or until `resilient secrets rotate` seals them as they are then. An old copy of such
secrets opens as long as their key is in the ring: a new key, and the removal of the old one, end that.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from resilient.core.base.errors import BadPayload, SecretsUnreadable
from resilient.core.base.loggers import logger
from resilient.engine.ground.sealing import resealed
from resilient.store.accounts import connections, secrets

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.core.accounts.tokens import Credentials
    from resilient.engine.ground.sessions import Transactions
    from resilient.store.accounts.connections import Bound
    from resilient.store.accounts.secrets import KeyRing
    from resilient.store.db.dialect import Dialect


SEALED: Final = "resilient:sealed"  # among a grant's encrypted values; no placeholder has such a name
_PURPOSE: Final = "resilient_connection"


def noted(credentials: Credentials) -> Credentials:
    """The credentials with the note that connections to them are sealed."""
    return replace(credentials, values={**credentials.values, SEALED: "1"})


def is_noted(credentials: Credentials) -> bool:
    """Whether connections to these credentials must be sealed."""
    return SEALED in credentials.values


def seal(ring: KeyRing, key: str, grant_id: UUID, details: Mapping[str, str]) -> str | None:
    """The seal of a connection; None without any key."""
    return ring.mark(_PURPOSE, _content(key, grant_id, details)) if ring else None


def fits(ring: KeyRing, bound: Bound) -> bool:
    """Whether the row is as it was sealed."""
    content = _content(bound.resource_key, bound.grant.id, bound.details)
    return bound.seal is not None and ring.is_mark(bound.seal, _PURPOSE, content)


def require(ring: KeyRing, bound: Bound, credentials: Credentials) -> None:
    """Raise `SecretsUnreadable` for a connection whose row something else has changed."""
    if not ring or not _must_fit(bound, noted=is_noted(credentials)) or fits(ring, bound):
        return
    raise SecretsUnreadable(
        f"the connection of {bound.resource_key} does not fit its seal: its grant or its details were changed in the"
        " database by something else than this program, or the key that sealed it is not among those given (then add"
        f" it); nothing is sent. If it was changed: connect it again, `resilient connect {bound.resource_key}`"
    )


def seal_all(c: Connection, d: Dialect, ring: KeyRing, grant_id: UUID, *, noted_before: bool) -> list[str]:
    """Sign the connections of a grant with the first key, as they are; returns the keys of those that were refused.

    ``noted_before``: they had to be sealed before, so one whose seal does not fit is refused and stays as it is. The
    caller has locked the grant.
    """
    refused = []
    for bound in connections.of_grant(c, d, grant_id):
        if _must_fit(bound, noted=noted_before) and not fits(ring, bound):
            refused.append(bound.resource_key)
        elif not fits(ring, bound) or not ring.is_current(bound.seal or ""):
            made = seal(ring, bound.resource_key, grant_id, bound.details)
            connections.set_seal(c, d, bound.resource_key, made)
    return refused


def _must_fit(bound: Bound, *, noted: bool) -> bool:
    """Whether a connection is refused without its seal.

    Secrets in the app's own table (`CredentialStore`) are read by the account's key: there only details need a seal.
    """
    return bool(bound.details) if bound.grant.secrets is None else noted


def _content(key: str, grant_id: UUID, details: Mapping[str, str]) -> str:
    return json.dumps([key, grant_id.hex, sorted(details.items())], ensure_ascii=True)


# -- payloads ---------------------------------------------------------------------------------------------------------
#
# Sealed payloads under a new key, while everything runs: jobs of every state, and the undos of workflows.
#
# The templates of schedules are not walked over: workers write them with their own first key when they start.

log = logger("connections")


async def reseal_payloads(db: Transactions, ring: KeyRing) -> int:
    """Seal every payload with the first key; returns how many were changed. Those no key opens stay as they are."""
    if not ring:
        return 0
    done, lost, after = 0, 0, None
    while True:
        rows, after = await db.read(None, secrets.sealed_under_other_keys, ring.current, after)
        changed = [await db.write(None, reseal, ring, row) for row in rows]
        done, lost = done + changed.count(True), lost + changed.count(None)
        if after is None:
            break
    for row in await db.read(None, secrets.undos_under_other_keys, ring.current):
        done += bool(await db.write(None, reseal, ring, row))
    if lost:
        log.warning("%d sealed payloads are under a key that is not given here, and stay so", lost)
    return done


def reseal(c: Connection, d: Dialect, ring: KeyRing, row: secrets.SealedRow) -> bool | None:
    """One payload under the first key; False if it has changed meanwhile, None if no key opens it."""
    try:
        text = resealed(ring, row.kind, row.text)
    except BadPayload:
        return None
    return secrets.write_sealed(c, d, row, text)
