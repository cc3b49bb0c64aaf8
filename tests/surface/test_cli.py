"""The command line on real databases: what it prints for people, what for programs, and how it exits."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import shlex
import subprocess
import sys
import textwrap
import time
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from resilient.core.alerts.rules import Finding
from resilient.core.base.bounds import bounds
from resilient.core.gates.learnt import Refusal
from resilient.store import alerts
from resilient.store.db import schema
from resilient.store.db.database import Database
from resilient.store.gates import controls as gates
from resilient.store.gates import resources
from resilient.store.inspect import workers
from resilient.store.jobs.filters import JOB
from resilient.store.schedules import ticks
from resilient.surface.cli import main
from tests import nursery
from tests.helpers import LIMIT

PROGRAM = """
    from pydantic import BaseModel
    from resilient import Job, Limit, Resilient, Retry, Schedule, handler

    class Mail(BaseModel):
        to: str

    @handler("mail.send", retry=Retry(max_attempts=3))
    async def send(job: Job[Mail]) -> None:
        if job.payload.to == "bug":
            raise ValueError("boom")

    @handler("issues.sync")
    async def sync(job: Job[None]) -> None: ...

    app = Resilient({url!r}, handlers=[send, sync], limits={{"github/*": [Limit(60, per=60)]}},
        schedules=[Schedule(sync, every="1h", name="hourly", resource_key="github/a"),
                   Schedule(sync, every="1h", name="each", for_each=lambda: ["github/a", "github/b"])])
"""


@pytest.fixture
def program(tmp_path, monkeypatch, database_url):
    """A user's program on this test's database, found from its directory."""
    (tmp_path / "shop.py").write_text(textwrap.dedent(PROGRAM).format(url=database_url))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("RESILIENT_APP", "shop:app")
    monkeypatch.delenv("RESILIENT_DATABASE", raising=False)
    yield "shop:app"
    sys.modules.pop("shop", None)


@pytest.fixture
def run(capsys, program):
    """Run a command: (status, what it printed, what it complained of)."""

    def call(*arguments):
        sys.modules.pop("shop", None)
        status = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def ok(run):
    """Run a command that must succeed; its output."""

    def call(*arguments):
        status, out, err = run(*arguments)
        assert (status, err) == (0, ""), (status, out, err)
        return out

    return call


@pytest.fixture
def read(ok):
    """Run a command with --json; the document."""
    return lambda *arguments: json.loads(ok(*arguments, "--json"))


@pytest.fixture
def database(database_url):
    opened = Database(database_url)
    yield opened
    opened.close_sync()


@pytest.fixture
def mark(database):
    """Write columns over jobs, as an engine that ran them would have."""

    def write(*ids, **columns):
        if columns.get("state") in {"dead", "succeeded", "cancelled"}:
            columns.setdefault("finished_at", datetime.now(UTC))
        where = JOB.c.id.in_([sa.UUID().python_type(i) for i in ids])
        database.transaction_sync(lambda c, d: d.execute(c, sa.update(JOB).where(where).values(**columns)))

    return write


@pytest.fixture
def enqueue(ok):
    return lambda *arguments, key="github/a": ok(
        "enqueue", "mail.send", '{"to": "a@b.c"}', "--resource", key, *arguments
    ).strip()


def drain():
    """What a worker of the app would do."""

    async def work():
        sys.modules.pop("shop", None)
        app = importlib.import_module("shop").app
        await app.worker().drain(timeout=LIMIT)
        await app.close()

    asyncio.run(work())


# -- enqueue, look ---------------------------------------------------------------------------------------------------


def test_enqueue_list_show_why(ok, read, enqueue):
    assert "There are no jobs." in ok("jobs", "list")
    job = enqueue("--priority", "5", "--tag", "user=7", "--delay", "1h", "--max-attempts", "9")
    (listed,) = read("jobs", "list")["jobs"]
    assert (listed["id"], listed["state"], listed["priority"], listed["tags"]) == (job, "scheduled", 5, {"user": "7"})
    assert listed["max_attempts"] == 9
    out = ok("jobs", "list", "--state", "scheduled", "--tag", "user=7", "--since", "1h", "--run-before", "+2h")
    assert job in out
    assert "in 59 min" in out or "in 1 h" in out
    assert "No job fits." in ok("jobs", "list", "--run-after", "+2h")
    shown = ok("jobs", "show", job)
    assert all(text in shown for text in (job, "mail.send", "github/a", '{"to": "a@b.c"}', "user=7", "Why"))
    document = read("jobs", "show", job)
    assert document.keys() == {"job", "attempts", "why"}
    assert read("jobs", "why", job)["reasons"][0]["code"] == "scheduled"
    assert ok("jobs", "why", job).startswith("It is scheduled to run at ")


def test_a_failure_of_our_own_code_is_shown_with_the_line_it_comes_from(ok):
    job = ok("enqueue", "mail.send", '{"to": "bug"}', "-r", "a/b", "--max-attempts", "1").strip()

    drain()
    shown = ok("jobs", "show", job)
    _, _, traceback = shown.partition("\nTraceback of execution 1\n")
    assert 'raise ValueError("boom")' in traceback
    assert "shop.py" in traceback


def test_one_that_waits_for_its_turn_waits_since_it_was_enqueued(ok, enqueue, mark):
    for _ in range(2):
        job = enqueue("--ordering-key", "k", "--delay", "1h")
    mark(job, created_at=datetime.now(UTC) - timedelta(minutes=90))
    assert re.search(rf"{job} +blocked +for 1 h", ok("jobs", "list", "--state", "blocked"))


def test_a_payload_from_a_file_and_from_standard_input(ok, read, tmp_path, monkeypatch):
    import io

    (tmp_path / "p.json").write_text('{"to": "file"}')
    monkeypatch.setattr("sys.stdin", io.StringIO('{"to": "stdin"}'))
    first = ok("enqueue", "mail.send", "@p.json", "-r", "github/a").strip()
    second = ok("enqueue", "mail.send", "-", "-r", "github/a").strip()
    assert [read("jobs", "show", i)["job"]["payload"]["to"] for i in (first, second)] == ["file", "stdin"]


@pytest.mark.parametrize("text", ["NaN", '{"to": "a", "n": Infinity}', '{"to": "a", "n": 1e999}'])
def test_a_number_that_is_none_is_no_json(run, enqueue, read, text):
    status, out, err = run("enqueue", "mail.send", text, "-r", "github/a")
    assert (status, out) == (2, "")
    assert "the payload is not JSON" in err
    job = enqueue("--delay", "1h")
    assert run("jobs", "edit", job, "--payload", text)[0] == 2
    assert [one["payload"] for one in read("jobs", "list")["jobs"]] == [{"to": "a@b.c"}]


def test_a_key_that_an_address_loses_is_refused_and_an_old_one_is_shown_and_erased(enqueue, ok, read, run, mark):
    status, _, err = run("enqueue", "mail.send", '{"to": "x"}', "-r", "github/..")
    assert status == 2
    assert "'github/..' is not a resource key: no segment may be '.' or '..'" in err
    mark(enqueue(), resource_key="github/..")  # as an earlier version wrote it
    assert "github/.." in ok("resources", "show", "github/..")
    assert ok("resources", "pause", "github/..", "--reason", "odd")
    assert "paused" in ok("resources", "list")
    assert '"github/.."' in ok("export", "github/..")
    assert ok("erase", "github/..", "--yes").startswith("Deleted 1 job")
    assert read("jobs", "list")["jobs"] == []


@pytest.mark.parametrize(("option", "text"), [("--breaker", "streak=nan"), ("--limit", "inf/s"), ("--limit", "nan/s")])
def test_a_limit_is_finite(run, option, text):
    status, _, err = run("resources", "limit", "github/a", option, text)
    assert status == 2
    assert "streak is a count from 1" in err or "Limit(rate=" in err


def test_nobody_changed_anything(ok):
    assert ok("audit") == "Nothing was changed by hand.\n"
    assert ok("audit", "--who", "nobody") == "No change by 'nobody' is noted.\n"
    assert ok("audit", "--who", "ann", "--subject", "github/a") == "No change by 'ann' of 'github/a' is noted.\n"


def test_a_unique_key_is_kept(enqueue, read, run):
    first = enqueue("--unique-key", "u")
    status, out, _ = run("enqueue", "mail.send", '{"to": "x"}', "-r", "github/a", "--unique-key", "u")
    assert (status, out.startswith(first)) == (0, True)
    assert read("jobs", "count") == {"count": 1, "more": False}


def test_pages(enqueue, read, ok):
    ids = [enqueue() for _ in range(3)]
    first = read("jobs", "list", "--limit", "2", "--order", "oldest")
    assert [j["id"] for j in first["jobs"]] == ids[:2]
    rest = read("jobs", "list", "--order", "oldest", "--after", first["next"])
    assert ([j["id"] for j in rest["jobs"]], rest["next"]) == (ids[2:], None)
    assert f"There may be more: --after {ids[0]}" in ok("jobs", "list", "--limit", "3")
    assert ok("jobs", "count", "--resource", "github/*").strip() == "3"


# -- change ----------------------------------------------------------------------------------------------------------


def test_one_job_by_id_needs_no_confirmation(enqueue, run, read):
    job = enqueue()
    assert run("jobs", "cancel", job)[:2] == (0, "1 cancelled.\n")
    status, out, _ = run("jobs", "cancel", job)
    assert (status, out) == (1, f"1 over already.\nWhere it stands: `resilient jobs show {job}`.\n")
    assert read("jobs", "retry", job) == {
        "retried": 1, "not_finished": 0, "ambiguous": 0, "duplicates": 0, "undone": 0, "dry_run": False
    }  # fmt: skip
    assert read("jobs", "show", job)["job"]["state"] == "ready"


def end_of_input():
    raise EOFError


def test_many_need_a_yes_or_a_person(enqueue, run, read, monkeypatch):
    for _ in range(3):
        enqueue()
    status, out, err = run("jobs", "cancel", "--state", "ready")
    assert (status, out) == (1, "")
    assert err == "error: Cancel 3 jobs? Say --yes to do it, or --dry-run to only count.\n"
    assert run("jobs", "cancel", "--state", "ready", "--dry-run")[:2] == (0, "Would be: 3 cancelled.\n")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda *_: "n")
    assert run("jobs", "cancel", "--state", "ready") == (
        1,
        "",
        "Cancel 3 jobs? [y/N] ",
    )  # also where a file has the rest
    monkeypatch.setattr("builtins.input", end_of_input)
    assert run("jobs", "cancel", "--state", "ready") == (1, "", "Cancel 3 jobs? [y/N] \n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    status, out, _ = run("jobs", "cancel", "--state", "ready", "--limit", "2")
    assert (status, out.endswith("2 cancelled.\n")) == (0, True)
    assert run("jobs", "cancel", "--all", "--yes")[:2] == (0, "1 cancelled.\n")
    assert run("jobs", "cancel", "--all", "--yes")[:2] == (0, "No job fits: nothing changed.\n")
    assert run("jobs", "cancel", "--all", "--dry-run")[:2] == (0, "No job fits: nothing would change.\n")
    assert read("jobs", "count", "--state", "cancelled")["count"] == 3


def test_edit(enqueue, ok, run, read):
    job, other = enqueue(), enqueue()
    out = ok(
        "jobs", "edit", job, "--payload", '{"to": "new"}', "--priority", "7", "--run-at", "+1h",
        "--max-attempts", "none", "--expires-at", "+2h", "--tag", "a=b",
    )  # fmt: skip
    assert out == "1 edited.\n"
    after = read("jobs", "show", job)["job"]
    assert (after["payload"], after["priority"], after["state"]) == ({"to": "new"}, 7, "scheduled")
    assert (after["max_attempts"], after["tags"]) == (None, {"a": "b"})
    ok("jobs", "edit", job, other, "--no-tags", "--expires-at", "none", "--run-at", "now", "--max-attempts", "4")
    after = read("jobs", "show", job)["job"]
    assert (after["tags"], after["expires_at"], after["state"], after["max_attempts"]) == (None, None, "ready", 4)
    assert run("jobs", "edit", job, "--payload", "{}")[0] == 2
    assert run("jobs", "edit", job, "--max-attempts", "many")[2].startswith("error: --max-attempts 'many'")
    assert run("jobs", "edit", job)[2].startswith("error: nothing to edit")
    ok("jobs", "cancel", job)
    assert run("jobs", "edit", job, other, "--priority", "1")[:2] == (1, "1 edited; 1 over already.\n")


def test_dead_letters(enqueue, ok, run, read, mark):
    ids = [enqueue() for _ in range(3)]
    assert "No job is dead." in ok("dead", "list")
    mark(*ids, state="dead", last_error="HTTP 422: no such contact", last_error_kind="permanent", attempts=3)
    mark(ids[2], last_error_kind="ambiguous")
    out = ok("dead", "list", "--error-kind", "permanent", "--text", "NO SUCH")
    assert ids[0] in out
    assert ids[2] not in out
    assert "3 of 3 attempts: permanent: HTTP 422: no such contact" in out
    assert "To run it again: `resilient jobs retry" in ok("dead", "show", ids[0])
    counted = read("dead", "replay", "--all", "--rate", "10/s", "--dry-run")
    assert (counted["retried"], counted["ambiguous"], counted["dry_run"]) == (2, 1, True)
    out = ok("dead", "replay", "--all", "--rate", "1/min", "--yes")
    assert out == "2 restarted; 1 may have taken effect: left alone (--repeat-ambiguous).\n"
    assert sorted(read("jobs", "show", i)["job"]["state"] for i in ids) == ["dead", "ready", "scheduled"]
    assert run("dead", "replay", ids[2])[0] == 1
    assert run("dead", "discard", ids[2])[:2] == (0, "1 discarded.\n")
    assert run("jobs", "delete", ids[2])[:2] == (0, "1 deleted.\n")


# -- resources -------------------------------------------------------------------------------------------------------


def test_why_of_a_key_that_nobody_uses_says_nothing_that_sounds_well(ok, run):
    status, out, err = run("resources", "why", "githb/a")
    assert (status, out) == (3, "")
    assert "there is no job of githb/a, and never was one" in err
    assert "Nothing stops" not in run("resources", "show", "githb/a")[1]
    ok("resources", "pause", "githb")
    status, out, _ = run("resources", "why", "githb/a")
    assert (status, out.startswith("githb is paused since"), len(out.splitlines())) == (3, True, 1)


def test_resources(enqueue, ok, run, read):
    assert ok("resources", "list") == "No resource is in use yet.\n"
    enqueue()
    assert ok("resources", "pause", "github/a", "--reason", "incident 7", "--for", "10m") == "github/a is paused.\n"
    out = ok("resources", "list", "--stopped")
    assert "github/a  paused  in 9 min" in out or "github/a  paused  in 10 min" in out
    assert "incident 7" in out
    (listed,) = read("resources", "list", "github/*")["resources"]
    assert (listed["key"], listed["gate"], listed["waiting"]) == ("github/a", "pause", 1)
    assert "is paused (incident 7)" in ok("resources", "why", "github/a")
    assert read("resources", "why", "github/a")["state"] == "stopped"
    assert ok("resources", "resume", "github/a") == "github/a is resumed.\n"
    assert ok("resources", "open", "github/a", "--until", "2199-01-01T00:00Z") == "github/a is opened.\n"
    assert "isolated" in ok("resources", "list")
    assert ok("resources", "close", "github/a") == "github/a is closed.\n"
    assert ok("resources", "reset", "github/a", "--dry-run") == "github/a would be reset.\n"
    assert "No resource is stopped." in ok("resources", "list", "--stopped")
    assert [run("resources", "show", "github/b", *how)[0] for how in ((), ("--json",))] == [3, 3]


@pytest.mark.parametrize(("change", "done"), [("resume", "resumed"), ("close", "closed"), ("reset", "reset")])
def test_who_ends_a_stop_is_told_what_still_stops_it(enqueue, ok, run, change, done):
    enqueue()
    ok("resources", "pause", "github", "--reason", "incident 7")
    out = ok("resources", change, "github/a")
    assert out.startswith(f"github/a is {done}.\n  Still: github is paused (incident 7) since ")
    assert out.count("\n") == 2
    assert json.loads(run("resources", change, "github/a", "--json")[1])["dry_run"] is False


@pytest.mark.parametrize(("change", "done"), [("resume", "resumed"), ("close", "closed"), ("reset", "reset")])
def test_a_stop_of_a_mistyped_resource_is_not_said_to_be_ended(enqueue, run, read, change, done):
    enqueue()
    status, out, err = run("resources", change, "githb/a")
    assert (status, out) == (3, "")
    assert err.startswith(f"error: githb/a is not {done}: there is no job of it, and never was one: is the key right?")
    assert [one["key"] for one in read("resources", "list")["resources"]] in ([], ["github/a"])


def test_resources_by_pattern(ok, run, read, database):
    database.transaction_sync(resources.ensure, ["github/a", "github/b", "gitlab/a"])
    status, _, err = run("resources", "pause", "github/*")
    assert (status, err.startswith("error: 2 resources would be paused. Go on? Say --yes")) == (1, True)
    assert "1 resource would be paused. Go on?" in run("resources", "pause", "gitlab/*")[2]
    slow = ("resources", "pause", "github/*", "--rate", "1/min")
    assert "2 resources would be paused, which takes 1 min" in run(*slow)[2]
    later = "Keys that come into use later are not meant; `resilient resources pause github` means everything below it."
    assert ok(*slow, "--dry-run") == f"  github/a\n  github/b\n2 resources would be paused.\n{later}\n"
    assert ok("resources", "pause", "github/*", "--yes", "--rate", "100/s", "--limit", "1").startswith("  github/a\n1 ")
    assert ok("resources", "reset", "*/*", "--stopped-after", "1h", "--gate", "pause", "-n").startswith(
        "  github/a\n1 "
    )
    assert read("resources", "reset", "*/*", "--stopped-before", "1h", "-n")["changed"] == 0
    assert ok("resources", "pause", "github/*", "--yes") == f"  github/a\n  github/b\n2 resources paused.\n{later}\n"
    assert read("resources", "resume", "*/*", "--yes") == {
        "changed": 2, "keys": ["github/a", "github/b"], "queued": [], "dry_run": False
    }  # fmt: skip
    assert ok("resources", "resume", "*/*", "--yes") == (
        "Nothing to do: nothing of the kind stops any resource that fits '*/*'.\n"
    )


def test_a_gate_narrows_a_single_resource(enqueue, ok, read):
    enqueue()
    ok("resources", "pause", "github/a")
    nothing = "Nothing to do: nothing of the kind stops github/a.\n"
    assert ok("resources", "open", "github/a", "--gate", "breaker") == nothing
    assert ok("resources", "reset", "github/a", "--gate", "cooldown") == nothing
    assert ok("resources", "reset", "github/a", "--gate", "cooldown", "--dry-run") == nothing
    assert read("resources", "reset", "github/a", "--gate", "cooldown")["changed"] == 0
    assert read("resources", "list", "--gate", "breaker")["resources"] == []
    assert [one["key"] for one in read("resources", "list", "--gate", "pause")["resources"]] == ["github/a"]
    assert ok("resources", "reset", "github/a", "--gate", "pause") == "github/a is reset.\n"
    assert ok("resources", "pause", "github/b", "--gate", "any") == (
        "Nothing to do: nothing of the kind stops github/b.\n"
    )


def test_a_pattern_means_keys_that_only_have_jobs_too(ok, read, enqueue):
    ids = [enqueue(key=f"r/{n}") for n in range(6)]
    out = ok("resources", "pause", "r/*", "--yes")
    assert "6 resources paused; no worker has used 6 of them yet.\n" in out
    drain()
    assert {read("jobs", "show", id_)["job"]["state"] for id_ in ids} == {"ready"}


def test_limits(ok, read, run):
    out = ok("resources", "limit", "github/a", "--limit", "100/min", "--concurrency", "4", "--breaker", "streak=9")
    assert out == "github/a is limited anew.\n  rate limits: 100 requests per 1 min; concurrency: 4 at once\n"
    shown = ok("resources", "show", "github/a")
    assert "100 requests per 1 min (set at runtime)" in shown
    assert read("resources", "show", "github/a")["policy"]["breaker"]["streak"] == 9
    out = ok("resources", "limit", "github/a", "--limit", "2/s burst 40")
    assert "2 requests per 1 s, burst 40" in " ".join(out.split())
    for wrong in ("2/s burst 0", "2/s burst x", "2/s burst"):
        assert run("resources", "limit", "github/a", "--limit", wrong)[0] == 2
    ok("resources", "limit", "github/a", "--no-limits", "--no-concurrency", "--breaker", "ratio=none")
    policy = read("resources", "show", "github/a")["policy"]
    assert (policy["limits"], policy["concurrency"], policy["breaker"]["ratio"]) == ([], None, None)
    ok("resources", "limit", "github/a", "--clear", "all")
    assert "60 requests per 1 min" in ok("resources", "show", "github/a")
    assert run("resources", "limit", "github/a")[0] == 2
    assert run("resources", "limit", "github/a", "--breaker", "streak")[2].startswith("error: --breaker 'streak'")


# -- schedules, tables, housekeeping ---------------------------------------------------------------------------------


def test_schedules(ok, read, run):
    assert "hourly" in ok("schedules", "list")
    assert ok("schedules", "pause", "hourly").startswith("hourly is paused until")
    assert read("schedules", "list")["schedules"][1]["paused"] is True
    assert ok("schedules", "resume", "hourly").startswith("hourly ticks again; next at ")
    job = read("schedules", "run", "hourly")
    assert (job["created"], read("jobs", "show", job["id"])["job"]["kind"]) == (True, "issues.sync")
    assert f"Job {job['id']} of hourly is not finished" in ok("schedules", "run", "hourly")
    assert run("schedules", "run", "daily") == (3, "", "error: there is no schedule 'daily'; known are: each, hourly\n")


def test_a_schedule_that_no_program_declares_is_removed(ok, read, run, program):
    status, _, err = run("schedules", "remove", "hourly")
    assert (status, err) == (
        2,
        "error: schedule 'hourly' is declared by this program: take it out of Resilient(schedules=[...])\n",
    )
    app = importlib.import_module("shop").app
    spec = app.schedules._specs["hourly"][1]
    app.database.transaction_sync(ticks.declare, {"monthly": ("report", spec)}, ())
    app.database.close_sync()
    assert ok("schedules", "remove", "monthly").startswith("monthly ticks no more.")
    assert [one["removed"] for one in read("schedules", "list")["schedules"] if one["name"] == "monthly"] == [True]
    assert run("schedules", "remove", "daily")[0] == 3


def test_schedules_for_each_account(ok, read, run):
    app = importlib.import_module("shop").app

    async def look():
        await app.schedules.tick()
        await app.close()

    asyncio.run(look())
    assert re.search(r"each +every 1 h +2 of lambda +in .+ +never", ok("schedules", "list"))
    shown = ok("schedules", "show", "each")
    assert re.search(r"accounts +2 of lambda", shown)
    assert re.search(r"github/b .* never", shown)
    document = read("schedules", "show", "each", "--limit", "1")
    assert [one["resource_key"] for one in document["accounts"]] == ["github/a"]
    assert document["next"] == "github/a"
    assert document["schedule"]["accounts"] == 2
    job = read("schedules", "run", "each", "--account", "github/b")
    assert read("jobs", "show", job["id"])["job"]["resource_key"] == "github/b"
    assert "say which one" in run("schedules", "run", "each")[2]


def test_db(ok, run, read, monkeypatch, empty_url, database):
    assert ok("db", "check").startswith("The tables fit: revision ")
    assert ok("db", "upgrade").startswith("Nothing to do")
    needs = read("db", "check")["needs"]
    name = f"0099_since_{needs[:4]}"
    newer = f"UPDATE {schema.VERSION_TABLE} SET version_num = '{name}'"
    database.transaction_sync(lambda c, _d: c.exec_driver_sql(newer))
    fits = f"revision {name}, made by a newer version; this one needs {needs}."
    assert ok("db", "check").strip() == f"The tables fit: {fits}"
    assert ok("db", "upgrade").strip() == f"Nothing to do: the tables are at {fits}"
    assert f"revision {name}, made by a newer version" in run("doctor")[1]
    monkeypatch.delenv("RESILIENT_APP")
    status, _, err = run("--database", empty_url, "db", "check")
    assert status == 4
    (command,) = re.findall("`resilient (--database .* db upgrade)`", err)
    assert shlex.split(command) == ["--database", empty_url, "db", "upgrade"]
    assert ok("--database", empty_url, "db", "upgrade").startswith("Applied ")
    assert read("db", "check", "--database", empty_url)["revision"]
    assert "There are no jobs." in ok("jobs", "list", "--database", empty_url)


def test_prune(enqueue, ok, read, run, mark):
    job = enqueue()
    mark(job, state="succeeded", finished_at=datetime.now(UTC) - timedelta(days=3))
    assert read("prune", "--dry-run")["succeeded"] == 0
    assert read("prune", "--older-than", "2d", "--dry-run")["succeeded"] == 1
    assert run("prune", "--older-than", "2d")[0] == 1
    assert ok("prune", "--older-than", "2d", "--yes") == "Deleted 1 succeeded job.\n"
    assert ok("prune", "--yes") == "Deleted nothing.\n"


def test_erase_and_export(enqueue, ok, read, run):
    enqueue()
    enqueue(key="github/b")
    exported = [json.loads(line) for line in ok("export", "github/a").splitlines()]
    assert [(row["table"], row["payload"]) for row in exported if row["table"] == "job"] == [("job", {"to": "a@b.c"})]
    assert ok("erase", "github/a", "--dry-run") == "Would delete 1 job, 1 place in line.\n"
    assert run("erase", "github/a")[0] == 1, "nobody said yes"
    assert ok("erase", "github/a", "--yes", "--why", "they left") == "Deleted 1 job, 1 resource, 1 place in line.\n"
    assert [job["resource_key"] for job in read("jobs", "list")["jobs"]] == ["github/b"]
    assert read("erase", "github/a", "--dry-run") == {"resource_key": "github/a", "rows": {}, "dry_run": True}
    assert ok("erase", "github/a") == ok("erase", "github/nobody", "--yes") == "Would delete nothing.\n"
    (note,) = (one for one in read("audit")["changes"] if one["action"].endswith("erase"))
    assert (note["action"], note["why"], note["outcome"]) == (
        "erase", "they left", {"job": 1, "resource": 1, "turn": 1},
    )  # fmt: skip
    assert run("erase", "github/*", "--dry-run")[:2] == (2, "")


def test_doctor(enqueue, run):
    enqueue()
    status, out, _ = run("doctor")
    assert (status, "no worker is alive, and jobs are waiting" in out) == (1, True)
    status, out, _ = run("doctor", "--json")
    document = json.loads(out)
    assert (status, document["healthy"], document["findings"][0]["name"]) == (1, False, "database")
    assert {"name", "value", "unit", "beyond", "setting"} == document["bounds"][0].keys()


def test_the_dashboard_warns_of_a_database_that_is_not_there(run, tmp_path, monkeypatch):
    from resilient.surface.web.dashboard import alone

    monkeypatch.setattr(alone, "serve", lambda *_args, **_options: None)
    for made in (False, True):
        if made:
            (tmp_path / "none.db").touch()
        status, _, err = run("--database", f"sqlite:///{tmp_path}/none.db", "dashboard")
        assert status == 0
        assert err.startswith("warning: the database ")
        assert f"`resilient --database sqlite:///{tmp_path}/none.db db upgrade`" in err
    assert run("dashboard") == run("dashboard", "--no-browser") == (0, "", "")
    status, _, err = run("--app", "nowhere:app", "dashboard")
    assert (status, err.count("there is no module")) == (2, 1)


def test_doctor_of_a_program_that_makes_its_file(run, tmp_path, monkeypatch):
    monkeypatch.setenv("RESILIENT_APP", "fresh:app")
    (tmp_path / "fresh.py").write_text(
        f"from resilient import Resilient\napp = Resilient('sqlite:///{tmp_path}/new.db')\n"
    )
    status, out, _ = run("doctor")
    assert (status, out.count("FAIL")) == (0, 0)
    assert f"ok    database: there is no {tmp_path}/new.db yet: this program makes it" in out
    (tmp_path / "new.db").touch()
    status, out, _ = run("doctor")
    assert (status, out.count("FAIL")) == (0, 0)
    assert "ok    schema: this program makes the tables" in out
    assert run("--database", f"sqlite:///{tmp_path}/none.db", "doctor")[0] == 1
    sys.modules.pop("fresh", None)


def test_doctor_prints_what_is_believed_from_outside(ok):
    out = ok("doctor", "--verbose")
    short = ok("doctor")
    assert f"and {len(bounds())} bounds hold for what comes from outside: `resilient" in short
    assert "answer_body" not in short
    assert "RESILIENT_CONNECT_PORT" not in short
    assert "RESILIENT_CONNECT_PORT" in out
    for one in bounds():
        unit = one.unit[:-1] if one.value == 1 else one.unit
        words = next(line for line in out.splitlines() if line.startswith(one.name)).split()
        assert words[1:3] == [f"{one.value:,}", unit]


# -- status ----------------------------------------------------------------------------------------------------------


def test_status_of_nothing(ok, read, database_url):
    out = ok("status")
    assert "Jobs now:   0 scheduled, 0 ready, 0 running, 0 blocked, 0 dead" in out
    assert "none is running" in out
    assert "Stopped:    nothing" in out
    assert read("status").keys() >= {"at", "jobs", "lately", "workers", "stopped", "retrying", "died", "alerts"}


def test_status_shows_what_throttles_taught(ok, read, database):
    refusal = Refusal(0, 1.0, 5, 0.2, 3)

    def throttle(c, d):
        for n in range(12):
            gates.cool_down(c, d, f"crm/{n:02}", d.now(c) + timedelta(seconds=1), "429", 0.0, refusal=refusal)

    database.transaction_sync(throttle)
    out = ok("status")
    assert "crm/00: 4.8/s, learnt at" in out
    assert "and of 2 resources more" in out
    assert read("status")["learnt"]["crm/11"]["rate"] == 4.8


def test_resources_show_names_the_budgets_of_an_account(ok, read, database):
    def throttle(c, d):
        until = d.now(c) + timedelta(seconds=60)
        refusal = Refusal(0, 1.0, 5, 0.2, 3)
        gates.cool_down(c, d, "crm/00/budget:search", until, "429", 0.0, refusal=refusal)
        gates.cool_down(c, d, "crm/00", d.now(c) + timedelta(seconds=1), "429", 0.0, refusal=refusal)

    database.transaction_sync(throttle)
    line = next(line for line in ok("resources", "show", "crm/00").splitlines() if line.startswith("budget search"))
    assert "rests until" in line
    assert "; 4.8/s, learnt at" in line
    shown = read("resources", "show", "crm/00")
    assert shown["resource"]["budgets"]["search"]["learnt"]["rate"] == 4.8
    assert any(reason["code"] == "budget" for reason in shown["why"]["reasons"])
    ok("resources", "limit", "crm/00", "--forget")
    assert read("resources", "show", "crm/00")["resource"]["budgets"]["search"]["learnt"] is None
    ok("resources", "reset", "crm/00")
    assert read("resources", "show", "crm/00")["resource"]["budgets"] == {}


def test_status_answers_what_is_wrong(ok, read, enqueue, mark, database):
    jobs = [enqueue(key="salesforce/a") for _ in range(2)] + [enqueue(key="github/a"), enqueue(key="github/b")]
    error = {"last_error": "HTTP 500", "last_error_kind": "transient", "last_error_code": "http_500", "attempts": 1}
    mark(jobs[2], state="dead", **error)
    mark(jobs[3], state="scheduled", run_at=datetime.now(UTC) - timedelta(minutes=5), **error)

    def outage(c, d):
        now = d.now(c)
        gates.cool_down(c, d, "salesforce/a", now + timedelta(minutes=5), "TOO_MANY", 0.0, exact=True)
        workers.beat(c, d, workers.Beat("w1", "h", 1, ["mail.send"], 50, 3, "1", stopping=False, loop_lag=4.0), now)

    database.transaction_sync(outage)
    out = ok("status")
    assert "1 scheduled job is overdue." in out
    assert "Workers:    1 alive, 3 of 50 slots busy, as heard " in out  # no job runs by now
    assert "1 event loop stood still, for up to 4 s" in out
    (line,) = [line for line in out.splitlines() if line.startswith("salesforce")]
    assert line.split()[:4] == ["salesforce", "cooldown", "1", "2"]
    assert f"such as salesforce/a, job {jobs[0]} (TOO_MANY)" in out
    assert f"{jobs[2]} HTTP 500" in out.partition("Dead within the last hour")[2]
    assert f"{jobs[3]} HTTP 500" in out.partition("to be tried again")[2]
    document = read("status")
    assert document["stopped"][0]["waiting"] == 2
    assert document["died"][0]["example"] == jobs[2]
    assert document["workers"][0]["kinds"] == ["mail.send"]
    assert document["workers"][0]["loop_lag"] == 4.0


def test_jobs_that_struggle(ok, read, enqueue, mark):
    jobs = [enqueue() for _ in range(3)]
    mark(jobs[0], attempts=2, last_error="HTTP 500", last_error_kind="transient", last_error_code="http_500")
    mark(jobs[1], state="dead", attempts=3)
    assert [one["id"] for one in read("jobs", "list", "--struggling")["jobs"]] == [jobs[0]]
    assert "2 of 3 attempts: transient http_500: HTTP 500" in ok("jobs", "list", "--struggling")
    assert read("jobs", "count", "--struggling")["count"] == 1


def test_without_a_worker_alerts_are_as_they_were(ok, database, enqueue):
    """Nobody looks then: the job may have run since, and how long it waited is what was seen."""
    job = enqueue()

    def seen_an_hour_ago(c, d, *, worker):
        now = d.now(c)
        before = now - timedelta(hours=1)
        since = (before - timedelta(minutes=20)).isoformat()
        finding = Finding("backlog", "github", {"since": since, "job": job, "resource": "github/a"})
        alerts.record(c, d, [finding], before, lasting=True)
        if worker:
            workers.beat(c, d, workers.Beat("w1", "h", 1, ["mail.send"], 50, 3, "1", stopping=False), now)

    database.transaction_sync(seen_an_hour_ago, worker=False)
    out = " ".join(ok("status").split())
    assert re.search(r"Alerts, as they were at [-0-9: ]+ UTC \(1 h ago\): without a worker nobody looks", out)
    assert f"job {job} on github/a is ready for 20 min and nothing stops it" in out
    database.transaction_sync(seen_an_hour_ago, worker=True)
    out = " ".join(ok("status").split())
    assert f"Alerts github: job {job} on github/a is ready for 1 h 20 min" in out


def test_a_retry_that_is_overdue_is_due(ok, enqueue, mark):
    error = {"last_error": "HTTP 500", "last_error_kind": "transient", "last_error_code": "http_500", "attempts": 1}
    mark(enqueue(), state="scheduled", run_at=datetime.now(UTC) - timedelta(minutes=5), **error)
    mark(
        enqueue(),
        state="scheduled",
        run_at=datetime.now(UTC) + timedelta(minutes=5),
        **{**error, "last_error_code": "x"},
    )
    out = ok("status").partition("to be tried again")[2]
    assert re.search(r"http_500 +1 +due 5 min\n", out)
    assert re.search(r"x +1 +in [45] min\n", out)


def test_a_bad_night_fits_on_a_screen(ok, enqueue, database):
    enqueue(key="github/3")

    def outage(c, d):
        now = d.now(c)
        for n in range(300):
            gates.set_auth(c, d, f"hubspot/{n}", "needs_reauth")
            gates.cool_down(c, d, f"github/{n}", now + timedelta(minutes=5 + n % 60), "abuse", 0.0, exact=True)
        gates.open_(c, d, "github", until=now + timedelta(minutes=4))
        gates.pause(c, d, "stripe/a", reason="incident 7 (anna)")
        throttled = [Finding("long_throttle", f"github/{n}", {"until": now.isoformat()}) for n in range(90)]
        alerts.record(c, d, throttled, now, lasting=True)

    database.transaction_sync(outage)
    out = ok("status")
    lines = out.splitlines()
    assert len(lines) < 24
    assert [line.split()[:2] for line in lines if re.match("(github|hubspot|stripe) ", line)] == [
        ["github", "circuit"], ["github", "cooldown"], ["hubspot", "auth"], ["stripe", "paused"],
    ]  # fmt: skip
    assert re.search(r"github +cooldown +300 +1 .* in [45] min to 1 h", out)
    assert re.search(r"hubspot +auth +300 +0 .* on reconnect", out)
    assert "stripe/a; incident 7 (anna)" in out
    assert "resilient resources why github`" in out
    assert "(and 89 others like it at github" in out.replace("\n ", "")


# -- worker ----------------------------------------------------------------------------------------------------------


def test_a_kind_that_is_almost_one_of_the_programs(run):
    for option in ("--kind", "--except-kind"):
        status, _, err = run("worker", option, "mail.sned")
        assert (status, "'mail.sned'; did you mean 'mail.send'?" in err) == (2, True), err


def test_a_worker_runs_jobs_until_it_is_told_to_stop(enqueue, read, program, tmp_path):
    job = enqueue()
    words = ["worker", "--concurrency", "2", "--log-level", "warning"]
    worker = nursery.module("resilient.surface.cli", *words, cwd=tmp_path, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while read("jobs", "show", job)["job"]["state"] != "succeeded":
            assert worker.poll() is None, worker.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert len(read("status")["workers"]) == 1
        worker.terminate()
        assert worker.wait(LIMIT) == 0
        assert worker.stderr.read() == ""
        assert read("status")["workers"] == []
    finally:
        worker.kill()
        worker.wait()
        worker.stderr.close()


@pytest.mark.parametrize(
    ("option", "words"), [("--max-jobs", "executions (--max-jobs 1)"), ("--max-memory", "MB of memory")]
)
def test_a_worker_ends_by_itself_and_drained(enqueue, read, program, tmp_path, option, words):
    for _ in range(3):
        enqueue()
    command = ["worker", "--concurrency", "1", option, "1"]
    worker = nursery.module("resilient.surface.cli", *command, cwd=tmp_path, stderr=subprocess.PIPE)
    try:
        _, err = worker.communicate(timeout=LIMIT)
    finally:
        worker.kill()
        worker.wait()
    assert worker.returncode == 0, err
    assert words in err
    status = read("status")
    assert status["workers"] == []
    assert status["jobs"]["running"] == 0
    assert option == "--max-memory" or {job["state"] for job in read("jobs", "list")["jobs"]} >= {"succeeded"}
