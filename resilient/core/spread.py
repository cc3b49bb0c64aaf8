"""Ticks of many accounts: each has its own, at its own place between two ticks of the schedule.

The place is a hash of schedule and account: the same for every worker and every day, even over the span, so that ten
thousand accounts are no herd. An account's tick lies at or behind the schedule's tick it belongs to, and before the
next one; so each tick of the schedule brings each account one of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from resilient.core import cron
from resilient.core.schedule import Served

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from resilient.core.cron import Ticks
    from resilient.core.schedule import Spec

_WHOLE: Final = 2.0**64


def place(name: str, key: str) -> float:
    """Where between two ticks of schedule ``name`` the account ``key`` has its own: from 0 to below 1."""
    digest = blake2b(f"{name}\x1f{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / _WHOLE


@dataclass(frozen=True, slots=True)
class Window:
    """The ticks of a timing around now, each with the time over which accounts are spread behind it.

    Made once for a batch of accounts: walking a cron expression costs more than all of them.
    """

    beats: tuple[tuple[datetime, timedelta], ...]
    now: datetime

    def serve(self, spec: Spec, next_at: datetime, place: float) -> Served:
        """What becomes of an account's ticks from ``next_at`` until now, and when its next one is."""
        own = [start + span * place for start, span in self.beats]
        due = [tick for tick in own if next_at <= tick <= self.now]
        if spec.catch_up == "all":
            due = due[-cron.MOST :]
        elif spec.catch_up == "skip":
            due = [tick for tick in due[-1:] if self.now - tick <= cron.GRACE]
        else:
            due = due[-1:]
        return Served(due, next(tick for tick in own if tick > self.now))


def window(spec: Spec, since: datetime, now: datetime) -> Window:
    """The ticks that accounts due since ``since`` may have; of many missed ones the newest."""
    most = cron.MOST + 1 if spec.catch_up == "all" else 2
    starts = cron.back(spec.ticks, now, most, since)
    for _ in range(3):
        starts.append(cron.next_after(spec.ticks, starts[-1] if starts else now))
    wanted = spec.spread
    spans = [b - a if wanted is None else min(b - a, wanted) for a, b in pairwise(starts)]
    return Window(tuple(zip(starts, spans, strict=False)), now)


def silent_before(ticks: Ticks, now: datetime, periods: int) -> datetime | None:
    """Who had no success since then had none for ``periods`` whole periods, wherever its place is."""
    back = cron.back(ticks, now, periods + 2)
    return back[0] if len(back) == periods + 2 else None
