"""Sealed payloads under a new key, while everything runs: jobs of every state, and the undos of workflows.

The templates of schedules are not walked over: workers write them with their own first key when they start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.core.base.errors import BadPayload
from resilient.core.base.loggers import logger
from resilient.engine.ground.sealing import resealed
from resilient.store.jobs import sealed

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from resilient.engine.ground.sessions import Transactions
    from resilient.store.accounts.secrets import KeyRing
    from resilient.store.db.dialect import Dialect

log = logger("connections")


async def reseal_payloads(db: Transactions, ring: KeyRing) -> int:
    """Seal every payload with the first key; returns how many were changed. Those no key opens stay as they are."""
    if not ring:
        return 0
    done, lost, after = 0, 0, None
    while True:
        rows, after = await db.read(None, sealed.under_other_keys, ring.current, after)
        changed = [await db.write(None, reseal, ring, row) for row in rows]
        done, lost = done + changed.count(True), lost + changed.count(None)
        if after is None:
            break
    for row in await db.read(None, sealed.undos_under_other_keys, ring.current):
        done += bool(await db.write(None, reseal, ring, row))
    if lost:
        log.warning("%d sealed payloads are under a key that is not given here, and stay so", lost)
    return done


def reseal(c: Connection, d: Dialect, ring: KeyRing, row: sealed.SealedRow) -> bool | None:
    """One payload under the first key; False if it has changed meanwhile, None if no key opens it."""
    try:
        text = resealed(ring, row.kind, row.text)
    except BadPayload:
        return None
    return sealed.write(c, d, row, text)
