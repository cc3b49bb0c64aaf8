"""What a server says about its own limits: how much is left, and when it is full again.

Reads the ``x-ratelimit-*`` family under any names a provider uses, "used/limit" fields, combined fields, the
IETF draft's ``RateLimit`` and ``RateLimit-Policy`` Lists, and the draft's two older shapes. Malformed text is
ignored. A budget says what the server said, also when its reset has passed: whoever compares decides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from resilient.core.bounds import BUDGET_NAME
from resilient.core.errors import InvalidInput
from resilient.core.instants import Word, http_date, number, read
from resilient.core.misfit import explained_class
from resilient.core.plain_text import one_line
from resilient.core.structured import Item, parse_dictionary, parse_list
from resilient.core.words import check_number, check_word, in_small_letters

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime, timedelta

STANDARD: Final = "ratelimit"  # the budget of the IETF fields where they carry no name
_USED: Final = re.compile(r"([0-9]{1,15})/([0-9]{1,15})")
_PART: Final = re.compile(r"(?<![A-Za-z])([A-Za-z]+)=([^,;]*)")


class Budget(NamedTuple):
    """One limit as the server sees it after answering this request."""

    name: str
    limit: float | None = None
    remaining: float | None = None
    reset_at: datetime | None = None
    window: float | None = None  # seconds
    unit: str = "requests"  # the draft also knows "content-bytes" and "concurrent-requests"


@explained_class
@dataclass(frozen=True, slots=True)
class BudgetFields:
    """Which header fields one of a provider's budgets is written in.

    ``name``: of the `Limit` it is about. ``limit``, ``remaining``, ``reset`` are fields: how many there are, how many
    are left, and when it is full again, in the dialect ``word``; ``window``: its length in seconds, where nothing
    states it. ``used`` is a field such as ``32/40`` (used of limit), ``combined`` one such as ``total=100;
    remaining=9; resets=41``; ``named_by`` a field whose value replaces ``name`` (GitHub's ``x-ratelimit-resource``).
    """

    name: str
    limit: str = ""
    remaining: str = ""
    reset: str = ""
    word: Word = Word.AUTO
    window: float | None = None
    used: str = ""
    combined: str = ""
    named_by: str = ""
    stated_in: frozenset[str] = field(init=False, repr=False, default=frozenset())

    def __post_init__(self) -> None:
        check_word("BudgetFields", "word", self.word, Word)
        check_number("BudgetFields", "window", self.window)
        in_small_letters(self, "limit", "remaining", "reset", "used", "combined", "named_by")
        if not (self.limit or self.remaining or self.reset or self.used or self.combined):
            raise InvalidInput(f"BudgetFields({self.name!r}): say in which headers it is told: limit=, remaining=, ...")
        names = {self.limit, self.remaining, self.reset, self.used, self.combined} - {""}
        object.__setattr__(self, "stated_in", frozenset(names))


GENERIC: Final = tuple(
    BudgetFields(stem, limit=f"{stem}-limit", remaining=f"{stem}-remaining", reset=f"{stem}-reset")
    for stem in (STANDARD, "x-ratelimit", "x-rate-limit")
)


class Fields(dict[str, str]):
    """Response headers under lower-case names; repeated ones joined by a comma, as RFC 9110 permits."""

    @classmethod
    def of(cls, headers: Mapping[str, str] | Iterable[tuple[str, str]]) -> Fields:
        """``headers`` as `Fields`; free if they already are."""
        if isinstance(headers, Fields):
            return headers
        pairs = headers.items() if hasattr(headers, "items") else headers
        found = cls()
        for name, value in pairs:
            key = name.lower()
            found[key] = f"{found[key]}, {value}" if key in found else value
        return found

    def skew(self, now: datetime) -> timedelta:
        """How far our clock is ahead of the server's, by its ``Date``.

        A response with an ``Age`` comes out of a cache: its Date says nothing about now.
        """
        sent = http_date(self["date"], now) if "date" in self and "age" not in self else None
        return now - (sent or now)


def budgets(
    headers: Mapping[str, str], now: datetime, *, fields: Sequence[BudgetFields] = GENERIC
) -> tuple[Budget, ...]:
    """Every budget these headers state. Never raises; ``fields`` are the provider's names for them."""
    found = Fields.of(headers)
    skew = found.skew(now) if "date" in found else now - now
    named = [b for f in fields if (b := _budget(f, found, now, skew)) is not None]
    if STANDARD in found or f"{STANDARD}-policy" in found:
        named = _with_standard(named, found, now)
    return tuple(named)


def _budget(f: BudgetFields, found: Fields, now: datetime, skew: timedelta) -> Budget | None:
    if f.stated_in.isdisjoint(found):
        return None
    limit_text = found.get(f.limit, "")
    limit, remaining = _leading(limit_text), _number(found.get(f.remaining))
    reset: object = found.get(f.reset)
    window = f.window
    if f.used and (m := _USED.search(found.get(f.used, ""))) is not None:
        limit, remaining = float(m[2]), max(0.0, float(m[2]) - float(m[1]))
    if f.combined and (parts := dict(_PART.findall(found.get(f.combined, "")))):
        limit = _number(parts.get("total", parts.get("limit")))
        remaining, reset = _number(parts.get("remaining")), parts.get("resets", parts.get("reset"))
    reset_at = read(reset, f.word, now, skew)
    if limit is None and remaining is None and reset_at is None:
        return None
    if window is None and limit is not None and ";" in limit_text:
        window = _window(parse_list(limit_text), limit)
    return Budget(one_line((found.get(f.named_by) or f.name)[: BUDGET_NAME.value]), limit, remaining, reset_at, window)


def _with_standard(named: list[Budget], found: Fields, now: datetime) -> list[Budget]:
    """``named`` and what RateLimit and RateLimit-Policy say; same names are merged, RateLimit's view wins."""
    policy = parse_list(found.get(f"{STANDARD}-policy", ""))
    text = found.get(STANDARD, "")
    merged = {b.name: b for b in named}
    for item in policy or ():
        if isinstance(item.value, str):
            name = one_line(item.value[: BUDGET_NAME.value])
            merged[name] = merged.get(name, Budget(name))._replace(
                limit=_param(item, "q"), window=_param(item, "w"), unit=str(item.params.get("qu", "requests"))
            )
    if (service := parse_list(text)) is not None:
        for item in service:
            if isinstance(item.value, str) and (left := _param(item, "r")) is not None:
                name, reset_at = one_line(item.value[: BUDGET_NAME.value]), _reset(item.params.get("t"), now)
                merged[name] = merged.get(name, Budget(name))._replace(remaining=left, reset_at=reset_at)
    elif (members := parse_dictionary(text)) is not None and "remaining" in members:
        values = {key: member.value for key, member in members.items()}
        limit, left = _integer(values.get("limit")), _integer(values.get("remaining"))
        merged[STANDARD] = Budget(STANDARD, limit, left, _reset(values.get("reset"), now))
    if (plain := merged.get(STANDARD)) is not None and plain.window is None and plain.limit is not None:
        merged[STANDARD] = plain._replace(window=_window(policy, plain.limit))
    return list(merged.values())


def _window(policy: list[Item] | None, limit: float) -> float | None:
    """The window of the older numeric policy (``100;w=60``) that states this limit."""
    for item in policy or ():
        if not isinstance(item.value, (str, bytes, bool)) and item.value == limit and "w" in item.params:
            return _param(item, "w")
    return None


def _param(item: Item, key: str) -> float | None:
    return _integer(item.params.get(key))


def _integer(value: object) -> float | None:
    """What the draft calls a non-negative Integer; nothing else counts, or half a request would be left."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _reset(seconds: object, now: datetime) -> datetime | None:
    return None if _integer(seconds) is None else read(seconds, Word.DELTA_S_FLOAT, now)


def _number(value: object) -> float | None:
    """A number that is not negative: header text in ASCII digits, or a parsed one."""
    if isinstance(value, str):
        return number(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        return float(value)
    return None


def _leading(text: str) -> float | None:
    """The limit in ``100`` and in the older ``100, 100;w=60``."""
    if "," in text or ";" in text:
        text = re.split("[,;]", text, maxsplit=1)[0]
    return number(text) if text else None
