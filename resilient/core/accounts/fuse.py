"""The fuse of a provider's credentials: many grants that die at once are doubted, not believed.

A provider in trouble answers ``invalid_grant`` for accounts that are well. Marking them as dead would send every
customer through a consent page for nothing. So if too many grants die at once, they become suspects, the provider's
gate closes (`SUSPECT_AUTH`), and no alert names them until a probe or an operator decides.

Only grants that have worked count: a wrong key never worked, and says nothing about the provider, however many wrong
keys customers type. The doubt has an end of its own (`is_over`): then each suspect is tried once more, and a second
refusal is believed.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

SUSPECT_AUTH: Final = "suspect_auth"  # a provider's gate: too many of its grants died at once
APP_REFUSED: Final = "app_refused"  # a provider's gate: it refuses the application itself
SHUT: Final = frozenset({SUSPECT_AUTH, APP_REFUSED})
WINDOW: Final = timedelta(minutes=10)  # deaths within it count together
MOST: Final = 5  # deaths that are believed, however few grants there are
SHARE: Final = 50  # if at most one grant in so many died (2 %), the deaths are believed, however many they are
FIRST: Final = timedelta(minutes=1)  # from the gate's closing to the first probe
_LONGEST: Final = timedelta(minutes=10)
_DOUBT: Final = timedelta(minutes=15)  # if no suspect can be probed: healthy accounts must not wait longer
_DOUBT_PROBED: Final = timedelta(hours=6)  # if suspects are probed: one that is well ends the doubt in minutes


def blows(dead: int, well: int) -> bool:
    """Whether so many deaths within `WINDOW` are too many; ``well``: grants that are not dead."""
    return dead > MOST and dead * SHARE > dead + well


def count_limit(dead: int) -> int:
    """The number of grants that are well from which on `blows` is false: no count has to go beyond it."""
    return dead * SHARE


def is_over(shut_for: timedelta, *, probed: bool) -> bool:
    """Whether the gate, shut for so long, opens by itself; ``probed``: some suspect can be refreshed as a probe."""
    return shut_for >= (_DOUBT_PROBED if probed else _DOUBT)


def probe_every(shut_for: timedelta) -> timedelta:
    """How long after one probe the next one is sent: the time for which the gate has been shut, within bounds."""
    return min(max(shut_for, FIRST), _LONGEST)
