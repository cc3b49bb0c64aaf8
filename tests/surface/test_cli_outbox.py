"""``resilient outbox``: what is where, and once more."""

from __future__ import annotations

import json

import pytest
from sqlmodel import Session

from resilient import Resilient
from resilient.surface.cli import main
from tests.helpers import LIMIT

PROGRAM = """
from resilient import Event, Permanent, Resilient

class Placed(Event, type="order.placed"):
    number: int

async def sink(message):
    if message.event["data"]["number"] == 2:
        raise Permanent("no such order", code="unknown_order")

app = Resilient({url!r}, destinations={{"orders": sink}}, routes={{Placed: ["orders"]}})
"""


@pytest.fixture
def module(database_url, tmp_path, monkeypatch):
    name = f"shop_outbox_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(PROGRAM.format(url=database_url))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RESILIENT_APP", f"{name}:app")
    return __import__(name)


@pytest.fixture
def events(module):
    """One that was published, one that is dead."""
    app = module.app
    with Session(app.database.sync_engine) as s:
        ids = [app.outbox.publish(s, module.Placed(number=n), key=f"k{n}") for n in (1, 2)]
        s.commit()
    import asyncio

    async def drain():
        await app.worker().drain(timeout=LIMIT)
        await app.close()

    asyncio.run(drain())
    return ids


@pytest.fixture
def run(capsys, module, monkeypatch):
    def call(*arguments):
        monkeypatch.setattr(module, "app", Resilient(**_words(module)))
        status = main(list(arguments))
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def _words(module):
    return {
        "database": module.app.database.url.render_as_string(hide_password=False),
        "destinations": {"orders": module.sink},
        "routes": {module.Placed: ["orders"]},
    }


def test_list(run, events):
    status, out, _ = run("outbox", "list")
    assert status == 0
    for word in (*events, "succeeded", "dead", "order.placed", "orders", "k1", "unknown_order"):
        assert word in out
    _, out, _ = run("outbox", "list", "--state", "dead", "--json")
    (one,) = json.loads(out)["events"]
    assert (one["id"], one["type"], one["destination"], one["key"]) == (events[1], "order.placed", "orders", "k2")
    assert one["event"]["data"] == {"number": 2}
    assert "No event fits" in run("outbox", "list", "--type", "order.lost")[1]
    assert "No event fits" in run("outbox", "list", "--to", "audit")[1]
    assert len(json.loads(run("outbox", "list", "--since", "1h", "--key", "k1", "--json")[1])["events"]) == 1


def test_show(run, events):
    status, out, _ = run("outbox", "show", events[0])
    assert status == 0
    for word in (events[0], "order.placed", '"number": 1', "orders", "succeeded"):
        assert word in out
    assert json.loads(run("outbox", "show", events[1], "--json")[1])["events"][0]["last_error_code"] == "unknown_order"
    status, _, err = run("outbox", "show", "nothing")
    assert status != 0
    assert "never committed, or it was pruned" in err


_REPLAY = ("outbox", "replay", "--since", "1h")


def test_replay(run, events):
    assert "Would be put in line to be published once more: 1 event to orders." in run(*_REPLAY, "--dry-run")[1]
    assert "Publish once more 1 event to orders? Say --yes" in run(*_REPLAY)[2]
    counts = {"events": 1, "more": False, "by_destination": {"orders": 1}, "dry_run": False}
    assert json.loads(run(*_REPLAY, "--yes", "--json")[1]) == counts
    assert len(json.loads(run("outbox", "show", events[0], "--json")[1])["events"]) == 2
    (change,) = json.loads(run("audit", "--json")[1])["changes"]
    assert change["subject"] == "every destination, since 1h"
    assert "No event that was published then fits" in run(*_REPLAY, "--to", "orders", "--key", "x")[1]
    assert "Nothing was published then" in run("outbox", "replay", "--since", "1s", "--until", "1s")[1]
    status, _, err = run(*_REPLAY, "--to", "order")
    assert (status, "destination 'order', which is not declared; known are: orders" in err) == (2, True)
    assert run("outbox", "replay", "--since", "yesterday")[0] != 0
