"""How a provider lists what changed since the last pass: facts about its cursors.

A cursor either comes from the provider (a token, a link) or is made of the records (the newest time stamp). With a
cursor that is made of records, passes must overlap: otherwise one of two records of a second (or of a minute, if the
provider counts in minutes) is lost between them. Most ways do not show deletions; `deletions` says so, because a sync
that does not know it keeps records that are gone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from resilient.core.base.body import pick
from resilient.core.base.errors import InvalidInput
from resilient.core.base.misfit import check_braces, check_number, check_paths, check_word, explained_class

# -- positions --------------------------------------------------------------------------------------------------------
#
# Positions in a stream as its records write them: times and numbers, compared and moved, in their own spelling.

# Numbers from here on are milliseconds, microseconds, nanoseconds; below they are seconds. A time of our age is in one.
_UNITS: Final = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))
_MILLI: Final = 3  # digits
_LONGEST: Final = 40  # digits of an id or a time


def _unit(number: float) -> float:
    """How many of it are a second."""
    return next((unit for least, unit in _UNITS if abs(number) >= least), 1.0)


def instant(value: str | None) -> float | None:
    """Epoch seconds of a time as records write it: ISO 8601, or a number of seconds or their parts; None if neither."""
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        return None if (time := _iso(value)) is None else time.timestamp()
    if not math.isfinite(number):
        return None
    return number / _unit(number)


def shifted(value: str, seconds: float) -> str:
    """The time ``seconds`` later, in the spelling of ``value``; a ``value`` that is no time is returned as it is."""
    if (at := instant(value)) is None:
        return value
    if (time := _iso(value)) is None:
        return _shifted_number(value, at, seconds)
    try:
        moved = time + timedelta(seconds=seconds)
    except OverflowError:  # the first or the last day that there is, with which some say "never": nothing is beyond
        return value
    separator = next((c for c in value.strip() if c in "Tt "), None)
    if separator is None:
        return moved.date().isoformat()
    digits = len(_fraction(value))
    fraction = "microseconds" if digits > _MILLI else "milliseconds" if digits else "seconds"
    text = moved.replace(tzinfo=None).isoformat(sep=separator, timespec=fraction)
    return text + _zone(value)


def _shifted_number(value: str, at: float, seconds: float) -> str:
    unit = _unit(float(value))
    if _is_digits(value):  # exactly: a float holds no nanoseconds
        return str(int(value) + math.floor(seconds * unit))
    number = (at + seconds) * unit
    if "." in value:
        return f"{number:.6f}" if unit == 1.0 else f"{number:.3f}"
    return str(math.floor(number))


def _is_digits(value: str) -> bool:
    return value.isascii() and value.isdecimal() and len(value) <= _LONGEST


def _iso(value: str) -> datetime | None:
    if value.isdigit():
        return None  # a number, although ISO's basic form writes dates like this, too
    try:
        time = datetime.fromisoformat(value.upper())  # RFC 3339, 5.6: "t" and "z" may be small
    except ValueError:
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _fraction(value: str) -> str:
    _, _, rest = value.partition(".")
    return rest[: next((i for i, c in enumerate(rest) if not c.isdigit()), len(rest))]


def _zone(value: str) -> str:
    """How the time zone is spelled: ``Z``, ``+01:00``, ``+0100`` or not at all."""
    _, _, clock = value.replace(" ", "T").replace("t", "T").partition("T")
    at = next((i for i, c in enumerate(clock) if c in "Zz+-"), len(clock))
    return clock[at:]


def later(value: str | None, other: str | None) -> bool:
    """Whether ``value`` comes after ``other``: as times or numbers where both are, else as text."""
    if value is None or other is None:
        return value is not None
    if _is_digits(value) and _is_digits(other):  # exactly: of two long ids that follow each other a float makes one
        return int(value) > int(other)
    here, there = instant(value), instant(other)
    return here > there if here is not None and there is not None else value > other


# -- incremental ------------------------------------------------------------------------------------------------------

Style = Literal["filter", "token", "link", "key", "conditional"]
Source = Literal["last_page", "every_page", "before_pass", "items"]
Deletions = Literal["never", "marked", "separate", "webhook"]


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Incremental:
    """One way to ask for changes.

    ``style``: ``filter`` (changed since a time), ``token`` and ``link`` (the provider's own cursor), ``key``
    (ids after the last one), ``conditional`` (a header; unchanged gives 304). ``query``, ``body``,
    ``header``: where the cursor is sent; ``form``: how, as ``updated >= "{cursor}"``. ``cursor``: the path
    where it is read; ``source``: when: on the last page, on each, from the items, or, where the answer has
    none, by a request ``before_pass``. ``field``: the item's field that a filter compares.

    ``precision``: seconds the provider counts in, so that far back the next pass begins. ``life``: seconds
    after which a cursor may be refused. ``deletions``: ``marked`` in the feed, to be read ``separate``ly, reported by
    ``webhook`` only, or ``never``. ``deleted``: the field that marks them, or ``field=value``, with ``*`` in the
    value. ``deleted_key``: the paths, separated by a space, of the keys of what is gone, where the record only tells
    of it, as an event does. Raises `InvalidInput`.
    """

    style: Style
    query: str = ""
    body: str = ""
    header: str = ""
    form: str = "{cursor}"
    cursor: str = ""
    source: Source = "items"
    field: str = ""
    precision: float = 1.0
    life: float | None = None
    deletions: Deletions = "never"
    deleted: str = ""
    deleted_key: str = ""

    def __post_init__(self) -> None:
        check_word("Incremental", "style", self.style, Style)
        check_word("Incremental", "source", self.source, Source)
        check_word("Incremental", "deletions", self.deletions, Deletions)
        check_number("Incremental", "precision", self.precision, above=False)
        check_number("Incremental", "life", self.life)
        check_braces("Incremental", "form", self.form, ("cursor",))
        check_paths("Incremental", self, "cursor", "field")
        is_from_records = self.style in ("filter", "key")
        if is_from_records and not self.field:
            raise InvalidInput(f"Incremental(style={self.style!r}) needs field=, which its cursor is made of")
        if not is_from_records and self.style != "conditional" and not self.cursor:
            raise InvalidInput(f"Incremental(style={self.style!r}) needs cursor=, where its cursor is read")
        places = [name for name in ("query", "body", "header") if getattr(self, name)]
        if len(places) > 1 or (not places and self.style in ("filter", "token", "key", "conditional")):
            raise InvalidInput(
                f"Incremental(style={self.style!r}): say where its cursor is sent with one of query=, body=, header=,"
                f" not with {' and '.join(places) or 'none'}"
            )
        if is_from_records and self.source != "items":
            raise InvalidInput(
                f"Incremental(style={self.style!r}, source={self.source!r}): its cursor is made of the 'items'"
            )
        if self.style in ("token", "link") and self.source == "items":
            raise InvalidInput(
                f"Incremental(style={self.style!r}): say source='last_page', 'every_page' or 'before_pass', for its"
                " cursor is told, not made of the items"
            )
        if "{cursor}" not in self.form:
            raise InvalidInput(f"Incremental(form={self.form!r}) has no place for the {{cursor}}")
        self._check_deletions()

    def _check_deletions(self) -> None:
        for name in ("deleted", "deleted_key"):
            if getattr(self, name) and self.deletions != "marked":
                raise InvalidInput(f"Incremental(deletions={self.deletions!r}): {name}= is for deletions='marked'")
        if self.deletions == "marked" and not self.deleted:
            raise InvalidInput("Incremental(deletions='marked') needs deleted=, the field that marks them")
        for name, paths in (("deleted", [self.deleted.partition("=")[0]]), ("deleted_key", self.deleted_key.split())):
            for path in paths:
                try:
                    pick(None, path)
                except InvalidInput as error:
                    raise InvalidInput(f"Incremental({name}=...): {error}") from None
