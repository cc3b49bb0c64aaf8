"""What resource keys stand for that no program has chosen: the engine made them, and a person meets them in lists."""

from __future__ import annotations

from resilient.core.base.resource_key import BUDGET
from resilient.core.events.message import RESOURCE


def meaning(key: str) -> str:
    """What a key of the engine's own stands for; empty for any other."""
    root, _, below = key.partition("/")
    last = below.rpartition("/")[2]
    provider, _, kind = root.partition(":")
    if kind == "token" or kind.startswith("token@"):
        return f"the token endpoint of {provider}: its tokens are fetched and refreshed there"
    if last.startswith(BUDGET):
        return f"what counts for the budget {last.removeprefix(BUDGET)!r} that {root} names in its answers"
    if root == RESOURCE and below:
        return f"the destination of events {below!r}"
    return ""
