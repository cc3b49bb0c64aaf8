"""Columns as people are shown them, and as what they decide reads them.

SQLite checks no text, and its driver fails a whole query over one byte that is none, quoting the value. So text is read
as bytes there, and what cannot be read is said in its own row: nobody's data gets into an error or a log.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy import ColumnElement, LargeBinary, TypeDecorator

from resilient.store.types import JsonText

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Dialect as SADialect

    from resilient.store.dialect import Dialect

NOT_READABLE: Final = "not_readable"


def columns(d: Dialect, table: sa.Table, names: Sequence[str]) -> list[ColumnElement[Any]]:
    """These columns; see the top of this file."""
    found: list[ColumnElement[Any]] = [table.c[name] for name in names]
    return found if d.is_postgresql else [_readable(column) for column in found]


def _readable(column: ColumnElement[Any]) -> ColumnElement[Any]:
    as_bytes = sa.cast(column, sa.LargeBinary)
    if isinstance(column.type, JsonText):
        return sa.type_coerce(as_bytes, ShownDocument()).label(column.key)
    if isinstance(column.type, (sa.String, sa.Text)):
        return sa.type_coerce(as_bytes, ShownText()).label(column.key)
    return column


class ShownText(TypeDecorator[str]):
    """Text that is shown to people: a replacement character stands for what is none."""

    impl = LargeBinary
    cache_ok = True

    def process_result_value(self, value: Any, dialect: SADialect) -> str | None:  # noqa: ARG002 - SQLAlchemy asks so
        """Text for certain."""
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


class ShownDocument(TypeDecorator[Any]):
    """JSON that is shown to people: what cannot be read is its reason, and nobody's data gets into an error."""

    impl = LargeBinary
    cache_ok = True

    def process_result_value(self, value: Any, dialect: SADialect) -> Any:  # noqa: ARG002 - as above
        """The document, or ``{"not_readable": why}``."""
        if not isinstance(value, bytes):
            return value
        try:
            return json.loads(value.decode())
        except UnicodeDecodeError as error:
            return {NOT_READABLE: f"byte {error.start} of {len(value)} is no UTF-8"}
        except ValueError as error:  # the message of a JSONDecodeError is its place and a rule
            return {NOT_READABLE: f"it is no JSON: {error}"}
        except RecursionError:
            return {NOT_READABLE: "it is nested too deeply"}
