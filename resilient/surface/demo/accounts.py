"""The cast: which connected account has which trouble, and when.

The provider (its server side) and the screen read this; the engine under test is told nothing of it.
Accounts that are not listed here are healthy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

PROVIDER: Final = "crm"
HEALTHY: Final = "acme"
THROTTLED: Final = "globex"
DOWN: Final = "initech"
LIMITED: Final = "umbrella"
ENDPOINT: Final = "contacts"
LIMITED_ENDPOINT: Final = "leads"
STORIES: Final = {
    HEALTHY: "healthy, but one answer never comes",
    THROTTLED: "throttled: 429 in five dialects",
    DOWN: "goes down: 503, then nobody listens",
    LIMITED: f"its {LIMITED_ENDPOINT} are limited, the rest flows",
}


def resource_key(account: str, endpoint: str) -> str:
    """``crm/acme`` for contacts, one level deeper for other endpoints: each can be stopped on its own."""
    return f"{PROVIDER}/{account}" + ("" if endpoint == ENDPOINT else f"/{endpoint}")


@dataclass(frozen=True, slots=True)
class Plan:
    """When troubles begin (counted in stored contacts of the account) and how long they last (seconds)."""

    burst: int = 32  # requests the throttled account may send before it must wait
    endpoint_burst: int = 24  # the same for the limited endpoint
    wait: float = 1.0  # how long
    down_after: int = 50
    unavailable: float = 1.5  # 503
    refused: float = 2.5  # then nobody listens
    silent_after: int = 40  # the healthy account's next request is stored and never answered
    latency: float = 0.12  # of a good answer, give or take half

    def to_json(self) -> dict[str, Any]:
        """For the provider's command line."""
        return asdict(self)


def plan(accounts: Iterable[tuple[str, str]], **changes: Any) -> Plan:
    """Troubles that fit the number of contacts (pairs of account and endpoint), so that each of them occurs.

    The throttled account must wait at least five times, once for each dialect, if it has ten contacts or
    more.
    """
    count = Counter(accounts)
    throttled = sum(n for (account, _), n in count.items() if account == THROTTLED)
    found: dict[str, Any] = {
        "burst": max(1, throttled * 2 // 11),
        "endpoint_burst": max(1, count[LIMITED, LIMITED_ENDPOINT] // 4),
        "down_after": sum(n for (account, _), n in count.items() if account == DOWN) // 4,
        "silent_after": sum(n for (account, _), n in count.items() if account == HEALTHY) // 8,
    }
    return Plan(**(found | changes))
