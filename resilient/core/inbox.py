"""Where a numbered message stands among those of its key that were taken already."""

from __future__ import annotations

from enum import StrEnum


class Arrival(StrEnum):
    """What a consumer should do with a message."""

    FIRST = "first"  # handle it: it is noted in the same transaction
    DUPLICATE = "duplicate"  # handled before: acknowledge it and do nothing
    OUTDATED = "outdated"  # a later one of its key was handled: acknowledge it, or park it for a person
    EARLY = "early"  # numbers before it are missing: do not acknowledge it, it must come again


def place(number: int, taken: int, *, gapless: bool) -> Arrival:
    """``taken`` is the highest number handled so far; 0: none, so that any number may be the first."""
    if number <= taken:
        return Arrival.OUTDATED
    return Arrival.EARLY if gapless and taken and number > taken + 1 else Arrival.FIRST
