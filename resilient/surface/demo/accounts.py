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
SINK: Final = "search"  # a destination of events
HEALTHY: Final = "acme"
THROTTLED: Final = "globex"
DOWN: Final = "initech"
LIMITED: Final = "umbrella"
REVOKED: Final = "hooli"
ENDPOINT: Final = "contacts"
LIMITED_ENDPOINT: Final = "leads"
STORIES: Final = {
    HEALTHY: "healthy, but one answer never comes",
    THROTTLED: "throttled: 429 in five dialects",
    DOWN: "goes down: 503, then nobody listens",
    LIMITED: f"its {LIMITED_ENDPOINT} are limited, the rest flows",
    REVOKED: "its owner takes the access back, and gives it again",
}


def story(key: str) -> str:
    """What is to be told about a resource."""
    if key == f"outbox/{SINK}":
        return "events to a webhook that is away for a while"
    return STORIES.get(key.split("/")[1], "healthy") if key.count("/") == 1 else "its endpoint"


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
    token_told: float = 6.0  # seconds an access token is said to last
    token_lives: float = 4.5  # and how long it does
    revoke_after: int = 20  # the account's owner takes the access back
    consent_after: float = 1.5  # seconds until he has read that he must connect again, and did
    outage_after: int = 600  # all accounts' contacts; then the whole provider answers 503
    outage: float = 1.6
    sink_away_after: int = 150  # events
    sink_away: float = 3.0
    people: int = 120  # records of each account that are read in

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
        "revoke_after": sum(n for (account, _), n in count.items() if account == REVOKED) // 3,
        "outage_after": count.total() * 6 // 10,
        "sink_away_after": max(1, count.total() * 15 // 100),
    }
    return Plan(**(found | changes))
