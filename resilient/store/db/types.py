"""Column types whose Python side never changes with the database, and rows as the drivers give them.

Times are aware UTC datetimes (timestamptz on PostgreSQL, fixed-width text on SQLite, so that they compare as
text). Keys collate as bytes ("C"), so that a prefix is a range and every process sorts locks the same way.
"""

from __future__ import annotations

import json
from collections import namedtuple
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import JSON, DateTime, LargeBinary, String, Text, TypeDecorator
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.compiler import compiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Dialect as SADialect
    from sqlalchemy.types import TypeEngine


def sqlite_time(value: datetime) -> str:
    """A time as SQLite's columns have it: in UTC, ``2026-05-01 10:00:00.000000``. Refuses naive times as `aware`."""
    return aware(value).astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")  # strftime costs thrice


def utc_time(value: str) -> datetime:
    """The time that `sqlite_time` wrote."""
    return datetime.fromisoformat(value).replace(tzinfo=UTC)


def aware(value: datetime) -> datetime:
    """Return an aware time; raise ValueError for a naive one, which is a bug, not input."""
    if value.tzinfo is None:
        raise ValueError(f"naive datetime {value!r} reached the store")
    return value


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime in UTC."""

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: SADialect) -> TypeEngine[Any]:
        """A timestamptz on PostgreSQL, text on SQLite."""
        if dialect.name == "sqlite":
            return dialect.type_descriptor(String(26))
        return dialect.type_descriptor(DateTime(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: SADialect) -> Any:
        """Refuse naive times here too."""
        if value is None:
            return None
        return sqlite_time(value) if dialect.name == "sqlite" else aware(value)

    def process_result_value(self, value: Any, dialect: SADialect) -> datetime | None:  # noqa: ARG002 - SQLAlchemy asks so
        """Text, or a time in the zone of the server's session, back to an aware time in UTC."""
        if value is None:
            return None
        if isinstance(value, datetime):
            return value if value.tzinfo is UTC else value.astimezone(UTC)
        return utc_time(value)


KEY: Final = String(255).with_variant(String(255, collation="C"), "postgresql")
NAME: Final = String(255)
TEXT: Final = Text()


class JsonText(JSON):
    """JSON in a column that SQLite leaves alone.

    One declared JSON has numeric affinity and would turn the text ``0.1000000000000000055`` into a rounded number.
    SQLite checks no text either: what is no JSON (written by hand) comes back as that text instead of stopping every
    other row of the same query.
    """

    def adapt(self, cls: type[Any], **options: Any) -> Any:
        """The database's own JSON type, with a lenient reader."""
        if issubclass(cls, JsonText):  # a copy
            return super().adapt(cls, **options)
        return super().adapt(type(cls.__name__, (_Lenient, cls), {"__visit_name__": cls.__visit_name__}), **options)


class _Lenient:
    """A JSON type that returns text which is no JSON as it is."""

    def result_processor(self, dialect: SADialect, kind: Any) -> Callable[[Any], Any] | None:
        """The function that reads a column."""
        read: Callable[[Any], Any] | None = super().result_processor(dialect, kind)  # type: ignore[misc]
        if read is None:
            return None

        def lenient(value: Any) -> Any:
            try:
                return read(value)
            except (ValueError, RecursionError):
                return value

        return lenient


def lenient_json(text: Any) -> Any:
    """JSON as PostgreSQL's driver reads it; what Python does not read (5,000 digits, lists 2,000 deep) as its text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.decode("utf-8", "replace") if isinstance(text, bytes) else text


@compiles(JsonText, "sqlite")
def _(_type: JsonText, _compiler: Any, **_options: Any) -> str:
    return "TEXT"


class AnyText(TypeDecorator[str]):
    """Text out of SQLite's bytes: what is no UTF-8 stays recognisable instead of failing every row of its query."""

    impl = LargeBinary
    cache_ok = True

    def process_result_value(self, value: Any, dialect: SADialect) -> str | None:  # noqa: ARG002 - SQLAlchemy asks so
        """See `any_text`."""
        text: str | None = any_text(value)
        return text


def any_text(value: Any) -> Any:
    """Bytes as text; those that are none become lone surrogates, which no JSON holds."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


# Payloads keep their exact text on PostgreSQL: JSON, not JSONB (no big-number surprises, cheaper to write).
DOCUMENT: Final = JsonText(none_as_null=True)
# Searched by containment, so indexed.
SEARCHED: Final = JsonText(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


# -- rows -------------------------------------------------------------------------------------------------------------

_SHAPES: Final = 4096


class Rows(list[Any]):
    """The rows of a statement, as named tuples: what store functions use of SQLAlchemy's result.

    Those of a statement that was left for the next round trip (`Dialect.later`) are here after it.
    """

    rowcount: int = -1

    def all(self) -> list[Any]:
        """Every row."""
        return self

    def first(self) -> Any:
        """The first row, or None."""
        return self[0] if self else None

    def one(self) -> Any:
        """The only row."""
        (row,) = self
        return row

    def one_or_none(self) -> Any:
        """The only row, or None."""
        return self.one() if self else None

    def scalar(self) -> Any:
        """The first column of the first row, or None."""
        return self[0][0] if self else None

    def scalar_one(self) -> Any:
        """The first column of the only row."""
        return self.one()[0]


@lru_cache(maxsize=_SHAPES)
def shape(names: tuple[str, ...]) -> Any:
    """A class of named tuples with these fields."""
    return namedtuple("Row", list(names), rename=True)  # noqa: PYI024 - as a query has them
