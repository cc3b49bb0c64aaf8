"""What ``resilient status`` and its neighbours say at a glance, however much there is to say."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from resilient import Job, Permanent, Resilient, Schedule, handler
from resilient.core.accounts.tokens import UNREADABLE
from resilient.core.alerts.rules import of_accounts, of_credentials
from resilient.store import alerts
from resilient.store.gates import controls as gates
from resilient.store.inspect import workers
from resilient.store.jobs.filters import JOB
from resilient.surface.cli import main


@handler("contact.drop")
async def dies(job: Job[str]) -> None:
    raise Permanent("refused", code=job.payload)


@handler("contact.push")
async def push(job: Job[None]) -> None:
    """Nothing."""


@pytest.fixture
async def app(database):
    app = Resilient(database, handlers=[dies, push], providers=[])
    await app.ready()
    yield app
    await app.close()


@pytest.fixture
def say(database_url, capsys):
    """What a command prints, its spaces folded."""

    def call(*arguments, status=0, lines=False):
        assert main(["--database", database_url, *map(str, arguments)]) == status
        out = capsys.readouterr().out
        return out.splitlines() if lines else " ".join(out.split())

    return call


class TestManyCodes:
    def test_of_one_account_are_one_line(self, database_url, say):
        drop(database_url, ["bad_email", "bad_name"], key="crm/good")
        drop(database_url, [f"code-{n}" for n in range(51)], key="crm/evil")
        lines = [line.split() for line in say("status", lines=True) if line.startswith("contact.drop")]
        assert lines[0][1:] == ["permanent", "51", "codes", "51"]
        assert sorted(line[2:] for line in lines[1:]) == [["bad_email", "1"], ["bad_name", "1"]]
        assert "all codes are of crm/evil" in say("status")
        (first, *_) = json.loads(say("status", "--json"))["died"]
        assert (first["codes"], first["count"]) == (51, 51)

    def test_how_many_groups_are_left_out_is_said(self, database_url, say):
        for n in range(12):
            drop(database_url, [f"code-{n}"], key=f"crm/{n}")
        assert f"and 2 more groups: `resilient --database {shlex.quote(database_url)} dead list`" in say("status")


class TestHeldLanes:
    def test_jobs_behind_a_dead_one_are_seen_at_a_glance(self, database_url, say):
        app = Resilient(database_url, handlers=[dies], providers=[])
        (dead,) = drop(database_url, ["no"], key="crm/a", ordering_key="order-7")
        for _ in range(3):
            app.sync.enqueue("contact.drop", "x", resource_key="crm/a", ordering_key="order-7")
        drop(database_url, ["no"], key="crm/a", ordering_key="alone")
        app.sync.enqueue("contact.drop", "x", resource_key="crm/b", ordering_key="alive")
        app.sync.enqueue("contact.drop", "x", resource_key="crm/b", ordering_key="alive")
        text = f"1 ordering key held up by a dead job: 'order-7' of crm/a (3 jobs wait for {dead}). Retry it or discard"
        assert "4 blocked" in say("status")
        for command in (["status"], ["resources", "why", "crm/a"], ["resources", "show", "crm"]):
            assert text in say(*command)
        assert "3 jobs are blocked at or below crm/a: other jobs come before." in say("resources", "why", "crm/a")
        assert "held up" not in say("resources", "why", "crm/b")
        (lane,) = json.loads(say("status", "--json"))["lanes"]
        assert (lane["ordering_key"], lane["job"], lane["behind"]) == ("order-7", str(dead), 3)

    def test_many_are_counted(self, database_url, say):
        app = Resilient(database_url, handlers=[dies], providers=[])
        for n in range(12):
            drop(database_url, ["no"], key="crm/a", ordering_key=f"k{n:02}")
            app.sync.enqueue("contact.drop", "x", resource_key="crm/a", ordering_key=f"k{n:02}")
        assert "12 ordering keys held up by a dead job: 'k00' of crm/a" in say("status")
        assert "; and 9 others. Retry it" in say("status")


class TestSmallThings:
    def test_a_condition_that_is_not_found_any_more_is_not_told_as_if_it_lasted(self, database_url, say):
        app = Resilient(database_url, handlers=[dies], providers=[])
        app.ready_sync()
        since = datetime(2026, 1, 1, 12, tzinfo=UTC)

        def write(c, d):
            now = d.now(c)
            found = of_accounts("hourly", 3, "crm/a", since, ever=True, periods=3)
            alerts.record(c, d, [found], now - timedelta(minutes=4), lasting=True)
            alerts.record(c, d, [replace(found, subject="daily")], now, lasting=True)
            workers.beat(c, d, workers.Beat("w1", "h", 1, ["mail"], 5, 0, "1", stopping=False, loop_lag=0.0), now)

        app.database.transaction_sync(write)
        text = say("status")
        hourly, daily = text.index("hourly: 3 accounts"), text.index("daily: 3 accounts")
        assert "(last found at" in text[hourly : daily if daily > hourly else None]
        assert text.count("last found at") == 1

    def test_doctor_prints_the_settings_whatever_fails(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setenv("RESILIENT_DATABSE", "typo")
        assert main(["--database", f"sqlite:///{tmp_path}/none.db", "doctor"]) == 1
        text = " ".join(capsys.readouterr().out.split())
        assert "FAIL database" in text
        assert "the settings are below" in text
        assert "Settings: an option, then the environment" in text.partition("the settings are below")[2]

    def test_a_printed_command_can_be_pasted(self, database_url, say):
        app = Resilient(
            database_url, handlers=[push], providers=[],
            schedules=[Schedule(push, every="1h", name="sync@crm/*", resource_key="crm/a")],
        )  # fmt: skip
        asyncio.run(app.schedules.declare())
        (command,) = re.findall("`resilient (.*)`", say("schedules", "pause", "sync@crm/*"))
        assert main(shlex.split(command)) == 0
        assert "is paused" not in say("schedules", "list")

    def test_what_was_left_alone_is_said_so(self, database_url, say):
        app = Resilient(database_url, providers=[])
        app.ready_sync()
        with app.sync.audit.change("ann", "jobs retry", "job 7") as outcome:
            outcome.update({"retried": 0, "not_finished": 0, "undone": 1})
        text = say("audit")
        assert "1 left alone: their workflow turned around" in text
        assert "undone" not in text


def drop(url, codes, key, **options):
    """Jobs that died with these codes."""
    app = Resilient(url, handlers=[dies], providers=[])
    jobs = [app.sync.enqueue("contact.drop", code, resource_key=key, **options).id for code in codes]

    def die(c, d):
        for id_, code in zip(jobs, codes, strict=True):
            values = {
                "state": "dead", "finished_at": d.now(c), "last_error": "refused", "last_error_kind": "permanent",
                "last_error_code": code,
            }  # fmt: skip
            d.execute(c, sa.update(JOB).where(JOB.c.id == id_).values(**values))

    app.database.transaction_sync(die)
    return jobs


def test_an_account_that_is_passed_over_for_want_of_a_key_is_an_alert(database, say):
    """No gate is shut, so it is not among what is stopped; where one is, it stands there alone."""

    def told(c, d):
        now = d.now(c)
        alerts.record(c, d, [of_credentials("crm/7", UNREADABLE, now)], now, lasting=True)

    database.transaction_sync(told)
    assert "crm/7: its secrets are encrypted with a key that is missing" in say("status").partition("Alerts")[2]
    database.transaction_sync(gates.set_auth, "crm/7", UNREADABLE)
    assert "Alerts" not in say("status")
