"""The dashboard's pages beside jobs and accounts: what they show, and what they do."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from resilient import Bearer, Event, Job, Provider, Resilient, Schedule, handler
from resilient.core.alerts.rules import Finding
from resilient.core.base.phrases import moment
from resilient.store import alerts
from resilient.store.accounts.secrets import new_key
from resilient.store.inspect import pages
from resilient.store.schedules import ticks
from tests.surface.dashboards import browser


@handler("contacts.sync")
async def sync(job: Job[None]) -> None: ...


@handler("order.charge")
async def charge(job: Job[dict]) -> None:
    if job.payload.get("fails"):
        raise ValueError("no funds")


@handler("order.refund")
async def refund(job: Job[dict]) -> None: ...


class OrderPlaced(Event, type="order.placed"):
    order: int


@pytest.fixture
async def app(database):
    crm = Provider(name="crm", base_url="https://crm.example", auth=(Bearer(),))
    schedules = [
        Schedule(sync, every="15m", name="nightly", resource_key="crm/acct-1"),
        Schedule(sync, every="1h", name="each", for_each="crm/*"),
    ]

    async def deliver(message):
        pass

    app = Resilient(
        database, handlers=[sync, charge, refund], providers=[crm], schedules=schedules, secrets=[new_key()],
        destinations={"shop": deliver}, routes={OrderPlaced: ["shop"]},
    )  # fmt: skip
    await app.ready()
    await app.schedules.declare()
    yield app
    await app.close()


OVERDUE = "UPDATE resilient_schedule SET next_at = '2026-01-01 00:00:00.000000'"


async def test_a_schedule_is_paused_resumed_and_run(app):
    ann = browser(app)
    page = await ann.get("/schedules")
    assert "nightly every 15 min" in page.text
    page = await ann.get("/schedules/nightly")
    page = await ann.submit(page.form("/do/schedule"), "pause")
    assert "nightly does not tick until it is resumed." in page.text
    page = await ann.submit(page.form("/do/schedule"), "resume")
    page = await ann.submit(page.form("/do/schedule", "run"), "run")
    assert "nightly has a job now." in page.text
    assert await app.jobs.count(kind="contacts.sync") == 1
    await app.worker().drain()
    page = await ann.get("/schedules/nightly")
    (spark,) = (a for t, a in page.tags if t == "svg")
    assert spark["aria-label"] == "1 tick of nightly: 1 succeeded"
    assert len([1 for t, a in page.tags if t == "rect" and a["class"] == "c-well"]) == 1
    assert "There is no schedule 'none'" in (await ann.get("/schedules/none", 404)).text


async def test_a_schedule_that_no_program_declares_any_more_is_removed(app):
    await app.database.transaction(ticks.declare, {"left": ("report", app.schedules._specs["nightly"][1])}, ())
    ann = browser(app)
    assert "Remove" not in (await ann.get("/schedules/nightly")).text
    page = await ann.get("/schedules/left")
    page = await ann.submit(page.form("/do/schedule", "remove"), "remove")
    assert "left ticks no more; a program that declares it brings it back when it starts." in page.text
    assert [(s.name, s.removed) for s in await app.schedules.list() if s.name == "left"] == [("left", True)]


async def test_the_outbox_says_what_stops_a_destination(app):
    ann = browser(app)
    assert "Stopped by" not in (await ann.get("/outbox")).text
    await app.resources.pause("outbox/shop")
    assert "shop ‖ paused until somebody acts 0" in (await ann.get("/outbox")).text
    await app.resources.resume("outbox/shop")
    await app.resources.pause("outbox", until=timedelta(hours=2))
    assert "shop ‖ paused in 2 h 0" in (await ann.get("/outbox")).text


async def test_a_tick_that_nobody_made_was_due(app):
    ann = browser(app)
    assert "was due" not in (await ann.get("/schedules/nightly")).text
    await app.database.transaction(lambda c, _: c.execute(text(OVERDUE)))
    assert "nightly every 15 min ✓ active was due" in (await ann.get("/schedules")).text
    assert "next tick was due" in (await ann.get("/schedules/nightly")).text
    await app.schedules.pause("nightly")
    assert "was due" not in (await ann.get("/schedules/nightly")).text


async def test_a_workflow_shows_its_steps_and_turns_around(app):
    async with app.workflow("order", resource_key="crm/acct-1") as wf:
        first = wf.step(charge, {}, name="charge", undo=refund)
        wf.step(sync, None, name="sync", after=[first])
    ann = browser(app)
    link = next(one for one in (await ann.get("/workflows")).links if one.startswith("/workflows/"))
    page = await ann.get(link)
    assert "charge ● ready" in page.text
    assert "sync ◌ blocked contacts.sync on crm/acct-1; after charge" in page.text
    assert [a["class"] for t, a in page.tags if t == "g"] == [
        "node n-ready",
        "node n-undo n-not-begun",
        "node n-blocked",
    ]
    assert [a["class"] for t, a in page.tags if t == "path" and "class" in a] == ["edge waits"]
    page = await ann.submit(page.form("/do/workflow"))
    assert "It turns around" in page.text
    await app.worker().drain()
    assert (await app.workflows.list())[0].state != "running"
    await ann.get("/workflows?state=undone")
    await ann.get("/workflows?state=none", 400)
    await ann.get("/workflows/0195f3a2-7c1e-7d3a-9b0e-2f6f3c1a8e55", 404)


async def test_events_are_seen_and_published_once_more(app):
    with Session(app.database.sync_engine) as session:
        app.sync.outbox.publish(session, OrderPlaced(order=1), key="o-1")
        session.commit()
    ann = browser(app)
    assert "shop 1" in (await ann.get("/outbox")).text
    await app.worker().drain()
    page = await ann.get("/outbox")
    assert "✓ succeeded" in page.text
    sure = await ann.submit(page.form("/do/replay"), None, since="1h", destination="shop")
    assert "Publish 1 event once more?" in sure.text
    page = await ann.submit(sure.form("/do/replay"))
    assert "1 event in line again." in page.text


async def test_an_event_leads_to_its_destination_and_keys_behind_a_dead_one_are_counted(app):
    with Session(app.database.sync_engine) as session:
        for n, key in enumerate(["a", "a", "b", "c"]):
            app.sync.outbox.publish(session, OrderPlaced(order=n), key=key)
        session.commit()

    def kill(c, d):
        heads = "state = 'ready' AND ordering_key IN ('a', 'c')"
        c.execute(text(f"UPDATE resilient_job SET state = 'dead', finished_at = created_at WHERE {heads}"))
        rows = [("shop", 2, 2, 2)]
        assert [
            (one.name, one.waiting, one.dead, one.blocked_keys) for one in pages.destinations(c, d, ["shop"])
        ] == rows

    await app.database.transaction(kill)
    ann = browser(app)
    page = await ann.get("/outbox")
    assert "/account/outbox/shop" in page.links
    assert "/outbox?destination=shop&key=a" in page.links
    page = await ann.get("/outbox?destination=shop&key=b")
    assert len([1 for one in page.links if one.startswith("/jobs/")]) == 1
    assert "No event fits." in (await ann.get("/outbox?state=running")).text


async def test_connections_say_their_state_and_never_a_secret(app):
    await app.connections.add("crm/acct-1", token="canary-token")
    ann = browser(app)
    page = await ann.get("/connections")
    assert "crm/acct-1 ✓ active" in page.text
    assert "canary" not in page.text + (await ann.get("/account/crm/acct-1")).text
    assert "No connection fits." in (await ann.get("/connections?state=needs_reauth")).text
    await ann.get("/connections?state=none", 400)


async def test_who_works_and_what_the_doctor_finds(app):
    ann = browser(app)
    assert "No worker was heard of within a day." in (await ann.get("/workers")).text
    page = await ann.get("/system")
    assert "schema ✓ ok revision" in page.text
    assert "No stream was read yet." in (await ann.get("/streams")).text


async def test_an_accounts_past_says_what_goes_on_and_what_was_last_found_when(app):
    key, hour = "crm/acct-1", timedelta(hours=1)
    names = {"goes on": "needs_reauth", "not found lately": "circuit_open", "over": "long_throttle", "happened": "dead"}
    detail = {"auth": "not_connected", "error_kind": "bug", "job": "7"}
    found = {word: Finding(name, key, detail) for word, name in names.items()}

    def write(c, d):
        now = d.now(c)
        for word, at in (("over", 3 * hour), ("not found lately", 2 * hour), ("goes on", 0 * hour)):
            alerts.record(c, d, [found[word]], now - 4 * hour, lasting=True)
            alerts.record(c, d, [found[word]], now - at, lasting=True)
        alerts.resolve(c, d, ["long_throttle"], now, now)
        alerts.record(c, d, [found["happened"]], now - hour, lasting=False)
        return now

    now = await app.database.transaction(write)
    page = await browser(app).get(f"/account/{key}")
    lines = {word: page.text.partition(f"{word} ")[2].partition(" ago ")[0] for word in names}
    begun, until = moment(now - 4 * hour, now), {"over": 3, "not found lately": 2}
    for word in ("over", "not found lately"):
        assert lines[word].startswith(f"{begun} to {moment(now - until[word] * hour, now)} ")
    assert " to " not in lines["goes on"] + lines["happened"]
    history = page.text.partition("History")[2].partition("Work")[0]
    assert "it was never connected ( resilient connect)" in history
    assert "`" not in history
    assert "last found at" not in history


@pytest.mark.parametrize(
    ("guess", "page"),
    [
        ("/resources/crm/acct-1", "/account/crm/acct-1"), ("/accounts/crm/acct-1", "/account/crm/acct-1"),
        ("/resources", "/accounts"), ("/resources/", "/accounts"), ("/job/7?a=b", "/jobs/7?a=b"), ("/sync", "/streams"),
        ("/status", "/"), ("/resources//evil.example", "/account//evil.example"),
    ],
)  # fmt: skip
async def test_an_address_that_people_guess_leads_to_the_page(app, guess, page):
    client = browser(app).client
    answer = await client.get(guess)
    while (place := answer.headers["location"].removeprefix("http://ops.test")) == "/account":
        answer = await client.get(place)
    assert (answer.status_code, place) == (307, page)


async def test_a_key_of_the_engines_own_is_explained(app):
    page = await browser(app).get("/account/crm:token")
    assert "This is the token endpoint of crm: its tokens are fetched and refreshed there." in page.text
    assert "This is" not in (await browser(app).get("/account/crm")).text


async def test_what_an_error_proposes_is_shown_without_backticks(database):
    crm = Provider(name="crm", base_url="https://crm.example", auth=(Bearer(),), whoami="GET /me")
    app = Resilient(database, providers=[crm], secrets=[new_key()])
    ann = browser(app)
    page = await ann.submit((await ann.get("/account/crm/acct-1")).form("/do/test"))
    assert "crm/acct-1 has no connection, so no test request was sent: resilient connections list" in page.text
    assert "`" not in page.text
    await app.close()


async def test_an_account_shows_its_past_and_where_to_connect_again(app):
    key = "crm/acct-1"
    for _ in range(2):
        await app.enqueue(charge, {"fails": True}, resource_key=key, max_attempts=1)
    await app.worker().drain()
    await app.connections.add(key, token="canary")
    ann = browser(app, reconnect=lambda key: f"https://shop.example/connect?account={key}")
    page = await ann.get(f"/account/{key}")
    page = await ann.submit(page.form("/do/resource", "pause"), "pause", reason="they asked")
    assert "by hand" in page.text
    assert "resources pause: they asked (ann)" in page.text
    assert "no funds" in page.text[page.text.index("Latest attempts") : page.text.index("Ready, running and dead")]
    assert "Connect it again" not in page.text
    await app.connections.revoke(key)
    page = await ann.get(f"/account/{key}")
    assert "https://shop.example/connect?account=crm/acct-1" in page.links
    assert "Connect it again" in page.text[: page.text.index("Gates")], "beside why it stands"
    for address in ("javascript:alert(1)", "data:text/html,x", None):
        page = await browser(app, reconnect=lambda _key, address=address: address).get(f"/account/{key}")
        assert "Connect it again" not in page.text
