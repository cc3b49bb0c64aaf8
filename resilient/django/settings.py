"""The setting ``RESILIENT``, and the database's address as the engine writes it.

    RESILIENT = {"APP": "shop.jobs:make", "DATABASE": "default"}

``APP`` names a function that makes the program's `Resilient` (or the app itself), ``DATABASE`` an alias of
``DATABASES`` or an address, ``SCHEMA`` the PostgreSQL schema of the tables. Each may be left out.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, Final, NamedTuple

from django.conf import settings
from django.db import connections
from django.db.utils import ConnectionDoesNotExist
from sqlalchemy import URL, make_url

from resilient.core.base.errors import SetupError

_KEYS: Final = ("APP", "DATABASE", "SCHEMA")
_OF_DJANGO: Final = (
    "assume_role",
    "isolation_level",
    "pool",
    "server_side_binding",
)  # options that libpq does not have


class Settings(NamedTuple):
    """What the setting says. ``alias``: Django's name of the database, None where ``url`` is an address."""

    app: str | None
    alias: str | None
    url: str | None
    schema: str | None


def current() -> Settings:
    """The setting, read anew: tests override it. Raises `SetupError`."""
    values: dict[str, Any] = getattr(settings, "RESILIENT", {})
    for key in values:
        if key not in _KEYS:
            near = get_close_matches(str(key), _KEYS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(_KEYS)}"
            raise SetupError(f"RESILIENT[{key!r}] is not known: {hint}")
    database = values.get("DATABASE", "default")
    if not isinstance(database, str):
        raise SetupError(f"RESILIENT['DATABASE'] takes an alias of DATABASES or an address, not {database!r}")
    is_address = "://" in database
    return Settings(
        values.get("APP"), None if is_address else database, database if is_address else None, values.get("SCHEMA")
    )


def required_alias(using: str | None = None) -> str:
    """``using``, or the alias of the jobs' database. Raises `SetupError` where the jobs are in none of Django's."""
    alias = using or current().alias
    if alias is None:
        raise SetupError(
            "RESILIENT['DATABASE'] is an address, so no transaction of Django's has the jobs in it: name an alias of"
            " DATABASES, or enqueue with `resilient.django.app().enqueue_sync(...)`"
        )
    return alias


def address() -> URL:
    """The address of the jobs' database as it is now: in a test run, that of the test database."""
    now = current()
    return make_url(now.url) if now.url is not None else address_of(required_alias())


def address_of(alias: str) -> URL:
    """The address of one of Django's databases. Raises `SetupError` for one that cannot serve."""
    try:
        wrapper = connections[alias]
    except ConnectionDoesNotExist as error:
        raise SetupError(f"RESILIENT['DATABASE']: {error}") from None
    values = wrapper.settings_dict
    if wrapper.vendor == "sqlite":
        return _sqlite(str(values["NAME"]))
    if wrapper.vendor != "postgresql":
        raise SetupError(
            f"jobs need PostgreSQL or SQLite, and DATABASES[{alias!r}] is {wrapper.vendor}: give them a database of"
            " their own (RESILIENT['DATABASE'])"
        )
    options = dict(values.get("OPTIONS") or {})
    query = {key: str(value) for key, value in options.items() if key not in _OF_DJANGO and _is_plain(value)}
    if role := options.get("assume_role"):
        query["options"] = f"{query.get('options', '')} -c role={role}".strip()
    for key, name in (("HOST", "host"), ("PORT", "port")):
        if values.get(key):
            query[name] = str(values[key])
    return URL.create(
        "postgresql",
        username=values.get("USER") or None,
        password=values.get("PASSWORD") or None,
        database=values.get("NAME") or None,
        query=query,
    )


def _is_plain(value: Any) -> bool:
    """Whether an option is text or a number: libpq's are, classes of psycopg's are not."""
    return isinstance(value, str | int) and not isinstance(value, bool)


def _sqlite(name: str) -> URL:
    if not name.startswith("file:"):
        return URL.create("sqlite", database=name)
    file, _, query = name.partition("?")  # in memory, shared within the process: a test run's
    options = dict(part.partition("=")[::2] for part in query.split("&") if part)
    return URL.create("sqlite", database=file, query={**options, "uri": "true"})
