"""The dashboard without JavaScript: who may see and do what, from where a change may come, what pages say and do."""

from __future__ import annotations

import contextlib
import itertools
import re
from datetime import timedelta

import httpx
import pytest
from sqlalchemy import insert
from starlette.applications import Starlette
from starlette.responses import RedirectResponse
from starlette.routing import Mount

from resilient import InvalidInput, Job, Permanent, Resilient, SetupError, Shards, Transient, handler, web
from resilient.core.gates.learnt import Refusal
from resilient.store.db.tables import Attempt
from resilient.store.gates import controls as gates
from resilient.store.inspect import workers
from resilient.store.jobs.filters import as_id
from resilient.surface.web.dashboard import mount
from resilient.surface.web.dashboard.alone import Alone
from resilient.surface.web.dashboard.guard import POLICY, RIGHTS, Guard
from tests.helpers import LIMIT
from tests.surface.dashboards import ALL, ORIGIN, OURS, Page, browser, client_of

SECRET = "a secret of 32 characters or more"
XSS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'><svg/onload=alert(1)>",
    "</textarea><script>1</script>",
    "javascript:alert(1)",
    "{{7*7}}${7*7}<%= 7*7 %>",
    "</title><script>x</script>",
    "&lt;b&gt; &amp; <b>b</b>",
    "a\u202eb",
]


@handler("contact.push")
async def push(job: Job[dict]) -> dict:
    if job.payload.get("permanent"):
        raise Permanent(job.payload["permanent"])
    if job.payload.get("transient"):
        raise Transient(job.payload["transient"])
    return {"answer": job.payload.get("name")}


@pytest.fixture
async def app(database):
    app = Resilient(database, handlers=[push], providers=[])
    await app.ready()
    yield app
    await app.close()


async def dead_job(app, text="no such contact", key="github/acct-1"):
    job = await app.enqueue(push, {"permanent": text}, resource_key=key)
    await app.worker().drain()
    return str(job.id)


def addresses(job_id, rights=RIGHTS):
    """Every page for these rights but those of one workflow and one schedule."""
    pages = [
        path.replace("{key:path}", "github/acct-1").replace("/jobs/{id}", f"/jobs/{job_id}")
        for path, (right, _) in mount.PAGES.items() if right in rights
    ]  # fmt: skip
    return [path for path in pages if "{" not in path]


# -- who may what ----------------------------------------------------------------------------------------------------


def test_a_mount_without_an_operator_refuses_to_start():
    app = Resilient("sqlite://")
    with pytest.raises(SetupError, match="give a function of the request"):
        web.dashboard(app, operator=None)
    with pytest.raises(TypeError):
        web.dashboard(app)
    with pytest.raises(SetupError, match="at least 32 characters"):
        web.dashboard(app, operator=lambda _request: None, secret="short")


def test_secrets_are_no_right():
    with pytest.raises(InvalidInput, match="'secrets' is not a right"):
        web.Operator("ann", ["read", "secrets"])
    with pytest.raises(InvalidInput, match="write a list"):
        web.Operator("ann", "read")
    with pytest.raises(InvalidInput, match="needs a name"):
        web.Operator("", ["read"])


FORMS = {
    "/do/resource": {"key": "github/acct-1", "verb": "pause"},
    "/do/test": {"key": "github/acct-1"},
    "/do/resources": {"q": "github/*", "verb": "pause"},
    "/do/job": {"verb": "retry"},
    "/do/jobs": {"state": "dead", "verb": "retry"},
    "/do/edit": {"priority": "5"},
    "/do/enqueue": {"kind": "contact.push", "resource": "github/acct-1"},
    "/do/fuse": {"provider": "github", "verb": "release"},
    "/do/stream": {"stream": "issues", "key": "github/acct-1"},
}


async def test_rights_times_pages(app):
    job_id = await dead_job(app)
    for rights in (None, (), tuple(set(RIGHTS) - {"read"}), ("read",)):
        one = browser(app, rights=rights)
        for address in addresses(job_id, ["read"] if rights == ("read",) else RIGHTS):
            answer = await one.client.get(address)
            assert answer.status_code == (401 if rights is None else 200 if "read" in rights else 403), (
                rights,
                address,
            )
    one = browser(app, rights=["read"])
    for address in set(addresses(job_id)) - set(addresses(job_id, ["read"])):
        assert "lacks the right" in (await one.get(address, 403)).text


ALLOWS = {  # every address that changes something, with the right it takes
    "/do/resource": "resources", "/do/resources": "resources", "/do/test": "resources", "/do/job": "jobs",
    "/do/jobs": "jobs", "/do/edit": "jobs", "/do/enqueue": "jobs", "/do/schedule": "jobs", "/do/workflow": "jobs",
    "/do/stream": "jobs", "/do/replay": "jobs", "/do/fuse": "connections",
    "/do/bulk": "read",  # and what the change takes that it stops: `test_dashboard_bulk.py`
}  # fmt: skip


def changing(routes):
    """The addresses among these that take anything but a look, those below mounts too."""
    for route in routes:
        below = getattr(route, "app", None)
        below = getattr(getattr(below, "__self__", None), "app", below)  # the pages of a shard
        if isinstance(route, Mount):
            yield from changing(getattr(below, "routes", ()))
        elif route.methods is None or not route.methods <= {"GET", "HEAD"}:
            yield route.path


async def test_every_address_that_changes_something_is_in_the_matrix(app, monkeypatch, tmp_path):
    for wrapper in ("with_headers", "mounted"):
        monkeypatch.setattr(mount, wrapper, lambda pages: pages)
    assert sorted(changing(web.dashboard(app, operator=lambda _request: None).routes)) == sorted(ALLOWS)
    urls = {name: f"sqlite:///{tmp_path}/{name}.db" for name in ("eu", "us")}
    async with Shards(urls, of=lambda _: "eu", upgrade=True) as shards:
        routes = web.dashboard(shards, operator=lambda _request: None).routes
        assert sorted(changing(routes)) == sorted([*ALLOWS, *ALLOWS])


async def test_who_may_only_look_changes_nothing(app):
    job_id = await dead_job(app)
    one = browser(app, rights=["read", "payloads"], secret=SECRET)
    one.client.cookies.set("resilient-dashboard", "n" * 43)
    token = Guard(SECRET, None).token("n" * 43, web.Operator("ann"))
    for address in ALLOWS:
        form = {"id": job_id, **FORMS.get(address, {}), "token": token, "sure": "yes"}
        assert (await one.client.post(address, data=form, headers=OURS)).status_code in (403, 404), address
    assert await app.audit.list() == []
    assert [one.state.value for one in await app.jobs.list()] == ["dead"]


async def test_rights_times_actions(app):
    job_id = await dead_job(app)
    for rights in [None, *(c for n in range(len(RIGHTS) + 1) for c in itertools.combinations(RIGHTS, n))]:
        one = browser(app, rights=rights, secret=SECRET)
        one.client.cookies.set("resilient-dashboard", "n" * 43)
        token = Guard(SECRET, None).token("n" * 43, web.Operator("ann"))
        for address, right in ALLOWS.items():
            form = {"id": job_id, **FORMS.get(address, {}), "token": token}
            answer = await one.client.post(address, data=form, headers=OURS)
            if rights is None:
                assert answer.status_code == 401, address
            elif {"read", right} <= set(rights):
                assert answer.status_code in (200, 303, 400, 404, 422), (rights, address, Page(answer.text).text)
            else:
                assert answer.status_code == 403, (rights, address)
                assert "lacks the right" in Page(answer.text).text


async def a_token(one):
    """The token of this browser's forms."""
    page = await one.get("/jobs?state=dead")
    return next(value for form in page.forms for name, value in form.fields if name == "token")


async def test_a_change_must_come_from_our_own_page(app):
    job_id = await dead_job(app)
    ann, bob = browser(app), browser(app, name="bob")
    token, bobs = await a_token(ann), await a_token(bob)
    form = {"id": job_id, "verb": "discard", "token": token}

    async def post(headers, **over):
        return await ann.client.post("/do/job", data={**form, **over}, headers=headers)

    refused = [
        ({}, {}),
        ({"Sec-Fetch-Site": "same-origin"}, {}),
        ({"Origin": ORIGIN}, {}),
        ({**OURS, "Origin": "null"}, {}),
        ({**OURS, "Origin": "https://evil.example"}, {}),
        ({**OURS, "Origin": ORIGIN.replace("http", "https")}, {}),
        ({**OURS, "Sec-Fetch-Site": "same-site"}, {}),
        ({**OURS, "Sec-Fetch-Site": "cross-site"}, {}),
        ({**OURS, "Sec-Fetch-Site": "none"}, {}),
        (OURS, {"token": ""}),
        (OURS, {"token": "é" * 64}),
        (OURS, {"token": bobs}),
        (OURS, {"token": token[:-1] + ("0" if token[-1] != "0" else "1")}),
    ]
    for headers, over in refused:
        answer = await post(headers, **over)
        assert answer.status_code == 403, (headers, over)
        assert "This change was refused" in answer.text
    cookies = dict(ann.client.cookies)
    ann.client.cookies.clear()
    assert (await post(OURS)).status_code == 403, "without its cookie"
    ann.client.cookies.update(cookies)
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        assert (await ann.client.request(method, "/do/job", headers=OURS)).status_code in (404, 405)
    answer = await ann.client.post("/do/job", json=form, headers=OURS)
    assert answer.status_code == 400
    assert (await app.jobs.get(job_id)).state == "dead"
    assert (await post(OURS)).status_code == 303
    assert (await app.jobs.get(job_id)).state == "cancelled"


async def test_the_cookie_is_for_our_own_pages_only(app):
    job_id = await dead_job(app)
    answer = await browser(app).client.get(f"/jobs/{job_id}")
    assert "HttpOnly; Path=/; SameSite=strict" in answer.headers["set-cookie"]
    behind_tls = browser(app, origin="https://ops.example")
    cookie = (await behind_tls.client.get(f"/jobs/{job_id}")).headers["set-cookie"]
    assert cookie.startswith("__Host-resilient-dashboard=")
    assert cookie.endswith("Secure")


async def test_who_gives_an_answer_instead_is_obeyed(app):
    asgi = web.dashboard(app, operator=lambda _request: RedirectResponse("/login", 303))
    answer = await client_of(asgi).get("/accounts")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")


# -- every page ------------------------------------------------------------------------------------------------------


async def test_every_answer_has_the_policy_and_nothing_inline(app):
    job_id = await dead_job(app)
    ann = browser(app)
    static = ["/static/dashboard.css", "/static/dashboard.js", "/static/htmx.min.js", "/static/theme.js"]
    for address in [*addresses(job_id), *static, "/nothing", "/jobs/nonsense", "/static/../mount.py", "/do/job"]:
        answer = await ann.client.get(address)
        assert answer.headers["content-security-policy"] == POLICY, address
        assert answer.headers["x-content-type-options"] == "nosniff"
        if "html" not in answer.headers["content-type"]:
            continue
        for tag, attrs in Page(answer.text).tags:
            assert not [name for name in attrs if name.startswith("on") or name == "style"], (address, tag, attrs)
            assert tag != "style", address
            assert tag != "script" or attrs.get("src", "").startswith("/static/"), address


async def test_every_link_of_every_page_leads_somewhere(app):
    job_id = await dead_job(app)
    ann = browser(app)
    await app.resources.pause("github/acct-1", reason="asked")
    links = set()
    for address in addresses(job_id):
        links |= set((await ann.get(address)).links) - {"#main"}
    for link in links:
        await ann.get(link)


async def test_it_can_be_mounted_anywhere(app):
    await dead_job(app)
    who = web.Operator("ann", ALL)
    outer = Starlette(routes=[Mount("/in/ops", app=web.dashboard(app, operator=lambda _request: who))])
    async with client_of(outer) as client:
        page = Page((await client.get("/in/ops/dead")).text)
        assert {link for link in page.links if not link.startswith(("/in/ops/", "#"))} == set()
        form = page.form("/do/jobs", "discard")
        answer = await client.post(form.action, data=dict(form.fields) | {"verb": "discard"}, headers=OURS)
        assert "Give up: 1 job?" in Page(answer.text).text


@pytest.mark.parametrize("text", XSS)
async def test_text_of_strangers_stays_text(app, text):
    key = "github/acct-1"
    job_id = await dead_job(app, text)
    await app.enqueue(push, {"name": text, "transient": text}, resource_key=key, tags={"note": text, text[:40]: "x"},
                      unique_key=text if text.isprintable() else None)  # fmt: skip
    await app.worker().drain()
    await app.resources.pause(key, reason=text)
    ann = browser(app, name=text)
    plain = {tag for address in ["/nothing"] for tag, _ in (await ann.get(address, 404)).tags}
    for address in [*addresses(job_id), *(f"/jobs/{job.id}" for job in await app.jobs.list())]:
        answer = await ann.client.get(address, params={"q": text} if address == "/jobs" else None)
        if "<" in text:
            assert text not in answer.text, address
        assert "\u202e" not in answer.text
        page = Page(answer.text)
        assert not {"script"} & {t for t, a in page.tags if t == "script" and "src" not in a}, address
        assert not [a for _, a in page.tags if any(name.startswith("on") for name in a)], address
        assert not [link for link in page.links if link.startswith("javascript:")], address
        assert not ({tag for tag, _ in page.tags} & {"img", "b", "iframe"}) - plain, address
    for query in ("q", "state", "kind", "text", "after", "tag", "note", "by"):
        for address in ("/jobs", "/accounts"):
            answer = await ann.client.get(address, params={query: text})
            assert "<script>" not in answer.text
            assert "onerror=alert(1)>" not in answer.text


async def test_nobody_else_puts_words_on_a_page(app):
    ann = browser(app)
    page = await ann.get("/?note=WyJoaSIsIGZhbHNlXQ==&by=" + "0" * 32)
    assert not [a for t, a in page.tags if a.get("class", "").startswith("note")]


async def test_payloads_are_for_those_who_may_read_them(app):
    job = await app.enqueue(push, {"name": "Ada-canary"}, resource_key="github/acct-1")
    await app.worker().drain()
    assert "Ada-canary" in (await browser(app).get(f"/jobs/{job.id}")).text
    text = (await browser(app, rights=["read", "jobs"]).get(f"/jobs/{job.id}")).text
    assert "Ada-canary" not in text
    assert "are shown to operators with the right" in text


async def test_a_page_that_did_not_change_is_not_sent_again(app):
    await dead_job(app)
    ann = browser(app)
    await ann.get("/jobs?state=cancelled")
    first = await ann.client.get("/jobs?state=cancelled")
    again = await ann.client.get("/jobs?state=cancelled", headers={"If-None-Match": first.headers["etag"]})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")


async def test_wrong_questions_are_answered_in_words(app):
    ann = browser(app)
    assert "not a job state" in (await ann.get("/jobs?state=sleeping", 400)).text
    assert "is not a time" in (await ann.get("/jobs?created_after=soon", 400)).text
    assert "gate='x'" in (await ann.get("/accounts?gate=x", 400)).text
    assert "There is no job" in (await ann.get("/jobs/0195f3a2-7c1e-7d3a-9b0e-2f6f3c1a8e55", 404)).text
    await ann.get("/accounts?q=%00", 400)
    await ann.get("/account/a/b/c/d/e", 400)


async def test_a_database_that_is_away_is_a_page(backend, tmp_path):
    away = "postgresql://nobody@127.0.0.1:1/x" if backend == "postgresql" else f"sqlite:///{tmp_path}/none/x.db"
    app = Resilient(away)
    page = await browser(app).get("/", 503)
    assert "does not answer" in page.text
    await app.close()


async def test_no_button_is_loud_but_the_one_that_helps(app):
    """What only waits, or is tried out by itself, asks nobody to press anything; nor does what destroys."""

    async def loud(address):
        text = (await ann.client.get(address)).text.partition("<footer")[0]
        names = re.findall(r'<button(?: name="verb")?(?: value="\w+")?>([^<]+)', text)
        return [name for name in names if name != "Set"]  # below what is folded

    ann = browser(app)
    job = await app.enqueue(push, {}, resource_key="github/acct-1")
    assert await loud(f"/jobs/{job.id}") == await loud("/account/github/acct-1") == []
    assert "✓ free Nothing stops github/acct-1." in (await ann.get("/account/github/acct-1")).text
    await app.database.transaction(gates.cool_down, "github/acct-1", None, "http_429", 0.5)
    assert await loud("/account/github/acct-1") == []
    await app.resources.pause("github/acct-1")
    assert await loud("/account/github/acct-1") == ["Resume"]
    await app.resources.open("github/acct-2")
    assert await loud("/account/github/acct-2") == ["Close the circuit"]
    assert await loud(f"/jobs/{await dead_job(app, key='github/acct-3')}") == ["Run again"]


async def test_an_account_shows_only_states_that_there_are(app):
    await app.enqueue(push, {}, resource_key="github/acct-1")
    await app.enqueue(push, {}, resource_key="github/acct-1", delay=60)
    assert "Kind ready scheduled contact.push 1 1" in (await browser(app).get("/account/github/acct-1")).text


# -- what stands still, and why ---------------------------------------------------------------------------------------


async def test_now_says_it_in_one_sentence(app):
    ann = browser(app)
    assert "Nothing is stopped; no worker runs." in (await ann.get("/")).text
    for n in range(5):
        await app.enqueue(push, {}, resource_key=f"github/acct-{n}")
    await app.worker().drain()
    await app.resources.pause("github/acct-1", reason="asked")
    await app.resources.pause("github/acct-2")
    await app.resources.open("github/acct-3")
    for _ in range(4):
        await app.enqueue(push, {}, resource_key="github/acct-1")
    page = await ann.get("/")
    assert "3 of 5 accounts stopped; 4 jobs behind them; no worker runs." in page.text
    assert page.text.count("circuit open") == 1


async def test_now_says_whose_event_loop_stood_still(app):
    def beat(lag):
        def write(c, d):
            one = workers.Beat("w1", "h", 1, ["push"], 50, 3, "1", stopping=False, loop_lag=lag)
            workers.beat(c, d, one, d.now(c))

        return app.database.transaction(write)

    await beat(0.4)
    assert "stood still" not in (await browser(app).get("/")).text
    await beat(25.0)
    page = await browser(app).get("/")
    said = "1 worker's event loop stood still, for up to 25.0 s: what else it ran waited."
    assert f"{said} Its log names the handler and its line." in page.text
    assert "/workers" in page.links


async def test_what_ended_for_no_error_begins_with_its_words(app):
    await app.resources.pause("github/acct-1")
    job = await app.enqueue(push, {}, resource_key="github/acct-1")

    def write(c, d):
        row = {"job_id": job.id, "execution": 1, "finished_at": d.now(c), "decision": "defer", "charged": False}
        c.execute(insert(Attempt).values(message="it is paused", **row))

    await app.database.transaction(write)
    page = await browser(app).get("/account/github/acct-1")
    assert "it is paused" in page.text
    assert ": it is paused" not in page.text


async def test_equal_causes_are_one_row(app):
    for n in range(120):
        await app.resources.pause(f"github/acct-{n:03}")
    await app.resources.pause("hubspot/acct-1", until=timedelta(hours=1))
    await app.resources.open("hubspot/acct-2")
    page = await browser(app).get("/accounts")
    rows = [a for t, a in page.tags if t == "tr" and "data-row" in a]
    assert len(rows) == 3
    assert "3 causes stop 122 accounts" in page.text
    link = next(link for link in page.links if "q=github" in link)
    inside = await browser(app).get(link)
    assert len([1 for t, a in inside.tags if t == "tr" and "data-row" in a]) == 50
    keys, following = [], link
    while following:
        inside = await browser(app).get(following)
        keys += [one for one in inside.links if one.startswith("/account/")]
        following = next((one for one in inside.links if "after=" in one), None)
    assert len(keys) == len(set(keys)) == 120


async def test_a_job_says_why_first(app):
    await app.resources.pause("github/acct-1", reason="the customer asked")
    job = await app.enqueue(push, {}, resource_key="github/acct-1")
    page = await browser(app).get(f"/jobs/{job.id}")
    assert page.text.index("Why") < page.text.index("Life") < page.text.index("Values")
    assert "github/acct-1 is paused (the customer asked)" in page.text
    assert "/account/github/acct-1" in page.links
    for verb in ("jobs show", "jobs cancel"):
        assert f"resilient {verb} {job.id}" in page.text


async def test_filters_and_the_equal_command(app):
    await dead_job(app)
    page = await browser(app).get("/jobs?state=dead&resource=github%2F*&tag=a%3Db+c,d%3De&struggling=no")
    assert "resilient jobs list --state dead --resource 'github/*' --tag 'a=b c' --tag 'd=e'" in page.text


# -- what can be done ------------------------------------------------------------------------------------------------


async def test_an_account_shows_the_budgets_that_its_provider_names(app, database):
    def throttle(c, d):
        until, refusal = d.now(c) + timedelta(seconds=60), Refusal(0, 1.0, 5, 0.2, 3)
        gates.cool_down(c, d, "github/acct-1/budget:search", until, "http_429", 0.0, refusal=refusal)

    database.transaction_sync(throttle)
    page = await browser(app).get("/account/github/acct-1")
    assert "budget search" in page.text
    assert "4.8 a second, from 1 throttle" in page.text
    page = await browser(app).get("/account/github/acct-1/budget:search")
    assert "4.8 a second" in page.text


async def test_pause_and_resume_an_account(app):
    ann, key = browser(app), "github/acct-1"
    page = await ann.get(f"/account/{key}")
    page = await ann.submit(page.form("/do/resource", "pause"), "pause", reason="asked by <b>them</b>", **{"for": "2h"})
    assert f"{key} is paused." in page.text
    info = await app.resources.get(key)
    assert (info.gate, info.paused_reason) == ("pause", "asked by <b>them</b>")
    page = await ann.submit(page.form("/do/resource", "resume"), "resume")
    assert (await app.resources.get(key)).gate is None
    await ann.submit(page.form("/do/resource", "open"), "open")
    assert (await app.resources.get(key)).code == "isolated"
    await ann.submit(page.form("/do/resource", "close"), "close")
    await ann.submit(page.form("/do/resource", "limit"), "limit", limits="100/min, 5/s", concurrency="7")
    policy = (await app.resources.get(key)).policy
    assert (len(policy["limits"]), policy["concurrency"]) == (2, 7)


async def test_many_are_counted_first(app):
    for n in range(7):
        await app.resources.pause(f"github/acct-{n}")
    ann = browser(app)
    page = await ann.get("/accounts?q=github&gate=pause")
    sure = await ann.submit(page.form("/do/resources"), None, verb="resume", gate="pause", limit="5")
    assert "Resume 5 accounts? of github and github/**, stopped by: paused" in sure.text
    assert len(await app.resources.list(gate="pause")) == 7
    await ann.submit(sure.form("/do/resources"))
    assert len(await app.resources.list(gate="pause")) == 2


async def test_dead_jobs_are_replayed_by_group(app):
    for n in range(3):
        await dead_job(app, "no such contact", f"github/acct-{n}")
    await dead_job(app, "something else", "hubspot/acct-1")
    ann = browser(app)
    page = await ann.get("/dead")
    assert "4 dead jobs, 2 causes." in page.text
    group = next(form for form in page.forms if dict(form.fields).get("resource", "").startswith("github"))
    sure = await ann.submit(group, "retry", rate="10/s")
    assert "Run again: 3 jobs?" in sure.text
    assert await app.jobs.count(state="dead") == 4
    page = await ann.submit(sure.form("/do/jobs"))
    assert "3 retried." in page.text
    assert await app.jobs.count(state="dead") == 1


async def test_a_job_is_run_again_edited_given_up(app):
    job_id = await dead_job(app)
    ann = browser(app)
    page = await ann.get(f"/jobs/{job_id}/edit")
    page = await ann.submit(page.form("/do/edit"), None, priority="9", payload='{"name": "Bo"}', new_operation="yes")
    assert "Edited." in page.text
    page = await ann.submit(page.form("/do/job", "retry"), "retry")
    assert "It runs again" in page.text
    info = await app.jobs.get(job_id)
    assert (info.state, info.priority, info.payload) == ("ready", 9, {"name": "Bo"})
    page = await ann.submit(page.form("/do/job", "cancel"), "cancel")
    assert (await app.jobs.get(job_id)).state == "cancelled"
    other = await dead_job(app)
    page = await ann.get(f"/jobs/{other}")
    await ann.submit(page.form("/do/job", "discard"), "discard")
    assert (await app.jobs.get(other)).state == "cancelled"


async def test_who_may_not_act_sees_no_button(app):
    job_id = await dead_job(app)
    viewer = browser(app, rights=["read"])
    for address in addresses(job_id, ["read"]):
        assert [form for form in (await viewer.get(address)).forms if form.method == "post"] == [], address


# -- alone -----------------------------------------------------------------------------------------------------------


async def test_alone_it_is_entered_once(app):
    alone = Alone(app, 8765)
    assert alone.address.startswith("http://127.0.0.1:8765/enter?token=")
    origin = "http://127.0.0.1:8765"
    async with client_of(alone.asgi, origin) as owner, client_of(alone.asgi, origin) as other:
        assert (await owner.get("/")).status_code == 401
        entered = await owner.get(alone.address)
        assert (entered.status_code, entered.headers["location"]) == (303, "/")
        assert "HttpOnly" in entered.headers["set-cookie"]
        assert "SameSite=strict" in entered.headers["set-cookie"]
        assert (await owner.get("/")).status_code == 200
        assert (await other.get(alone.address)).status_code == 401
        assert (await other.get("/accounts")).status_code == 401
        assert (await owner.get(alone.address)).status_code == 303, "who is in stays in"
        assert (await owner.get("/", headers={"Host": "evil.example:8765"})).status_code == 421
        assert (await other.get("/enter?token=%C3%A9")).status_code == 401


async def test_read_only_changes_nothing(app):
    job_id = await dead_job(app)
    alone = Alone(app, 8765, read_only=True)
    async with client_of(alone.asgi, "http://127.0.0.1:8765") as client:
        await client.get(alone.address)
        page = Page((await client.get(f"/jobs/{job_id}")).text)
        assert [form for form in page.forms if form.method == "post"] == []
        assert "are shown to operators" in page.text


def test_the_command_serves_a_database_without_program_code(database_url):
    import subprocess
    import sys

    command = [sys.executable, "-m", "resilient.surface.cli", "dashboard", "--database", database_url, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("Dashboard: http://127.0.0.1:"), line + process.stdout.read()
            with httpx.Client(follow_redirects=True, trust_env=False, timeout=60) as client:
                answer = client.get(line.split()[-1])
            assert answer.status_code == 200
            assert "Nothing is stopped" in answer.text
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT)


async def test_a_request_in_doubt_has_its_choices(app):
    job_id = await dead_job(app)
    sent = '{"method": "POST", "path": "/contacts-canary"}'
    await app.database.transaction(
        lambda c, d: d.run(
            c,
            "UPDATE {job} SET last_error_kind = 'ambiguous', sent = :sent WHERE id = :id",
            {"id": d.id(as_id(job_id)), "sent": sent},
        )
    )  # fmt: skip
    ann = browser(app)
    page = await ann.get(f"/jobs/{job_id}")
    assert "In doubt" in page.text
    assert "/contacts-canary" in page.text[page.text.index("In doubt") : page.text.index("Life")]
    assert [value for _, value in page.form("/do/job", "discard").buttons] == ["discard"]
    why, _, rest = page.text.partition("Life")
    assert "look at the provider, then Run again or It did happen: give the job up." in why
    assert "resilient" not in why.partition("Why")[2]
    for command in (f"jobs retry {job_id} --repeat-ambiguous", f"dead discard {job_id}"):
        assert f"resilient {command}" in rest
    assert "/contacts-canary" not in (await browser(app, rights=["read", "jobs"]).get(f"/jobs/{job_id}")).text
    page = await ann.submit(page.form("/do/job", "retry"), "retry", repeat_ambiguous="yes")
    assert "It runs again" in page.text


async def test_an_account_whose_key_an_address_would_lose_has_a_page(app, database):
    """Its row is of an earlier version: keys with such segments are refused now."""
    job = await app.enqueue(push, {}, resource_key="github/dots")
    await database.transaction(
        lambda c, d: d.run(c, "UPDATE {job} SET resource_key = 'github/..' WHERE id = :id", {"id": d.id(job.id)})
    )
    ann = browser(app)
    page = await ann.get(f"/jobs/{job.id}")
    assert "/account/?key=github%2F.." in page.links
    page = await ann.get("/account/?key=github%2F..")
    assert "github/.." in page.text
    page = await ann.submit(page.form("/do/resource", "pause"), "pause", reason="odd")
    assert "github/.. is paused." in page.text
    assert (await app.resources.get("github/..")).paused_reason == "odd"


@pytest.mark.parametrize("path", ["/jobs?created_after=soon", "/jobs?tag=x", "/jobs?finished_before=2030-01-31T12:00"])
async def test_a_page_names_no_option_of_the_command_line(app, path):
    page = await browser(app).get(path, 400)
    assert "--" not in page.text
