"""Five dialects of "come back later", as servers speak them.

Retry-After in seconds and as an HTTP-date (RFC 9110, 10.2.3), ``retry-after-ms`` (OpenAI, Azure), the
structured ``RateLimit`` fields (draft-ietf-httpapi-ratelimit-headers-10), and ``x-ratelimit-reset`` as
epoch seconds (GitHub).
"""

from __future__ import annotations

import math
from email.utils import formatdate
from enum import Enum
from typing import Final


class Dialect(Enum):
    """One way of saying when to come back."""

    SECONDS = "retry-after: seconds"
    DATE = "retry-after: date"
    MILLISECONDS = "retry-after-ms"
    RATELIMIT = "ratelimit fields"
    EPOCH = "x-ratelimit-reset"

    def until(self, now: float, wait: float) -> float:
        """The end of a wait of at least ``wait`` seconds that this dialect can state (epoch seconds)."""
        if self in (Dialect.DATE, Dialect.EPOCH):
            return float(math.ceil(now + wait))
        return now + (wait if self is Dialect.MILLISECONDS else math.ceil(wait))


DIALECTS: Final = tuple(Dialect)


def wait_headers(dialect: Dialect, until: float, now: float, quota: int) -> dict[str, str]:
    """The fields of a 429 that say "not before ``until``" (epoch seconds)."""
    seconds = str(math.ceil(until - now))
    match dialect:
        case Dialect.SECONDS:
            return {"retry-after": seconds}
        case Dialect.DATE:
            return {"retry-after": formatdate(math.ceil(until), usegmt=True)}
        case Dialect.MILLISECONDS:
            return {"retry-after-ms": str(math.ceil((until - now) * 1000))}
        case Dialect.RATELIMIT:
            return {
                "ratelimit-policy": f'"burst";q={quota};w={seconds}',
                "ratelimit": f'"burst";r=0;t={seconds}',
            }
        case Dialect.EPOCH:
            return {"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(math.ceil(until))}
