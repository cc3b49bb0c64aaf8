"""Resource keys: paths such as ``github/acct-7/search``, most general first.

A job must be let through by its own key and by every ancestor. Keys have 1 to 4 segments of ``[A-Za-z0-9._:@+-]``;
patterns (for policies and bulk actions) may use ``*`` and ``?`` inside a segment and never cross a slash, except that
a trailing ``/**`` stands for everything below.

No segment is ``.`` or ``..``: browsers and servers take these out of an address (RFC 3986, 5.2.4), so such a resource
would have no page, and a request below its key another address. Rows of earlier versions may have them; `check_stored`
takes these, so that they are shown, run and erased.

A budget that a provider names is a resource below its account: ``github/acct-7/budget:search``.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from resilient.core.base.errors import BadResourceKey
from resilient.core.base.phrases import brief

if TYPE_CHECKING:
    from collections.abc import Collection

MAX_SEGMENTS: Final = 4
MAX_LENGTH: Final = 255
_SHOWN: Final = 2 * MAX_LENGTH  # characters of what is no key, in the error that says so
FAR: Final = "~"  # sorts after every character a key may have
_KEY: Final = re.compile(r"[A-Za-z0-9._:@+-]+(?:/[A-Za-z0-9._:@+-]+){0,3}")
_DOTS: Final = frozenset({".", ".."})
BUDGET: Final = "budget:"
_UNUSUAL: Final = re.compile(r"[^A-Za-z0-9._@+-]")
_PATTERN: Final = re.compile(r"[A-Za-z0-9._:@+*?-]+(?:/[A-Za-z0-9._:@+*?-]+){0,4}")


@lru_cache(maxsize=65536)
def check(key: str) -> str:
    """Return ``key`` if it may be the key of something new, else raise `BadResourceKey`."""
    if has_dots(check_stored(key)):
        raise BadResourceKey(
            f"{key!r} is not a resource key: no segment may be '.' or '..', which browsers and servers take out of an"
            " address; give it another name, such as 'dot'"
        )
    return key


def has_dots(key: str) -> bool:
    """Whether a segment is ``.`` or ``..``."""
    return not _DOTS.isdisjoint(key.split("/"))


@lru_cache(maxsize=65536)
def check_stored(key: str) -> str:
    """Return ``key`` if rows may have it, else raise `BadResourceKey`: for what looks at them, runs or deletes them."""
    if not isinstance(key, str) or len(key) > MAX_LENGTH or not _KEY.fullmatch(key):
        raise BadResourceKey(
            f"{brief(repr(key), _SHOWN)} is not a resource key: use 1 to {MAX_SEGMENTS} segments of letters, digits"
            f" and ._:@+- joined by '/', at most {MAX_LENGTH} characters, such as 'github/acct-7'",
        )
    return key


@lru_cache(maxsize=65536)
def path(key: str) -> tuple[str, ...]:
    """The key and its ancestors, deepest first: ``a/b/c`` gives ``(a/b/c, a/b, a)``."""
    parts = key.split("/")
    return tuple("/".join(parts[:n]) for n in range(len(parts), 0, -1))


@lru_cache(maxsize=65536)
def account(key: str) -> str:
    """The account that the key belongs to, its first two segments; a root is its own."""
    return "/".join(key.split("/", 2)[:2])


def of_budget(account_key: str, name: str) -> str | None:
    """The key of an account's budget; None if that would be no key."""
    key = f"{account_key}/{BUDGET}{_UNUSUAL.sub('-', name)}"
    return key if name and len(key) <= MAX_LENGTH and _KEY.fullmatch(key) else None


def is_budget(key: str) -> bool:
    """Whether ``key`` is a budget's."""
    return key.rpartition("/")[2].startswith(BUDGET)


def ancestors(key: str) -> tuple[str, ...]:
    """Every proper ancestor, deepest first."""
    return path(key)[1:]


def parent(key: str) -> str | None:
    """The key one level up, or None for a root."""
    return key.rpartition("/")[0] or None


def depth(key: str) -> int:
    """How many segments the key has."""
    return key.count("/") + 1


def is_below(key: str, ancestor: str) -> bool:
    """Whether ``key`` is ``ancestor`` or lies below it."""
    return key == ancestor or key.startswith(ancestor + "/")


def matches(key: str, pattern: str) -> bool:
    """Whether ``key`` fits ``pattern``: segment by segment, ``/**`` at the end for everything below."""
    if pattern.endswith("/**"):
        stem = pattern[:-3]
        cut = "/".join(key.split("/")[: depth(stem)])
        return depth(key) > depth(stem) and matches(cut, stem)
    names, patterns = key.split("/"), pattern.split("/")
    return len(names) == len(patterns) and all(fnmatchcase(n, p) for n, p in zip(names, patterns, strict=True))


def serves(key: str, patterns: Collection[str]) -> bool:
    """Whether ``key``, or what it lies below, fits one of the patterns; without any everything does."""
    return not patterns or any(matches(one, pattern) for one in path(key) for pattern in patterns)


def may_hold(key: str, patterns: Collection[str]) -> bool:
    """Whether `serves` is true of ``key``, or may be of something below it."""
    begins = ("/".join(pattern.split("/")[: depth(key)]) for pattern in patterns if depth(pattern) > depth(key))
    return serves(key, patterns) or any(matches(key, begin) for begin in begins)


def each_depth(pattern: str) -> tuple[str, ...]:
    """The patterns of what fits ``pattern`` and of what lies below that, one for each depth, without ``**``."""
    stem, least = (pattern[:-3], 1) if pattern.endswith("/**") else (pattern, 0)
    return tuple(stem + "/*" * n for n in range(least, MAX_SEGMENTS - depth(stem) + 1))


def check_pattern(pattern: str) -> str:
    """Return ``pattern`` if it may match resource keys, else raise `BadResourceKey`."""
    if not isinstance(pattern, str) or not _PATTERN.fullmatch(pattern):
        raise BadResourceKey(
            f"{brief(repr(pattern), _SHOWN)} is not a resource pattern: write a key with * or ?, such as 'github/*'"
        )
    return pattern
