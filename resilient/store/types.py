"""Column types whose Python side never changes with the database.

Times are aware UTC datetimes (timestamptz on PostgreSQL, fixed-width text on SQLite, so that they compare as
text). Keys collate as bytes ("C"), so that a prefix is a range and every process sorts locks the same way.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import JSON, DateTime, LargeBinary, String, Text, TypeDecorator
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.compiler import compiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Dialect as SADialect
    from sqlalchemy.types import TypeEngine

SQLITE_FORMAT: Final = "%Y-%m-%d %H:%M:%S.%f"


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
        """Refuse naive times here too: a bug, not input."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"naive datetime {value!r} reached the store")
        if dialect.name != "sqlite":
            return value
        return value.astimezone(UTC).strftime(SQLITE_FORMAT)

    def process_result_value(self, value: Any, dialect: SADialect) -> datetime | None:  # noqa: ARG002 - SQLAlchemy asks so
        """Text, or a time in the zone of the server's session, back to an aware time in UTC."""
        if value is None:
            return None
        if isinstance(value, datetime):
            return value if value.tzinfo is UTC else value.astimezone(UTC)
        return datetime.fromisoformat(value).replace(tzinfo=UTC)


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
        """The database's own JSON type, with a reader that takes what it finds."""
        if issubclass(cls, JsonText):  # a copy
            return super().adapt(cls, **options)
        return super().adapt(type(cls.__name__, (_Lenient, cls), {"__visit_name__": cls.__visit_name__}), **options)


class _Lenient:
    """A JSON type that gives text it cannot read as that text."""

    def result_processor(self, dialect: SADialect, kind: Any) -> Callable[[Any], Any] | None:
        """What reads a column."""
        read: Callable[[Any], Any] | None = super().result_processor(dialect, kind)  # type: ignore[misc]
        if read is None:
            return None

        def lenient(value: Any) -> Any:
            try:
                return read(value)
            except ValueError:
                return value

        return lenient


@compiles(JsonText, "sqlite")
def _(_type: JsonText, _compiler: Any, **_options: Any) -> str:
    return "TEXT"


class AnyText(TypeDecorator[str]):
    """Text out of SQLite's bytes: what is no UTF-8 stays recognisable instead of failing every row of its query."""

    impl = LargeBinary
    cache_ok = True

    def process_result_value(self, value: Any, dialect: SADialect) -> str | None:  # noqa: ARG002 - SQLAlchemy asks so
        """Bytes that are no text become lone surrogates, which no JSON holds."""
        return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


# Payloads keep their exact text on PostgreSQL: JSON, not JSONB (no big-number surprises, cheaper to write).
DOCUMENT: Final = JsonText(none_as_null=True)
# Searched by containment, so indexed.
SEARCHED: Final = JsonText(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
