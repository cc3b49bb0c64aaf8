"""``resilient sync``: on a database with one stream that was read and one that was interrupted."""

import json
from datetime import UTC, datetime

import pytest

from resilient import PageRequest
from resilient.core.sync.stream import Cursor
from resilient.store import sync as cursors
from resilient.store.db.database import Database
from resilient.surface.cli import main

NOW = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
def run(database_url, monkeypatch, capsys):
    monkeypatch.delenv("RESILIENT_APP", raising=False)
    monkeypatch.setenv("RESILIENT_DATABASE", database_url)
    database = Database(database_url)
    under_way = Cursor(pass_id=3, next=PageRequest("https://a.test/?page=2"), pages=1, records=100, rejected=2)
    for place, cursor in (
        (("p/1", "items", "repo=a"), under_way),
        (("p/2", "items", ""), Cursor(pass_id=1, full_pass=1, completed_at=NOW, pages=4, records=7)),
    ):
        database.transaction_sync(cursors.write_if_unmoved, place, cursor, None, NOW)
    database.close_sync()

    def call(*arguments):
        status = main(list(arguments))
        return status, capsys.readouterr().out

    return call


def test_status_says_where_each_stands(run):
    status, out = run("sync", "status")
    assert status == 0
    assert "100 in 1 page, 2 rejected" in out
    assert "full pass" in out
    status, out = run("sync", "status", "--resource", "p/2", "--json")
    (one,) = json.loads(out)["streams"]
    assert (one["doing"], one["records"], one["may_sweep"]) == ("up to date", 7, True)


def test_reset_lets_it_be_read_anew(run):
    assert run("sync", "reset", "items", "--part", "repo=a") == (
        0,
        "The next pass of 1 stream reads everything.\n",
    )
    _, out = run("sync", "status", "--json")
    assert [one["doing"] for one in json.loads(out)["streams"]] == ["to be read anew", "up to date"]
    assert run("sync", "reset", "nothing")[0] != 0


def test_those_that_wait_longest_come_first_and_a_screen_has_an_end(run):
    _, out = run("sync", "status", "--limit", "1")
    assert "p/1" in out
    assert "p/2" not in out
    assert "... and 1 more: --limit, --resource" in out


def test_forget(run):
    assert run("sync", "forget", "--resource", "p/1") == (0, "Forgot 1 cursor.\n")
    assert json.loads(run("sync", "forget", "items", "--json")[1]) == {"forgotten": 1}
    assert run("sync", "forget", "items")[0] == 3
    assert run("sync", "forget")[0] == 2
