"""The sample project, as its users run it: its own tests on both databases, and a worker of ``manage.py``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resilient import Resilient
from tests.helpers import until

PROJECT = Path(__file__).parents[2] / "examples" / "django_project"


def manage(environ, *words, start=subprocess.run, **options):
    command = [sys.executable, "-W", "error::ResourceWarning", "manage.py", *words]
    return start(command, cwd=PROJECT, env={**os.environ, **environ}, **options)


def environ_of(backend, request, tmp_path):
    if backend == "sqlite":
        return {"SHOP_FILE": str(tmp_path / "shop.db"), "SHOP_TEST_FILE": str(tmp_path / "test.db")}
    server = request.getfixturevalue("postgres_server")
    return {"SHOP_DATABASE": "postgresql", "PGHOST": str(server.data), "PGUSER": "postgres"}


@pytest.mark.slow
def test_its_tests_pass(backend, request, tmp_path):
    environ = environ_of(backend, request, tmp_path)
    ran = manage(environ, "test", "--noinput", capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Ran 4 tests" in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--processes", "2")], ids=["alone", "two processes"])
async def test_an_order_gets_its_invoice_from_a_worker(options, tmp_path):
    environ = environ_of("sqlite", None, tmp_path)
    manage(environ, "migrate", "--verbosity=0", check=True)
    order = "from django.test import Client; print(Client().post('/orders', {'item': 'chair'}).json()['job'])"
    placed = manage(environ, "shell", "-v0", "-c", order, capture_output=True, text=True, check=True)
    worker = manage(environ, "resilient", "worker", *options, start=subprocess.Popen)
    try:
        async with Resilient(f"sqlite:///{tmp_path}/shop.db") as app:
            job = placed.stdout.split()[-1]

            async def is_done():
                return (await app.jobs.get(job)).state == "succeeded"

            await until(is_done)
    finally:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    invoices = "from shop.models import Order; print(Order.objects.get())"
    shown = manage(environ, "shell", "-v0", "-c", invoices, capture_output=True, text=True, check=True)
    assert "chair (R-00001)" in shown.stdout
