"""Who changed what, why and when: from the dashboard, the command line, and where a program says it."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from resilient import Job, Permanent, Resilient, handler
from resilient.store.inspect import audit as store
from resilient.surface.cli import main
from tests.surface.dashboards import browser


@handler("contact.push")
async def push(job: Job[dict]) -> None:
    raise Permanent("no such contact")


@pytest.fixture
async def app(database):
    app = Resilient(database, handlers=[push])
    await app.ready()
    yield app
    await app.close()


async def changes(app, **words):
    return [(one.who, one.via, one.action, one.subject, one.why) for one in await app.audit.list(**words)]


async def test_every_change_of_the_dashboard_is_noted(app):
    job = await app.enqueue(push, {}, resource_key="github/acct-1")
    await app.worker().drain()
    ann = browser(app)
    page = await ann.get("/account/github/acct-1")
    await ann.submit(page.form("/do/resource", "pause"), "pause", reason="they asked")
    page = await ann.get("/accounts?q=github")
    sure = await ann.submit(page.form("/do/resources"), None, verb="resume")
    assert len(await app.audit.list()) == 1, "to count changes nothing"
    await ann.submit(sure.form("/do/resources"))
    page = await ann.get(f"/jobs/{job.id}")
    edit = await ann.get(f"/jobs/{job.id}/edit")
    await ann.submit(edit.form("/do/edit"), None, priority="3")
    await ann.submit(page.form("/do/job", "discard"), "discard")
    assert await changes(app) == [
        ("ann", "dashboard", "jobs discard", str(job.id), None),
        ("ann", "dashboard", "jobs edit", str(job.id), None),
        ("ann", "dashboard", "resources resume", "github", None),
        ("ann", "dashboard", "resources pause", "github/acct-1", "they asked"),
    ]
    outcomes = [one.outcome for one in await app.audit.list()]
    assert outcomes[0]["discarded"] == 1
    assert outcomes[1] == {"edited": 1, "running": 0, "too_late": 0, "sent": 0, "fields": ["priority"]}
    assert [one["changed"] for one in outcomes[2:]] == [1, 1]
    text = (await ann.get("/audit")).text
    assert "ann dashboard resources pause github/acct-1 they asked 1 changed" in text
    assert "they asked" not in (await ann.get("/audit?subject=github")).text


async def test_a_refused_change_is_noted_with_its_error_and_a_forged_one_not_at_all(app):
    ann = browser(app)
    page = await ann.get("/account/github/acct-1")
    form = page.form("/do/resource", "limit")
    answer = await ann.client.post("/do/resource", data=dict(form.fields) | {"verb": "limit"})
    assert answer.status_code == 403
    assert await app.audit.list() == []
    fields = dict(form.fields) | {"verb": "limit", "limits": "nonsense"}
    from tests.surface.dashboards import OURS

    assert (await ann.client.post("/do/resource", data=fields, headers=OURS)).status_code == 400
    (one,) = await app.audit.list()
    assert "InvalidInput" in one.outcome["error"]


def test_the_command_line_notes_what_it_changes(database_url, capsys):
    def run(*words):
        status = main(["--database", database_url, *words])
        return status, capsys.readouterr().out

    app = Resilient(database_url, handlers=[push])
    app.ready_sync()
    job = app.enqueue_sync("contact.push", {}, resource_key="github/acct-1")
    app.database.close_sync()
    assert run("audit") == (0, "Nothing was changed by hand.\n")
    assert run("resources", "pause", "github/acct-1", "--reason", "they asked")[0] == 0
    assert run("resources", "pause", "github/*", "--dry-run")[0] == 0
    assert run("jobs", "cancel", "--kind", "contact.push", "--yes")[0] == 0
    assert run("jobs", "list")[0] == 0
    for number in ("99999999999999999999", "-1"):
        assert run("audit", "--after", number) == (2, "")
    status, text = run("audit", "--json")
    rows = json.loads(text)["changes"]
    assert status == 0
    assert [(one["via"], one["action"], one["subject"], one["why"]) for one in rows] == [
        ("command line", "jobs cancel", "kind ['contact.push']", None),
        ("command line", "resources pause", "github/acct-1", "they asked"),
    ]
    assert rows[0]["outcome"]["cancelled"] == 1
    assert "they asked" in run("audit")[1]
    assert str(job.id) not in run("audit")[1]


async def test_a_program_notes_what_it_lets_people_do(app):
    async with app.audit.change("bo", "customer deleted", "crm/acct-9", why="by letter") as outcome:
        outcome["jobs"] = 3
    with pytest.raises(RuntimeError, match="away"):
        async with app.audit.change("bo", "customer deleted", "crm/acct-8"):
            raise RuntimeError("away")
    number = await app.audit.begin("bo", "half done")
    with app.sync.audit.change("cy", "thing", "x"):
        pass
    rows = await app.audit.list()
    assert [one.outcome for one in rows] == [{}, None, {"error": "RuntimeError: away"}, {"jobs": 3}]
    await app.audit.settle(number, {"ok": 1})
    await app.audit.settle(number, {"ok": 2})
    assert (await app.audit.list(who="bo", limit=1))[0].outcome == {"ok": 1}, "what is noted stays"
    assert [one.id for one in await app.audit.list(after=rows[1].id)] == [rows[2].id, rows[3].id]


async def test_what_is_old_goes_when_new_comes(app, clock):
    for n in range(3):
        await app.audit.begin("bo", f"old {n}")
    clock.advance(store.KEPT.total_seconds() + 1)
    await app.audit.begin("bo", "new")
    assert [one.action for one in await app.audit.list()] == ["new"]
    assert timedelta(days=365) < store.KEPT
