"""Changes of many beside the requests: their rate, their progress, their end."""

from __future__ import annotations

import pytest

from resilient import Job, Permanent, Resilient, handler
from resilient.surface.web.dashboard import bulk
from tests.helpers import until
from tests.surface.dashboards import OURS, Page, browser


@handler("contact.push")
async def push(job: Job[dict]) -> None:
    raise Permanent("no such contact")


@pytest.fixture
async def app(database):
    app = Resilient(database, handlers=[push], providers=[])
    await app.ready()
    yield app
    for one in bulk._BULKS.get(app.database, {}).values():
        one.halt.set()
        await one.task
    await app.close()


async def dead_jobs(app, number):
    await app.enqueue_many(push, [{}] * number, resource_key="github/acct-1")
    await app.worker().drain()


async def begun(ann, **fields):
    """The page and the address of a confirmed change."""
    sure = await ann.submit((await ann.get("/dead")).form("/do/jobs", "discard"), "discard", **fields)
    form = sure.form("/do/jobs")
    answer = await ann.client.post(form.action, data=dict(form.fields), headers=OURS)
    assert answer.status_code == 303
    return sure, answer.headers["location"].partition("?")[0]


async def state_of(ann, address, word):
    """The page, once it says the word."""
    pages = []

    async def says():
        pages.append(await ann.get(address))
        return word in pages[-1].text

    await until(says)
    return pages[-1]


async def test_a_group_is_given_up_at_a_rate_and_can_be_stopped(app):
    await dead_jobs(app, 4)
    ann = browser(app)
    sure, address = await begun(ann, rate="1/h")
    assert "at 1/h" in sure.text
    page = await state_of(ann, address, "1 of 4 changes")
    assert "▶ running 1 of 4 changes, about" in page.text
    (progress,) = (a for t, a in page.tags if t == "progress")
    assert (progress["max"], progress["value"]) == ("4", "1")
    viewer = browser(app, rights=["read"])
    assert "/do/bulk" not in [form.action for form in (await viewer.get(address)).forms]
    assert await app.jobs.count(state="dead") == 3
    page = await ann.submit(page.form("/do/bulk"))
    page = await state_of(ann, address, "stopped")
    assert "1 of 4 changes" in page.text
    (row,) = await app.audit.list()
    assert (row.action, row.outcome["discarded"], row.outcome["stopped_after"]) == ("jobs discard", 1, 1)
    assert await app.jobs.count(state="dead") == 3


async def test_only_who_may_make_a_change_stops_it(app):
    await dead_jobs(app, 2)
    ann = browser(app)
    _, address = await begun(ann, rate="1/h")
    page = await ann.get(address)
    reader = browser(app, rights=["read", "resources"])
    token = dict((await reader.get("/accounts")).form("/do/resources").fields)["token"]
    form = {"id": dict(page.form("/do/bulk").fields)["id"], "token": token}
    answer = await reader.client.post("/do/bulk", data=form, headers=OURS)
    assert answer.status_code == 403
    assert "lacks the right" in Page(answer.text).text
    await ann.get("/bulk/none", 404)


async def test_many_go_in_parts_to_their_end(app, monkeypatch):
    monkeypatch.setattr(bulk, "PART", 3)
    await dead_jobs(app, 10)
    ann = browser(app)
    _, address = await begun(ann)
    page = await state_of(ann, address, "ended")
    assert "✓ ended 10 of 10 changes." in page.text
    assert "10 discarded" in page.text
    assert await app.jobs.count(state="dead") == 0
    (row,) = await app.audit.list()
    assert row.outcome["discarded"] == 10


async def test_many_accounts_are_changed_at_a_rate(app, monkeypatch):
    monkeypatch.setattr(bulk, "PART", 3)
    for n in range(8):
        await app.resources.pause(f"github/acct-{n}")
    ann = browser(app)
    page = await ann.get("/accounts?q=github&gate=pause")
    sure = await ann.submit(page.form("/do/resources"), None, verb="resume", gate="pause", limit="7", rate="1000/s")
    await app.resources.resume("github/acct-0")  # meanwhile somebody else did
    page = await ann.submit(sure.form("/do/resources"))
    await until(lambda: all(one.state != "running" for one in bulk._BULKS[app.database].values()))
    (row,) = [one for one in await app.audit.list() if one.who == "ann"]
    assert (row.action, row.outcome) == ("resources resume", {"changed": 7})
    assert len(await app.resources.list(gate="pause")) == 0


async def test_what_fails_is_said(app, monkeypatch):
    monkeypatch.setattr(bulk, "PART", 1)
    await dead_jobs(app, 3)
    ann = browser(app)

    async def refuse(*_, **__):
        raise OSError("the disk is full")

    monkeypatch.setattr(app.jobs, "discard", refuse)
    _, address = await begun(ann)
    page = await state_of(ann, address, "failed")
    assert "OSError: the disk is full" in page.text
    (row,) = await app.audit.list()
    assert "the disk is full" in row.outcome["error"]


async def test_not_too_many_at_once_and_a_rate_must_be_one(app, monkeypatch):
    await dead_jobs(app, 2)
    ann = browser(app)
    form = (await ann.get("/dead")).form("/do/jobs", "discard")
    for rate in ("fast", "0/s", "-1/s"):
        fields = dict(form.fields) | {"verb": "discard", "rate": rate}
        assert (await ann.client.post(form.action, data=fields, headers=OURS)).status_code == 400
    monkeypatch.setattr(bulk, "AT_ONCE", 1)
    _, address = await begun(ann, rate="1/h")
    await state_of(ann, address, "1 of 2 changes")
    fields = dict(form.fields) | {"verb": "discard", "rate": "1/h", "sure": "yes"}
    answer = await ann.client.post(form.action, data=fields, headers=OURS)
    assert answer.status_code == 400
    assert "go on already" in answer.text
