"""The dashboard beside a project: for its users by their rights, and linked in its admin."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.django.conftest import settings_of

PROJECT = """
import asyncio, json, os, django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=[
        "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions",
        "django.contrib.messages", "resilient.django",
    ],
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ],
    TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True, "OPTIONS": {
        "context_processors": [
            "django.template.context_processors.request", "django.contrib.auth.context_processors.auth",
            "django.contrib.messages.context_processors.messages",
        ],
    }}],
    DATABASES={"default": json.loads(os.environ["SHOP_DATABASE"])},
    ROOT_URLCONF="__main__", SECRET_KEY="test", ALLOWED_HOSTS=["*"], USE_TZ=True, STATIC_URL="/static/",
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
)
django.setup()

import httpx
from django.contrib import admin
from django.contrib.auth.models import User
from django.core.asgi import get_asgi_application
from django.core.management import call_command
from django.test import Client
from django.urls import path

from resilient.django.dashboard import add_link, with_dashboard

call_command("migrate", verbosity=0)
add_link("/ops/")
urlpatterns = [path("admin/", admin.site.urls)]
application = with_dashboard(get_asgi_application(), at="/ops", origin="http://shop.example")


def cookies(name, **rights):
    user = User.objects.create_user(name, password="x", **rights)
    client = Client()
    client.force_login(user)
    print(name, "admin", "/ops/" in client.get("/admin/").content.decode())
    return {"sessionid": client.cookies["sessionid"].value}


async def look(name, jar, **paths):
    transport = httpx.ASGITransport(app=application)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop.example", cookies=jar) as client:
        for words, path in paths.items():
            print(name, words, (await client.get(path)).status_code)
"""

RIGHTS = """
jars = {
    "nobody": {}, "forger": {"sessionid": "x" * 32}, "customer": cookies("customer"),
    "staff": cookies("staff", is_staff=True), "chief": cookies("chief", is_staff=True, is_superuser=True),
    "gone": cookies("gone", is_staff=True, is_superuser=True),
}
User.objects.filter(username="gone").update(is_active=False)


async def main():
    for name, jar in jars.items():
        await look(name, jar, now="/ops/", enqueue="/ops/enqueue", django="/admin/login/")


asyncio.run(main())
"""


BELOW = """
jar = cookies("staff", is_staff=True)


async def ask(root, path):
    transport = httpx.ASGITransport(app=application, root_path=root)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop.example", cookies=jar) as client:
        answer = await client.get(root + path)
        print(f"{root}{path}", "styles", f'{root}/ops/static/dashboard.css' in answer.text)
        print(f"{root}{path}", "goes to", answer.headers.get("location", "nowhere"))
        print(f"{root}{path}", "is", answer.status_code)


async def main():
    for root in ("", "/shop"):  # as `uvicorn --root-path` gives it: the path has it, too
        for path in ("/ops", "/ops/", "/ops/jobs", "/opsx", "/admin/login/"):
            await ask(root, path)


asyncio.run(main())
"""


RESTART = """
from django.db import connection

jar = cookies("staff", is_staff=True)


async def main():
    await look("first", jar, now="/ops/")
    with connection.cursor() as cursor:
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        cursor.execute(f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE {others}")
    await look("next", jar, now="/ops/")


os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"
asyncio.run(main())
"""


def lines_of(program, database):
    """What a program prints, by its words but the last."""
    environ = {**os.environ, "SHOP_DATABASE": json.dumps(database)}
    words = [sys.executable, "-c", PROJECT + program]
    ran = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return dict(line.rsplit(" ", 1) for line in ran.stdout.splitlines())


def test_its_users_are_found_after_a_restart_of_the_database(postgres_server):
    """Their connection is in a thread in which no request of Django's renews it."""
    name = postgres_server.create()
    database = settings_of(postgres_server.url(name))
    lines = lines_of(RESTART, {**database, "CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": True})
    postgres_server.drop_soon(name)
    assert (lines["first now"], lines["next now"]) == ("200", "200")


def test_who_may_see_what(tmp_path):
    lines = lines_of(RIGHTS, settings_of(f"sqlite:///{tmp_path / 'shop.db'}"))
    assert {name: lines[f"{name} now"] for name in ("nobody", "forger", "customer", "gone", "staff", "chief")} == {
        "nobody": "401", "forger": "401", "customer": "401", "gone": "401", "staff": "200", "chief": "200",
    }  # fmt: skip
    assert (lines["staff enqueue"], lines["chief enqueue"]) == ("403", "200")
    assert (lines["staff admin"], lines["chief admin"], lines["customer admin"]) == ("True", "True", "False")
    assert lines["chief django"] in {"200", "302"}


def test_it_is_found_where_the_server_is_told_to_be_and_without_its_slash(tmp_path):
    lines = lines_of(BELOW, settings_of(f"sqlite:///{tmp_path / 'shop.db'}"))
    for root in ("", "/shop"):
        assert lines[f"{root}/ops goes to"] == f"{root}/ops/"
        assert (lines[f"{root}/ops/ is"], lines[f"{root}/ops/jobs is"]) == ("200", "200")
        assert lines[f"{root}/ops/jobs styles"] == "True"
        assert (lines[f"{root}/opsx is"], lines[f"{root}/admin/login/ is"]) == ("404", "302"), "Django's own"
