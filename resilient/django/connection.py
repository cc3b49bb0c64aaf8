"""Django's connection as SQLAlchemy's: statements of the engine in a transaction that Django began and will end.

The driver's connection is lent through a `Loan`, which has no commit, rollback or close, and leaves Django's settings
of it as they are. A cursor of the engine's own reads times and JSON as the engine does, whatever Django has registered.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction
from sqlalchemy import Connection, Engine, NullPool, create_engine

from resilient.core.base.errors import InvalidInput, SetupError
from resilient.django.settings import address_of, required_alias

if TYPE_CHECKING:
    from sqlalchemy import URL


def session(using: str | None = None) -> Connection:
    """Django's connection of this thread, for calls that take ``session=``: inside `transaction.atomic()` alone.

    What is written on it belongs to the innermost block, as what models write. Workers are woken after the commit.
    Take a new one in each block. ``using`` is an alias of ``DATABASES``. Raises `InvalidInput` outside of a block.
    """
    alias = required_alias(using)
    if not connections[alias].in_atomic_block:
        raise InvalidInput(
            "Django would commit each statement here (autocommit): call it inside `with transaction.atomic():`"
        )
    c = _engine(alias, address_of(alias)).connect()
    c.begin()
    transaction.on_commit(partial(_end, c), using=alias, robust=True)
    return c


def _end(c: Connection) -> None:
    """Django has committed: let those know who wait for this connection's commit."""
    c.commit()
    c.close()


@cache
def _engine(alias: str, url: URL) -> Engine:
    if url.get_backend_name() == "sqlite":
        return create_engine(url, creator=lambda: Loan(alias), poolclass=NullPool, hide_parameters=True)
    return create_engine(
        url.set(drivername="postgresql+psycopg"),
        creator=lambda: PsycopgLoan(alias),
        poolclass=NullPool,
        hide_parameters=True,  # payloads do not belong into error messages
        use_native_hstore=False,  # SQLAlchemy would register it on Django's connection
    )


class Loan:
    """Django's connection of this thread, without a way to end its transaction or itself."""

    def __init__(self, alias: str) -> None:
        self._driver = connections[alias].connection

    def __getattr__(self, name: str) -> Any:
        """Everything else is the driver's."""
        return getattr(self._driver, name)

    def commit(self) -> None:
        """Django does it."""

    def rollback(self) -> None:
        """Django does it."""

    def close(self) -> None:
        """Django does it."""

    def create_function(self, *_args: Any, **_options: Any) -> None:
        """Django's own REGEXP stays."""

    def add_notice_handler(self, _handler: Any) -> None:
        """SQLAlchemy adds one to each connection that it is given, and this one is given to it many times."""


class PsycopgLoan(Loan):
    """A `Loan` of psycopg's connection. Raises `SetupError` for an older driver's."""

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        import psycopg  # noqa: PLC0415 - the extra may be missing, and then nobody comes here

        if not isinstance(self._driver, psycopg.Connection):
            raise SetupError("Django uses psycopg2 here; resilient needs psycopg 3: pip install 'psycopg[binary]'")
        self._alias = alias

    def cursor(self, *args: Any, **options: Any) -> Any:
        """One that binds on the server, and fails as Django's own do: the block can only be rolled back then."""
        cursor = _cursor_class()(self._driver, *args, **options)
        for name, loader in _loaders():
            cursor.adapters.register_loader(name, loader)
        cursor.alias = self._alias
        return cursor


@cache
def _loaders() -> tuple[tuple[str, Any], ...]:
    """The loaders of psycopg's own, where Django has others."""
    from psycopg.types.datetime import TimestamptzLoader  # noqa: PLC0415 - as above
    from psycopg.types.json import JsonbLoader  # noqa: PLC0415 - as above

    return ("timestamptz", TimestamptzLoader), ("jsonb", JsonbLoader)


@cache
def _cursor_class() -> Any:
    import psycopg  # noqa: PLC0415 - as above

    class Cursor(psycopg.Cursor[Any]):
        alias: str

        def execute(self, *args: Any, **options: Any) -> Any:
            with transaction.mark_for_rollback_on_error(self.alias):
                return super().execute(*args, **options)

    return Cursor
