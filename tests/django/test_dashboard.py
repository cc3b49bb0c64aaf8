"""The dashboard beside a project: for its users by their rights, and linked in its admin."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import asyncio, os, django
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
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["SHOP_FILE"]}},
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


async def look(name, jar):
    transport = httpx.ASGITransport(app=application)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop.example", cookies=jar) as client:
        print(name, "now", (await client.get("/ops/")).status_code)
        print(name, "enqueue", (await client.get("/ops/enqueue")).status_code)
        print(name, "django", (await client.get("/admin/login/")).status_code)


jars = {
    "nobody": {}, "forger": {"sessionid": "x" * 32}, "customer": cookies("customer"),
    "staff": cookies("staff", is_staff=True), "chief": cookies("chief", is_staff=True, is_superuser=True),
    "gone": cookies("gone", is_staff=True, is_superuser=True),
}
User.objects.filter(username="gone").update(is_active=False)


async def main():
    for name, jar in jars.items():
        await look(name, jar)


asyncio.run(main())
"""


def test_who_may_see_what(tmp_path):
    environ = {**os.environ, "SHOP_FILE": str(tmp_path / "shop.db")}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    lines = dict(line.rsplit(" ", 1) for line in ran.stdout.splitlines())
    assert {name: lines[f"{name} now"] for name in ("nobody", "forger", "customer", "gone", "staff", "chief")} == {
        "nobody": "401", "forger": "401", "customer": "401", "gone": "401", "staff": "200", "chief": "200",
    }  # fmt: skip
    assert (lines["staff enqueue"], lines["chief enqueue"]) == ("403", "200")
    assert (lines["staff admin"], lines["chief admin"], lines["customer admin"]) == ("True", "True", "False")
    assert lines["chief django"] in {"200", "302"}
