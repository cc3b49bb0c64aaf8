"""What an act is, and the list of all (`acts.py` fills it)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Act:
    """One transaction. ``run(c, d)``; ``again``: what the engine does if it gave up waiting for a lock."""

    name: str
    covers: tuple[str, ...]
    run: Callable[[Any, Any], Any]
    again: Callable[[Any, Any], Any]
    check: Callable[[Any], str | None]
    replays: bool = False  # what is over may end once more


ACTS: dict[str, Act] = {}


def act(*covers: str, again: Callable[[Any, Any], Any] | None = None, check: Any = None, replays: bool = False) -> Any:
    """Register a function of (c, d)."""

    def register(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        name = fn.__name__.strip("_").replace("_", " ")
        ACTS[name] = Act(name, covers, fn, again or fn, check or (lambda _: None), replays)
        return fn

    return register


def nothing(found: Any) -> str | None:
    """What a repair may find."""
    count = found[0] if isinstance(found, tuple) else found
    return f"it had to repair {count}" if count else None


class Refused(Exception):
    """An act that was too late: rolled back, and its caller is told."""


@cache
def covered() -> frozenset[str]:
    """The functions that some act runs."""
    return frozenset(name for one in ACTS.values() for name in one.covers)
