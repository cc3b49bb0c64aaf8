"""What a server says about its own limits: how much is left, and when it is full again.

Reads the ``x-ratelimit-*`` family under any names a provider uses, "used/limit" fields, combined fields, the
IETF draft's ``RateLimit`` and ``RateLimit-Policy`` Lists, and the draft's two older shapes. Malformed text is
ignored. A budget is what the server stated, also when its reset has passed: its user compares that with the time.
"""

from __future__ import annotations

import re
from base64 import b64decode
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote_to_bytes

from resilient.core.base.bounds import BUDGET_NAME, STRUCTURED_FIELD, believed_wait
from resilient.core.base.errors import InvalidInput
from resilient.core.base.instants import Word, http_date, number, read
from resilient.core.base.misfit import check_number, check_word, explained_class, in_small_letters
from resilient.core.base.phrases import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime, timedelta


# -- structured fields ------------------------------------------------------------------------------------------------
#
# RFC 9651, the part that rate-limit fields need: Lists and Dictionaries of Items with parameters; inner lists count as
# malformed. A field that breaks the grammar is None as a whole, as the RFC demands: half of a field is worse than none.


class Date(NamedTuple):
    """A Date (RFC 9651, 3.3.7): seconds since 1970."""

    seconds: int


Bare = str | int | float | bool | bytes | Date

_SPACE: Final = re.compile(r" *")  # before a parameter
_BLANKS: Final = re.compile(r"[ \t]*")  # around a comma
_KEY: Final = re.compile(r"[a-z*][a-z0-9_\-.*]*")
_STRING: Final = re.compile(r'"((?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
_NUMBER: Final = re.compile(r"-?(?:[0-9]{1,12}\.[0-9]{1,3}|[0-9]{1,15})")
_DATE: Final = re.compile(r"@(-?[0-9]{1,15})")
_DISPLAY: Final = re.compile(r'%"((?:[\x20-\x21\x23-\x24\x26-\x7e]|%[0-9a-f]{2})*)"')
_TOKEN: Final = re.compile(r"[A-Za-z*][A-Za-z0-9!#$%&'*+\-.^_`|~:/]*")
_BYTES: Final = re.compile(r":[A-Za-z0-9+/]*={0,2}:")
_BOOLEAN: Final = re.compile(r"\?[01]")


class Item(NamedTuple):
    """A bare value with its parameters. Tokens are text like strings."""

    value: Bare
    params: dict[str, Bare]


class _Malformed(Exception):
    """Never leaves this module: the field becomes None."""


class _Reader:
    """Walks over a field from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def take(self, pattern: re.Pattern[str]) -> str | None:
        if (m := pattern.match(self.text, self.at)) is None:
            return None
        self.at = m.end()
        return m.group()

    def eat(self, char: str) -> bool:
        if not self.text.startswith(char, self.at):
            return False
        self.at += 1
        return True

    def key(self) -> str:
        if (key := self.take(_KEY)) is None:
            raise _Malformed
        return key

    def bare(self) -> Bare:  # noqa: PLR0911 - one for each type
        if (text := self.take(_STRING)) is not None:
            return re.sub(r'\\(["\\])', r"\1", text[1:-1])
        if (text := self.take(_NUMBER)) is not None:
            return float(text) if "." in text else int(text)
        if (text := self.take(_BOOLEAN)) is not None:
            return text == "?1"
        if (text := self.take(_BYTES)) is not None:
            return self.decoded(text[1:-1])
        if (text := self.take(_TOKEN)) is not None:
            return text
        if (text := self.take(_DATE)) is not None:
            return Date(int(text[1:]))
        if (text := self.take(_DISPLAY)) is not None:
            return self.display(text[2:-1])
        raise _Malformed

    def decoded(self, text: str) -> bytes:
        """Base64, whose padding may be missing (RFC 9651, 4.2.7)."""
        letters = text.rstrip("=")
        if len(letters) % 4 == 1 or (text and not letters):  # six bits are no byte
            raise _Malformed
        return b64decode(letters + "=" * (-len(letters) % 4))

    def display(self, text: str) -> str:
        try:
            return unquote_to_bytes(text).decode()
        except UnicodeDecodeError:
            raise _Malformed from None

    def params(self) -> dict[str, Bare]:
        values: dict[str, Bare] = {}
        while self.eat(";"):
            self.take(_SPACE)
            key = self.key()
            values[key] = self.bare() if self.eat("=") else True
        return values

    def item(self) -> Item:
        return Item(self.bare(), self.params())

    def member(self) -> tuple[str, Item]:
        key = self.key()
        return key, self.item() if self.eat("=") else Item(value=True, params=self.params())

    def another(self) -> bool:
        """Whether a comma and another member follow; a trailing comma is malformed."""
        self.take(_BLANKS)
        if self.at == len(self.text):
            return False
        if not self.eat(","):
            raise _Malformed
        self.take(_BLANKS)
        if self.at == len(self.text):
            raise _Malformed
        return True


def parse_list(text: str) -> list[Item] | None:
    """The Items of a List field, or None if it is malformed or empty."""
    if not (text := text.strip(" ")) or len(text) > STRUCTURED_FIELD.value:
        return None
    reader = _Reader(text)
    try:
        items = [reader.item()]
        while reader.another():
            items.append(reader.item())
    except _Malformed:
        return None
    return items


def parse_dictionary(text: str) -> dict[str, Item] | None:
    """The members of a Dictionary field (the last of a name wins), or None if it is malformed or empty."""
    if not (text := text.strip(" ")) or len(text) > STRUCTURED_FIELD.value:
        return None
    reader = _Reader(text)
    try:
        members = dict([reader.member()])
        while reader.another():
            members.update([reader.member()])
    except _Malformed:
        return None
    return members


# -- budgets ----------------------------------------------------------------------------------------------------------

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
        """``headers`` as `Fields`; the same object if they already are."""
        if isinstance(headers, Fields):
            return headers
        pairs = headers.items() if hasattr(headers, "items") else headers
        fields = cls()
        for name, value in pairs:
            key = name.lower()
            fields[key] = f"{fields[key]}, {value}" if key in fields else value
        return fields

    def skew(self, now: datetime) -> timedelta:
        """How far our clock is ahead of the server's, by its ``Date``.

        It is zero without a Date, and for a response with an ``Age``: it comes out of a cache, and its Date is old.
        """
        sent = http_date(self["date"], now) if "date" in self and "age" not in self else None
        return now - (sent or now)


def budgets(
    headers: Mapping[str, str], now: datetime, *, fields: Sequence[BudgetFields] = GENERIC
) -> tuple[Budget, ...]:
    """Every budget these headers state. Never raises; ``fields`` are the provider's names for them."""
    response = Fields.of(headers)
    skew = response.skew(now) if "date" in response else now - now
    named = [b for f in fields if (b := _budget(f, response, now, skew)) is not None]
    if STANDARD in response or f"{STANDARD}-policy" in response:
        named = _with_standard(named, response, now)
    return tuple(named)


def counted_for(headers: Mapping[str, str], *, fields: Sequence[BudgetFields] = GENERIC) -> str:
    """The name of the one budget that a request counted for, as its answer says; "" if it names none, or several."""
    response = Fields.of(headers)
    names = {response[f.named_by] for f in fields if f.named_by and response.get(f.named_by)}
    if not names and STANDARD in response:
        items = parse_list(response[STANDARD]) or ()
        names = {item.value for item in items if isinstance(item.value, str)}
    return one_line(names.pop()[: BUDGET_NAME.value]) if len(names) == 1 else ""


def _budget(f: BudgetFields, response: Fields, now: datetime, skew: timedelta) -> Budget | None:
    if f.stated_in.isdisjoint(response):
        return None
    limit_text = response.get(f.limit, "")
    limit, remaining = _leading(limit_text), _number(response.get(f.remaining))
    reset: object = response.get(f.reset)
    window = f.window
    if f.used and (m := _USED.search(response.get(f.used, ""))) is not None:
        limit, remaining = float(m[2]), max(0.0, float(m[2]) - float(m[1]))
    if f.combined and (parts := dict(_PART.findall(response.get(f.combined, "")))):
        limit = _number(parts.get("total", parts.get("limit")))
        remaining, reset = _number(parts.get("remaining")), parts.get("resets", parts.get("reset"))
    reset_at = read(reset, f.word, now, skew)
    if limit is None and remaining is None and reset_at is None:
        return None
    if window is None and limit is not None and ";" in limit_text:
        window = _window(parse_list(limit_text), limit)
    name = one_line((response.get(f.named_by) or f.name)[: BUDGET_NAME.value])
    return Budget(name, limit, remaining, reset_at, window)


def _with_standard(named: list[Budget], response: Fields, now: datetime) -> list[Budget]:
    """``named`` and the budgets of RateLimit and RateLimit-Policy; of one name, these two win."""
    policy = parse_list(response.get(f"{STANDARD}-policy", ""))
    text = response.get(STANDARD, "")
    merged = {b.name: b for b in named}
    for item in policy or ():
        if isinstance(item.value, str):
            name = one_line(item.value[: BUDGET_NAME.value])
            before = merged.get(name, Budget(name))
            merged[name] = before._replace(
                limit=_param(item, "q"),
                window=before.window or _span(item),
                unit=str(item.params.get("qu", "requests")),
            )
    if (service := parse_list(text)) is not None:
        for item in service:
            if isinstance(item.value, str) and (remaining := _param(item, "r")) is not None:
                name, reset_at = one_line(item.value[: BUDGET_NAME.value]), _reset(item.params.get("t"), now)
                merged[name] = merged.get(name, Budget(name))._replace(remaining=remaining, reset_at=reset_at)
    elif (members := parse_dictionary(text)) is not None and "remaining" in members:
        values = {key: member.value for key, member in members.items()}
        limit, remaining = _integer(values.get("limit")), _integer(values.get("remaining"))
        merged[STANDARD] = Budget(STANDARD, limit, remaining, _reset(values.get("reset"), now))
    if (plain := merged.get(STANDARD)) is not None and plain.window is None and plain.limit is not None:
        merged[STANDARD] = plain._replace(window=_window(policy, plain.limit))
    return list(merged.values())


def _window(policy: list[Item] | None, limit: float) -> float | None:
    """The window of the older numeric policy (``100;w=60``) that states this limit."""
    for item in policy or ():
        if not isinstance(item.value, (str, bytes, bool)) and item.value == limit and "w" in item.params:
            return _span(item)
    return None


def _span(item: Item) -> float | None:
    """The window that an answer states; only facts may say that one is longer than what is believed of a wait."""
    span = _param(item, "w")
    return None if span is None else believed_wait(span)


def _param(item: Item, key: str) -> float | None:
    return _integer(item.params.get(key))


def _integer(value: object) -> float | None:
    """A non-negative Integer of the draft, else None: no fraction of a request is ever left."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _reset(seconds: object, now: datetime) -> datetime | None:
    return None if _integer(seconds) is None else read(seconds, Word.DELTA_S_FLOAT, now)


def _number(text: str | None) -> float | None:
    """The number in a header's text, if that is one in ASCII digits; else None."""
    return None if text is None else number(text)


def _leading(text: str) -> float | None:
    """The limit in ``100`` and in the older ``100, 100;w=60``."""
    if "," in text or ";" in text:
        text = re.split("[,;]", text, maxsplit=1)[0]
    return number(text) if text else None
