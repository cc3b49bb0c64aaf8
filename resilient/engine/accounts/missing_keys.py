"""Accounts whose secrets need a key that this process lacks, while another process may have it.

It happens when keys are changed, until this process is started anew. A job of such an account goes back, uncharged, to
be run by another process; this one passes over the account for a minute, and then looks again; for longer where there
are hundreds, so that looking leaves the slots to other jobs. The account's gate stays open. Where no other worker
lives, `Grants` shuts it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING, Final

from resilient.core.accounts.tokens import LONGEST_PASSED_OVER, MISSING_KEY
from resilient.core.base.errors import FailureKind, ResourceStopped
from resilient.core.base.loggers import apart
from resilient.core.base.resource_key import is_below
from resilient.core.jobs.outcomes import Snoozed
from resilient.store.accounts.secrets import key_id_of, key_id_of_mark
from resilient.store.inspect import workers
from resilient.wire.requests.request_log import at_account

if TYPE_CHECKING:
    from resilient.engine.ground.ground import Ground
    from resilient.store.accounts.connections import Bound
    from resilient.store.accounts.secrets import KeyRing

GATE: Final = "key"  # of a `ResourceStopped`: this process cannot, others may
SOON: Final = 1.0  # seconds until another worker may run a job of the account
LATER: Final = 45.0  # and one that uses the account beside its own: this worker may meet it again
PASSED_OVER: Final = 60.0  # seconds until this process looks at such an account again
LOOKS: Final = 10.0  # such accounts in a second
_MOST: Final = 20_000  # resources that are passed over at once


def left_to_others(stopped: ResourceStopped, resource: str) -> Snoozed | None:
    """What becomes of a resource's job that was stopped by a missing key; None if something else stopped it."""
    if stopped.gate != GATE:
        return None
    delay = SOON if is_below(resource, stopped.resource) else LATER
    return Snoozed(delay, None, str(stopped), FailureKind.AUTH, MISSING_KEY)


class MissingKeys:
    """The accounts and resources that one process leaves to others, because it lacks the key of their secrets."""

    def __init__(self, ground: Ground, ring: KeyRing) -> None:
        self._ground, self._ring = ground, ring
        self.resources: set[str] = set()  # that are passed over at this moment
        self._logged_at: dict[tuple[str, ...], float] = {}  # by the keys that are missing
        self.monotonic = time.monotonic

    def note(self, key: str) -> bool:
        """Pass over a resource for a while; False if it is passed over already. Call it on an event loop."""
        is_new = key not in self.resources
        if is_new and len(self.resources) < _MOST:
            self.resources.add(key)
            asyncio.get_running_loop().call_later(self.pause(), self.resources.discard, key, context=apart())
        return is_new

    def level(self, bound: Bound | None) -> int:
        """The level of a line about an account: a warning once a minute for the same missing keys, or for none."""
        missing = () if bound is None else self._missing(bound)
        now = self.monotonic()
        if missing and now - self._logged_at.get(missing, -math.inf) < PASSED_OVER:
            return logging.DEBUG
        self._logged_at = {keys: at for keys, at in self._logged_at.items() if now - at < PASSED_OVER}
        self._logged_at[missing] = now
        return logging.WARNING

    def pause(self) -> float:
        """Seconds for which one more is passed over: the more there are, the longer."""
        return min(max(PASSED_OVER, len(self.resources) / LOOKS), LONGEST_PASSED_OVER)

    def note_stop(self, stopped: ResourceStopped, account: str, resource: str) -> None:
        """Pass over the resource of a job that was stopped because the key of its own account is missing."""
        if stopped.gate == GATE and at_account(resource) == account:
            self.note(resource)

    async def are_elsewhere(self, bound: Bound | None) -> bool:
        """Whether this process lacks a key of an account, and a worker of another process may have it."""
        if bound is None or not self._missing(bound):
            return False
        own = [worker.id for worker in self._ground.workers]
        return bool(await self._ground.database.transaction(workers.has_others, own))

    def _missing(self, bound: Bound) -> tuple[str, ...]:
        """The keys of an account that this process lacks."""
        sealed = bound.grant.secrets
        names = [key_id_of(sealed)] if sealed else []
        names += [key_id_of_mark(bound.seal)] if bound.seal else []
        return tuple(sorted({name for name in names if name not in self._ring.key_ids}))
