"""Odd questions to the dashboard: what stands in an address or a form is understood or refused, and no page breaks."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from resilient import Bearer, Job, Permanent, Provider, Resilient, SetupError, handler, web
from resilient.core.base.instants import FAR
from resilient.store.accounts.secrets import new_key
from resilient.store.gates import controls
from resilient.store.inspect import pages
from resilient.store.inspect.why import overview
from resilient.store.jobs import workflows
from resilient.surface.web.dashboard.alone import Alone
from tests.surface.dashboards import ALL, OURS, Browser, Page, browser, client_of


@handler("contact.push")
async def push(job: Job[dict]) -> None:
    """Nothing."""


@handler("contact.drop")
async def dies(job: Job[str]) -> None:
    raise Permanent("refused", code=f"request {job.payload}")


@pytest.fixture
async def app(database):
    app = Resilient(database, handlers=[push, dies], providers=[])
    await app.ready()
    yield app
    await app.close()


async def post(one, address, **fields):
    """The answer to a form with these fields, whatever its page offers."""
    page = await one.get("/accounts")
    token = next(value for form in page.forms for name, value in form.fields if name == "token")
    return await one.client.post(address, data={**fields, "token": token}, headers=OURS)


@pytest.mark.parametrize(
    "address",
    ["/jobs?kind=a%00b", "/jobs?unique_key=%00", "/jobs?tag=a=%00", "/accounts?after=%00",
     "/accounts?gate=auth&code=%00", "/audit?who=%00", "/audit?subject=%00", "/connections?provider=%00",
     "/connections?after=%00", "/streams?after=a&after=%00&after=", "/schedules/%00", "/outbox?key=%00",
     "/jobs?a%00=b"],
)  # fmt: skip
async def test_a_nul_in_an_address_is_refused(app, address):
    page = await browser(app).get(address, 400)
    assert "A NUL character stands in the question" in page.text


@pytest.mark.parametrize(
    ("address", "fields"),
    [("/do/resource", {"key": "github/a", "verb": "pause", "reason": "\0"}),
     ("/do/schedule", {"name": "\0", "verb": "pause"}),
     ("/do/stream", {"key": "github/a", "stream": "a\0"}),
     ("/do/jobs", {"kind": "\0", "verb": "retry"}),
     ("/do/enqueue", {"kind": "contact.push", "resource": "github/a", "tags": "a=\0"})],
)  # fmt: skip
async def test_a_nul_in_a_form_is_refused(app, address, fields):
    answer = await post(browser(app), address, **fields)
    assert answer.status_code == 400
    assert "A NUL character stands in the question" in Page(answer.text).text
    assert await app.resources.list(gate="any") == []


async def test_a_form_that_breaks_off_changes_nothing_and_is_no_failure(app, caplog):
    """The browser closed the page; a 500 and a traceback in the log would call somebody."""
    sent, parts = (
        [],
        [{"type": "http.request", "body": b"verb=pause&ke", "more_body": True}, {"type": "http.disconnect"}],
    )
    headers = [(b"content-type", b"application/x-www-form-urlencoded"), (b"host", b"ops.test")]
    scope = {
        "type": "http", "method": "POST", "path": "/do/resource", "root_path": "", "query_string": b"",
        "headers": headers, "scheme": "http", "server": ("ops.test", 80),
    }  # fmt: skip
    asgi = web.dashboard(app, operator=lambda _request: web.Operator("ann", ALL))

    async def receive():
        return parts.pop(0)

    async def send(message):
        sent.append(message)

    await asgi(scope, receive, send)
    assert sent[0]["status"] == 408
    assert b"The form broke off" in sent[1]["body"]
    assert caplog.records == []


FAR_AWAY = ["9999-12-31T23:59:59-14:00", "+9999999999d", "+999999999d"]
LONG_AGO = ["0001-01-01T00:00:00+14:00", "999999d"]


@pytest.mark.parametrize("at", FAR_AWAY)
async def test_a_job_at_the_end_of_time_breaks_no_page(app, at):
    ann = browser(app)
    answer = await post(ann, "/do/enqueue", kind="contact.push", resource="github/a", payload="{}", run_at=at)
    if at == "+9999999999d":  # more than a length of time can hold
        assert "is not a time" in Page(answer.text).text
        return
    assert answer.status_code == 303
    (job,) = await app.jobs.list()
    assert job.run_at == FAR
    for address in ("/", "/jobs", f"/jobs/{job.id}", f"/jobs/{job.id}/edit", "/account/github/a"):
        await ann.get(address)
    assert (await post(ann, "/do/edit", id=str(job.id), run_at=at)).status_code == 303


@pytest.mark.parametrize("at", [*FAR_AWAY[::2], *LONG_AGO])
async def test_jobs_are_asked_for_by_times_at_the_ends_of_the_calendar(app, at):
    ann = browser(app)
    await app.enqueue(push, {}, resource_key="github/a", delay=60)
    for name in ("created", "finished", "run"):
        for side in ("after", "before"):
            assert (await ann.client.get("/jobs", params={f"{name}_{side}": at})).status_code == 200
    page = Page((await ann.client.get("/jobs", params={"created_after": at})).text)
    assert ("No job fits" in page.text) == (at in FAR_AWAY)


async def test_a_pause_for_longer_than_the_calendar_is_one_to_its_end(app):
    ann = browser(app)
    assert (await post(ann, "/do/resource", key="github/a", verb="pause", **{"for": "999999999d"})).status_code == 303
    assert (await app.resources.get("github/a")).until == FAR
    await ann.get("/account/github/a")


# -- as many causes as there are accounts --------------------------------------------------------------------------


def rows_of(page):
    return len([1 for tag, attrs in page.tags if "data-row" in attrs])


async def test_causes_that_all_differ_are_one_page_and_few_statements(app, monkeypatch):
    until, number, asked = datetime.now(UTC) + timedelta(hours=1), 450, []

    def stop(c, d):
        for n in range(number):
            controls.cool_down(c, d, f"github/acct-{n:03}", until, f"request {n} was too much", 0.5)

    await app.database.transaction(stop)
    await app.enqueue(push, {}, resource_key="github/acct-449")
    counted = pages.resource_queries.waiting
    monkeypatch.setattr(pages.resource_queries, "waiting", lambda *a, **k: asked.append(1) or counted(*a, **k))
    page = await browser(app).get("/accounts")
    assert "450 causes stop 450 accounts" in page.text
    assert rows_of(page) == 50
    assert "400 more causes with fewer jobs behind" in page.text
    assert page.links.index("/account/github/acct-449") < page.links.index("/account/github/acct-000")
    assert len(asked) == 3
    first = await browser(app).get("/")
    assert "450 of 450 accounts stopped; 1 job behind them" in first.text


async def test_of_more_causes_than_are_counted_the_number_is_a_least(app, monkeypatch):
    monkeypatch.setattr(pages, "_COUNTED_ALONE", 1)
    monkeypatch.setattr(pages, "_COUNTED_CAUSES", 1)
    until = datetime.now(UTC) + timedelta(hours=1)
    for key, code in (("a/1", "x"), ("a/2", "y"), ("b/1", "z"), ("b/2", "z"), ("b/3", "z"), ("c/1", "z"), ("c/2", "z")):
        await app.database.transaction(controls.cool_down, key, until, code, 0.5)
        await app.enqueue(push, {}, resource_key=key)
    causes = await app.database.transaction(pages.causes, until - timedelta(minutes=30))
    counts = {one.example: (int(one.waiting), one.waiting.more) for one in causes}
    assert counts == {"b/1": (3, False), "a/1": (1, False), "a/2": (0, True), "c/1": (0, True)}


async def test_dead_groups_that_are_not_shown_are_told(app):
    for n in range(52):
        await app.enqueue(dies, str(n), resource_key=f"github/{n}")
    await app.worker().drain()
    page = await browser(app).get("/dead")
    assert rows_of(page) == 50
    assert "2 smaller groups are not shown" in page.text
    assert "/jobs?state=dead" in page.links
    assert "42 more groups are not shown" in (await browser(app).get("/")).text


async def test_one_accounts_codes_do_not_hide_the_dead_jobs_of_others(app):
    await app.enqueue(dies, "bad", resource_key="github/good")
    for n in range(51):  # another code each time
        await app.enqueue(dies, str(n), resource_key="github/evil/deep" if n % 2 else "github/evil")
    await app.worker().drain()
    view = await app.database.transaction(overview)
    assert [(int(one.count), one.codes) for one in view.died] == [(51, 51), (1, 1)]
    groups = await app.database.transaction(pages.dead_groups)
    assert [(int(one.count), one.codes, one.account) for one in groups] == [(51, 51, "github/evil"), (1, 1, None)]
    page = await browser(app).get("/dead")
    assert rows_of(page) == 2
    assert "and 50 other codes of this account" in page.text
    link = next(link for link in page.links if "evil" in link and "kind=" in link)
    assert rows_of(await browser(app).get(link)) == 50  # of a page
    assert "and 50 other codes of this account" in (await browser(app).get("/")).text


@pytest.mark.parametrize(
    ("key", "code", "end"),
    [("acme/a", "unreadable", "with its key"), ("acme", "app_refused", "with its secret"),
     ("acme", "suspect_auth", "by a probe"), ("acme/a", "needs_reauth", "on reconnect")],
)  # fmt: skip
async def test_what_ends_a_gate_of_credentials_is_said_by_its_code(database, key, code, end):
    acme = Provider(name="acme", base_url="https://acme.example", auth=(Bearer(),))
    app = Resilient(database, handlers=[push], providers=[acme], secrets=[new_key()])
    await app.connections.add("acme/a", token="a-token-of-acme")
    await app.database.transaction(controls.set_auth, key, code)
    for address in ("/", "/accounts"):
        text = (await browser(app).get(address)).text
        assert (code in text, end in text, "until somebody acts" in text) == (True, True, False)
    assert ("unreadable" in (await browser(app).get("/connections")).text) is (code == "unreadable")
    await app.close()


async def test_workflows_are_listed_without_what_their_steps_hold(app, monkeypatch):
    """Fifty of a thousand steps each, with their results, were read for one column, every two seconds."""
    for n in range(51):
        async with app.workflow(f"order-{n}", resource_key="github/a") as wf:
            first = wf.step(push, {}, name="first")
            wf.step(push, {}, name="second", after=first)
    await app.worker(concurrency=1).drain()
    async with app.workflow("newest", resource_key="github/a") as wf:
        wf.step(push, {}, name="first", delay=60)
    monkeypatch.setattr(workflows, "steps_of", None)
    ann = browser(app)
    page = await ann.get("/workflows")
    names = re.findall(r"newest|order-\d+", page.text)
    assert "0 of 1 succeeded" in page.text
    assert "2 of 2 succeeded" in page.text
    page = await ann.get(next(link for link in page.links if "after=" in link))
    names += re.findall(r"newest|order-\d+", page.text)
    assert names == ["newest", *(f"order-{n}" for n in reversed(range(51)))]
    assert rows_of(await ann.get("/workflows?state=running")) == 1
    assert "not a workflow state" in (await ann.get("/workflows?state=sleeping", 400)).text
    assert "not a workflow id" in (await ann.get("/workflows?after=x", 400)).text


# -- the origin ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "sent"),
    [("https://ops.example/", "https://ops.example"), ("https://Ops.Example:443", "https://ops.example"),
     ("HTTP://ops.example:80/", "http://ops.example"), ("http://ops.example:8765", "http://ops.example:8765"),
     ("http://[::1]:8765", "http://[::1]:8765")],
)  # fmt: skip
async def test_an_origin_is_what_browsers_send_however_it_is_written(app, written, sent):
    asgi = web.dashboard(app, operator=lambda _request: web.Operator("ann", ALL), origin=written)
    ann = Browser(client_of(asgi, sent))
    page = await ann.get("/accounts")
    token = next(value for form in page.forms for name, value in form.fields if name == "token")
    fields = {"key": "github/a", "verb": "pause", "token": token}
    answer = await ann.client.post("/do/resource", data=fields, headers={**OURS, "Origin": sent})
    assert answer.status_code == 303, Page(answer.text).text


@pytest.mark.parametrize(
    "origin", ["", "shop.example", "https://shop.example/ops", "https://shop.example?x", "*", "null"]
)
def test_an_origin_that_no_browser_sends_is_refused_at_the_start(origin):
    """With an empty one, of a variable that is not set, the `Host` header of anybody would have decided."""
    app = Resilient("sqlite://")
    with pytest.raises(SetupError, match="write the scheme and host that browsers see"):
        web.dashboard(app, operator=lambda _request: None, origin=origin)


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "POST"])
async def test_alone_nobody_but_who_opens_the_address_uses_it_up(app, method):
    alone = Alone(app, 8765)
    client = client_of(alone.asgi, "http://127.0.0.1:8765")
    address = alone.address.removeprefix("http://127.0.0.1:8765")
    answer = await client.request(method, address)
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
    assert "set-cookie" not in answer.headers
    assert (await client.get(address)).status_code == 303
    assert (await client.get("/")).status_code == 200
