"""Two tabs, two people, two clicks: what somebody has done since is neither done again nor undone."""

from __future__ import annotations

import asyncio
import html
import re

import httpx
import pytest
from pydantic import BaseModel

from resilient import Job, Kind, Permanent, Resilient, handler
from resilient.surface.web.dashboard import mount
from tests.surface.dashboards import OURS, Page, browser


class Invoice(BaseModel):
    amount: int
    note: str = ""


AREA = re.compile(r'<textarea[^>]* name="([^"]+)"[^>]*>\n([^<]*)</textarea>')
REFUSALS = {"bank/1"}  # resources whose jobs fail


@handler("invoice.pay")
async def pay(job: Job[Invoice]) -> None:
    if job.resource_key in REFUSALS:
        raise Permanent("refused")


@pytest.fixture
async def app(database):
    REFUSALS.add("bank/1")
    app = Resilient(database, handlers=[pay])
    await app.ready()
    yield app
    await app.close()


@pytest.fixture
async def job(app):
    """A job that is dead."""
    job_id = (await app.enqueue(pay, Invoice(amount=10), resource_key="bank/1")).id
    await app.worker().drain()
    assert (await app.jobs.get(job_id)).state == "dead"
    return job_id


async def press(ann, form, button, **values):
    fields = dict(form.fields) | {name: value for name, value in form.buttons if value == button} | values
    return await ann.client.post(form.action, data=fields, headers=OURS, follow_redirects=True)


# -- run again, give up ------------------------------------------------------------------------------------------------


async def test_what_ran_again_and_succeeded_is_not_run_by_an_old_page(app, job):
    ann, bob = browser(app), browser(app, name="bob")
    pages = [await one.get(f"/jobs/{job}") for one in (ann, bob)]
    REFUSALS.clear()
    assert "It runs again" in (await ann.submit(pages[0].form("/do/job", "retry"), "retry")).text
    assert (
        "Nothing was changed: the page was old, it is ready now."
        in (await bob.submit(pages[1].form("/do/job", "retry"), "retry")).text
    )
    await app.worker().drain()
    page = await bob.submit(pages[1].form("/do/job", "retry"), "retry")
    assert "Nothing was changed: the page was old, it is succeeded now." in page.text
    await app.worker().drain()
    assert (await app.jobs.get(job)).executions == 2
    assert "It runs again" in (await bob.submit(page.form("/do/job", "retry"), "retry")).text, "by a new page it does"


@pytest.mark.parametrize("verb", ["retry", "discard"])
async def test_what_died_once_more_is_another_death(app, job, verb):
    """Who looked at the provider and found that nothing happened looked at the request before."""
    ann = browser(app)
    old = (await ann.get(f"/jobs/{job}")).form("/do/job", verb)
    await app.jobs.retry(job)
    await app.worker().drain()
    page = await ann.submit(old, verb)
    assert "Nothing was changed: the page was old, it is dead now." in page.text
    assert (await app.jobs.get(job)).executions == 2
    page = await ann.submit(page.form("/do/job", verb), verb)
    assert "Nothing was changed" not in page.text
    assert (await app.jobs.get(job)).state == ("ready" if verb == "retry" else "cancelled")


@pytest.mark.parametrize("end", ["yesterday", "9999-12-31T23:59:59.999999+00:00"])
async def test_an_end_that_is_none_is_refused(app, job, end):
    ann = browser(app)
    form = (await ann.get(f"/jobs/{job}")).form("/do/job", "retry")
    answer = await press(ann, form, "retry", seen=f"dead {end}")
    assert (answer.status_code, "is no end of a job" in Page(answer.text).text) == (400, True)
    assert (await app.jobs.get(job)).state == "dead"


# -- two clicks --------------------------------------------------------------------------------------------------------


async def test_a_second_click_is_no_second_change(app, monkeypatch):
    """A browser without JavaScript sends the form twice, and shows the answer to the last."""
    monkeypatch.setattr(mount, "DOUBLE", 60.0)
    ann = browser(app)
    form = (await ann.get("/enqueue?kind=invoice.pay&resource=bank/1")).form("/do/enqueue")
    clicks = [press(ann, form, None, **{"p.amount": "7"}) for _ in range(3)]
    first, *others = await asyncio.gather(*clicks)
    assert "Enqueued." in Page(first.text).text
    assert {one.url for one in others} == {first.url}
    assert await app.jobs.count() == 1
    assert len(await app.audit.list()) == 1
    await press(ann, form, None, **{"p.amount": "8"})
    await press(ann, form, None, **{"p.amount": "7"})
    assert await app.jobs.count() == 3, "something else stood between them"


async def test_two_people_are_no_double_click(app, monkeypatch):
    monkeypatch.setattr(mount, "DOUBLE", 60.0)
    for one in (browser(app), browser(app), browser(app, name="bob")):
        form = (await one.get("/enqueue?kind=invoice.pay&resource=bank/1")).form("/do/enqueue")
        assert (await press(one, form, None, **{"p.amount": "7"})).status_code == 200
    assert await app.jobs.count() == 3


async def test_a_click_later_is_meant_and_one_after_a_failure_is_tried():
    now, calls = [0.0], []
    clicks = mount.Clicks(lambda: now[0])

    async def answer():
        calls.append(now[0])
        if len(calls) == 1:
            raise ZeroDivisionError
        return httpx.Response(len(calls))

    async def click(form=1):
        return (await clicks.once("ann", form, answer)).status_code

    mount.DOUBLE, before = 2.0, mount.DOUBLE
    try:
        with pytest.raises(ZeroDivisionError):
            await click()
        assert [await click(), await click()] == [2, 2]
        now[0] = 1.9
        assert await click() == 2
        now[0] = 2.0
        assert await click() == 3
    finally:
        mount.DOUBLE = before


# -- edit --------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def waiting(app):
    """A job that has not run."""
    return (await app.enqueue(pay, Invoice(amount=10), resource_key="bank/1", delay=3600)).id


@pytest.mark.parametrize("raw", ["", "?raw=1"])
async def test_an_old_form_does_not_take_back_what_somebody_wrote(app, waiting, raw):
    ann = browser(app)
    text = (await ann.client.get(f"/jobs/{waiting}/edit{raw}")).text
    areas = {name: html.unescape(value) for name, value in AREA.findall(text)}
    assert bool(areas) == bool(raw)
    await app.jobs.edit(waiting, payload=Invoice(amount=20, note="corrected"))
    typed = {name: value.replace("\n", "\r\n") for name, value in areas.items()}  # as browsers send it
    page = await ann.submit(Page(text).form("/do/edit"), None, priority="7", **typed)
    assert "Edited." in page.text
    info = await app.jobs.get(waiting)
    assert (info.priority, info.payload) == (7, {"amount": 20, "note": "corrected"}), "only what was touched"


async def test_who_changes_what_somebody_else_has_changed_is_told(app, waiting):
    ann = browser(app)
    old = (await ann.get(f"/jobs/{waiting}/edit")).form("/do/edit")
    await app.jobs.edit(waiting, payload=Invoice(amount=20))
    for _ in range(2):
        answer = await press(ann, old, None, **{"p.amount": "11", "priority": "7"})
        assert answer.status_code == 422
        page = Page(answer.text)
        assert "Somebody has changed the payload since this form was opened. Nothing was saved" in page.text
        old = page.form("/do/edit")
    info = await app.jobs.get(waiting)
    assert (info.priority, info.payload["amount"]) == (0, 20)
    form = (await ann.get(f"/jobs/{waiting}/edit")).form("/do/edit")
    assert "Edited." in (await ann.submit(form, None, **{"p.amount": "11"})).text
    assert (await app.jobs.get(waiting)).payload["amount"] == 11


async def test_a_form_leaves_a_payload_alone_that_its_model_would_write_otherwise(app, database):
    """A field with a default that the program has got since: only another priority was asked for."""
    former = Resilient(database, kinds=[Kind("invoice.pay")])
    job = (await former.enqueue("invoice.pay", {"amount": 10}, resource_key="bank/1", delay=3600)).id
    ann = browser(app)
    await ann.submit((await ann.get(f"/jobs/{job}/edit")).form("/do/edit"), None, priority="7")
    info = await app.jobs.get(job)
    assert (info.priority, info.payload) == (7, {"amount": 10})
    assert (await app.audit.list())[0].outcome["fields"] == ["priority"]


async def test_who_may_not_read_a_payload_writes_the_rest(app, waiting):
    ann = browser(app, rights=("read", "jobs"))
    form = (await ann.get(f"/jobs/{waiting}/edit")).form("/do/edit")
    assert dict(form.fields)["marks"] == ""
    assert "Edited." in (await ann.submit(form, None, priority="7")).text
    assert (await app.jobs.get(waiting)).payload["amount"] == 10
