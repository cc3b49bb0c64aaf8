"""How long a throttled resource rests, and which throttles are one and the same.

A told time is waited out and a little longer (`retry_after.resume_at`). Told nothing, a resource rests 2 s,
and twice as long each time it is throttled again soon after. However many requests were in flight, they are
one signal: a told time the rest already covers, and a request that was sent before the rest began, change
nothing.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from resilient.core.retry_after import resume_at

if TYPE_CHECKING:
    from datetime import datetime

    from resilient.core.admission import ResourceFacts

FIRST: Final = timedelta(seconds=2)
LONGEST: Final = timedelta(minutes=5)
SOON: Final = timedelta(seconds=60)


def cooled(
    facts: ResourceFacts, told: datetime | None, now: datetime, roll: float, sent_at: datetime | None = None
) -> datetime | None:
    """Until when a throttle makes the resource rest; None if it changes nothing."""
    until, since = facts.blocked_until, facts.blocked_since
    active = until is not None and until > now
    if told is not None and told > now:
        return None if active and until is not None and told <= until else resume_at(told, now, roll)
    if active or (sent_at is not None and since is not None and sent_at <= since):
        return None
    rest = FIRST
    if until is not None and since is not None and now - until < SOON:
        rest = min(LONGEST, max(FIRST, 2 * (until - since)))
    return now + rest / 2 * (1 + roll)
