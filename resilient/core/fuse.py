"""The fuse of a provider's credentials: many grants that die at once are doubted, not believed.

A provider in trouble answers ``invalid_grant`` for accounts that are well. Marking them would send every customer
through a consent page for nothing, so a death that comes with too many others is held back: the grants are
`suspect`, the provider is gated as `SUSPECT_AUTH`, and nobody is told until a probe or an operator decides.

Only grants that have worked count: keys that never did die alone, however many a customer types. The doubt has an end
of its own (`is_over`): the suspects are tried once more, and who is refused again is believed.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

SUSPECT_AUTH: Final = "suspect_auth"  # a provider's gate: too many of its grants died at once
APP_REFUSED: Final = "app_refused"  # a provider's gate: it refuses the application itself
SHUT: Final = frozenset({SUSPECT_AUTH, APP_REFUSED})
WINDOW: Final = timedelta(minutes=10)  # in which deaths count together
MOST: Final = 5  # deaths that are believed, however few grants there are
SHARE: Final = 50  # one in so many (2 %) is believed, too
FIRST: Final = timedelta(minutes=1)  # from the gate's closing to the first probe
_LONGEST: Final = timedelta(minutes=10)
_DOUBT: Final = timedelta(minutes=15)  # where nobody can be asked: healthy accounts wait for nothing
_DOUBT_PROBED: Final = timedelta(hours=6)  # where suspects are asked: a grant that is well would end it in minutes


def blows(dead: int, well: int) -> bool:
    """Whether so many deaths within `WINDOW` are too many; ``well``: grants that are not dead."""
    return dead > MOST and dead * SHARE > dead + well


def enough(dead: int) -> int:
    """How many grants that are well settle the question: nobody has to count more of them."""
    return dead * SHARE


def is_over(shut_for: timedelta, *, probed: bool) -> bool:
    """Whether the gate opens by itself; ``probed``: some suspect can be refreshed to find out."""
    return shut_for >= (_DOUBT_PROBED if probed else _DOUBT)


def probe_every(shut_for: timedelta) -> timedelta:
    """How long after one probe the next one is sent: as long again as the gate was shut, within bounds."""
    return min(max(shut_for, FIRST), _LONGEST)
