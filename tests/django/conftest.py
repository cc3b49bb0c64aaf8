"""Django in this process, without a project: its database is each test's own, on SQLite and on PostgreSQL."""

from __future__ import annotations

import django
import pytest
from asgiref.sync import async_to_sync
from django.conf import settings
from django.core.management import call_command
from django.db import connections, models
from sqlalchemy import make_url

from resilient import Resilient
from resilient.django import program

if not settings.configured:
    settings.configure(
        INSTALLED_APPS=["resilient.django"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        ROOT_URLCONF="tests.django.pages",
        ALLOWED_HOSTS=["*"],
        LOGGING_CONFIG=None,
        SECRET_KEY="test",
        TASKS={"default": {"BACKEND": "resilient.django.tasks.Backend", "QUEUES": []}},
        TIME_ZONE="Europe/Berlin",
        USE_TZ=True,
    )
    django.setup()


class Order(models.Model):  # noqa: DJ008 - nobody prints it
    """A table of the program's own."""

    item = models.TextField()

    class Meta:
        app_label = "shop"


def settings_of(url):
    """An entry of DATABASES for an address of the tests' fixtures."""
    url = make_url(url)
    if url.get_backend_name() == "sqlite":
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": url.database}
    host = url.query["host"]
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": url.database,
        "USER": url.username,
        "HOST": host,
        "OPTIONS": {"application_name": "shop"},
    }


@pytest.fixture
def use():
    """``use(url, **options)``: from now on this is Django's database."""

    def use(url, **options):
        connections["default"].close()
        values = connections.configure_settings({"default": {**settings_of(url), **options}})
        connections.settings["default"] = values["default"]
        connections["default"] = connections.create_connection("default")

    before = connections.settings["default"]
    yield use
    connections["default"].close()
    connections.settings["default"] = before
    connections["default"] = connections.create_connection("default")
    program.close()
    program._APPS.clear()


@pytest.fixture
def django_url(database_url, use):
    """Django's database, with the engine's tables and that of `Order`."""
    use(database_url)
    with connections["default"].schema_editor() as editor:
        editor.create_model(Order)
    return database_url


@pytest.fixture
def migrated(empty_url, use):
    """Django's database, with what `migrate` makes."""
    use(empty_url)
    call_command("migrate", verbosity=0)
    return empty_url


@pytest.fixture
def app(django_url):
    """Another process's app on the same database: it sees what is committed."""
    app = Resilient(django_url)
    yield app
    async_to_sync(app.close)()
