"""A command that a text proposes works when it is copied: it has the options that say which app is meant."""

from __future__ import annotations

import logging

import pytest

from resilient import Resilient, web
from resilient.surface.cli import logs, main
from resilient.surface.cli.hints import command_with, hinted, which_of
from resilient.surface.web.dashboard.alone import Alone
from tests.surface.dashboards import Page, client_of

APP = {"--app": "shop.jobs:app"}


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["status"], {}),
        (["--app", "shop.jobs:app", "status"], APP),
        (["-A", "shop.jobs:app", "--shard=eu", "--json"], {**APP, "--shard": "eu"}),
        (["--database", "sqlite:///a b.db", "--as", "ann"], {"--database": "sqlite:///a b.db"}),
        (["--database", "postgresql://ann@h:5432/x?host=/run"], {"--database": "postgresql://ann@h:5432/x?host=/run"}),
        (["--database", "postgresql://h:1,i:2/x", "--schema", "s"],
         {"--database": "postgresql://h:1,i:2/x", "--schema": "s"}),
        *((["--database", one], {"--database": "ADDRESS"}) for one in (
            "postgresql://ann:canary@h/x", "postgresql://ann:123@h/x", "postgresql://ann:can#ary@h/x",
            "postgresql://h/x?user=ann&password=canary", "ann:canary", "postgresql://ann:canary", "mysql://h/x",
        )),
    ],
)  # fmt: skip
def test_what_says_which_app_is_meant_and_no_password(words, options):
    assert which_of(words) == options


@pytest.mark.parametrize(
    ("command", "options", "becomes"),
    [
        ("resilient jobs why 7", {}, "resilient jobs why 7"),
        ("resilient jobs why 7", APP, "resilient --app shop.jobs:app jobs why 7"),
        ("resilient worker --app module:app", APP, "resilient worker --app module:app"),
        ("resilient jobs list --help", APP, "resilient jobs list --help"),
        ("resilient secrets new", APP, "resilient secrets new"),
        ("resilient secrets rotate", APP, "resilient --app shop.jobs:app secrets rotate"),
        ("resilient db upgrade", {"--database": "sqlite:///a b.db"},
         "resilient --database 'sqlite:///a b.db' db upgrade"),
        ("resilient worker", {"--database": "sqlite:///a.db"}, "resilient --app module:app worker"),
        ("resilient connections list", {"--database": "sqlite:///a.db"},
         "resilient --database sqlite:///a.db connections list"),
        ("resilient jobs why 7", {"--app": "resilient.django:app"}, "python manage.py resilient jobs why 7"),
    ],
)  # fmt: skip
def test_a_command_with_the_options_that_it_needs(command, options, becomes):
    assert command_with(command, options) == becomes
    assert hinted(f"First `{command}`, then rest.", options) == f"First `{becomes}`, then rest."


@pytest.mark.parametrize("arguments", [("status",), ("doctor",), ("jobs", "list", "--state", "dead")])
def test_every_screen_and_error_repeats_the_app(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path}/app.db"
    for made in (False, True):
        if made:
            assert main(["--database", url, "db", "upgrade"]) == 0
        main(["--database", url, *arguments])
        out, err = capsys.readouterr()
        commands = [part for part in (out + err).split("`")[1::2] if part.startswith("resilient ")]
        assert all(one.startswith((f"resilient --database {url} ", "resilient --app module:app ")) for one in commands)
        assert commands or made


@pytest.mark.parametrize("shape", ["text", "json"])
def test_the_log_repeats_it_too(shape, capsys):
    """The line at three in the morning is copied as any other: `resilient jobs why ID` alone answers "which app?"."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    root.handlers = []
    try:
        logs.set_up(shape, "info", APP)
        logging.getLogger("shop").info("%s is not connected: `resilient connect crm %s`", "crm/a", "crm/a")
        logging.getLogger("shop").info("nothing to copy")
    finally:
        root.handlers = before
        root.setLevel(level)
    first, second = capsys.readouterr().err.splitlines()
    assert "crm/a is not connected: `resilient --app shop.jobs:app connect crm crm/a`" in first
    assert "nothing to copy" in second


def test_a_worker_s_log_repeats_what_it_was_started_with(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(logs, "set_up", lambda shape, level, options: seen.append((shape, level, dict(options))))
    monkeypatch.chdir(tmp_path)
    assert main(["-A", "nowhere:app", "worker"]) == 2
    assert seen[0] == ("text", "info", {"--app": "nowhere:app"})
    capsys.readouterr()


async def test_the_pages_of_the_dashboard_command_repeat_it_too(database):
    app = Resilient(database)
    await app.ready()
    alone = Alone(app, 8765, options=APP)
    client = client_of(alone.asgi, "http://127.0.0.1:8765")
    page = Page((await client.get(alone.address, follow_redirects=True)).text)
    assert "Start one: resilient --app shop.jobs:app worker" in page.text
    assert "on the command line: resilient --app shop.jobs:app status" in page.text
    mounted = client_of(web.dashboard(app, operator=lambda _request: web.Operator("ann", ("read",))))
    assert "on the command line: resilient status" in Page((await mounted.get("/")).text).text
    await app.close()
