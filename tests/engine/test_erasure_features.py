"""Erasing an account whose rows the engine wrote itself: after it no row of any table has its name."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlmodel import Session

from resilient import (
    Bearer,
    Delivery,
    Errors,
    Event,
    FailureKind,
    Inbound,
    InvalidInput,
    Job,
    Limit,
    NeedsReauth,
    NextCursor,
    OAuth2,
    PageRequest,
    Permanent,
    Provider,
    Resilient,
    ResourceStopped,
    Retry,
    Rule,
    Schedule,
    Scope,
    Signature,
    Stream,
    Transient,
    Webhook,
    WebhookEvent,
    handler,
)
from resilient.core.alerts.rules import ended, of_credentials
from resilient.core.base.errors import Failure
from resilient.store.accounts import connections, fuse
from resilient.store.accounts.secrets import new_key
from resilient.store.db import tables
from resilient.store.db.dialect import JSON
from resilient.store.inspect import erasure as store
from resilient.wire.oauth.endpoints import TokenAnswer
from tests.helpers import LIMIT, hear
from tests.serving import Server

NAME = "ann-schmidt"  # as it may stand in a key, a host, an address, a text
ANN, BOB, HERS = f"crm/{NAME}", "crm/bob", "shop/7"
URL = "https://app.example/webhooks/crm"


class Api:
    """Takes all tokens but those that are called bad."""

    def __init__(self):
        self.bad, self.status = set(), 200

    async def __call__(self, scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        token = dict(scope["headers"]).get(b"authorization", b"").decode().removeprefix("Bearer ")
        status = 401 if token in self.bad else self.status
        body = json.dumps({"items": [{"id": 1}], "next": None}).encode()
        headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def api():
    found = Api()
    with Server(found) as url:
        found.url = url
        yield found


class Moved(Event, type="contact.moved"):
    number: int


@handler("use")
async def use(job: Job[None]) -> None:
    (await job.client.get("/x")).raise_for_status()


@handler("fail", retry=Retry(max_attempts=1))
async def fail(job: Job[str]) -> None:
    raise (Permanent if job.payload == "for good" else Transient)(f"{job.resource_key} has no such contact")


@handler("nothing")
async def nothing(job: Job[None]) -> None:
    pass


@handler("tell")
async def tell(job: Job[NeedsReauth]) -> None:
    TOLD.append(job.payload.resource_key)


@handler("hook")
async def hook(job: Job[WebhookEvent]) -> None:
    pass


@handler("lean")
async def lean(job: Job[None]) -> None:
    """A job of one account that needs another one's credentials, too."""
    await APP[-1].credentials(ANN)


@handler("raw")
async def raw(job):
    pass


APP: list[Resilient] = []
STREAM = Stream(
    "items", request=lambda: PageRequest("/items"), paginator=NextCursor(items="items", cursor="next", query="after")
)


@handler("pull")
async def pull(job: Job[None]) -> None:
    async for page in job.pages(STREAM):
        async with job.checkpoint(page):
            pass


async def sent(_message):
    pass


TOLD: list[str] = []
HANDLERS = [use, fail, nothing, tell, hook, pull, lean, raw]


def secret_of(account):
    return [f"secret of {account}"]


def where_to(event):
    return "crm/intake" if event.body.get("to") == "intake" else f"crm/{event.account}"


@pytest.fixture
async def app(database_url, open_database, api, clock):
    TOLD.clear()
    rules = (Rule(FailureKind.AUTH, status=401, scope=Scope.ACCOUNT), Rule(FailureKind.TRANSIENT, status=503))
    crm = Provider(
        name="crm", base_url=api.url, auth=(Bearer(),), errors=Errors(rules=rules),
        limits={"account": [Limit(1000, per=60)]},
        webhook=Webhook(signatures=(Signature(header="x-sign"),), delivery="body:id", event="body:t"),
    )  # fmt: skip
    oauth = OAuth2(
        authorize_url="https://{host}/a", token_url="https://{host}/token", client_id="c", client_secret="s",
        redirect_uri="https://app.example/callback",
    )  # fmt: skip
    shop = Provider(name="shop", base_url="https://{host}/api", auth=(oauth,), private_hosts=("*.invalid",))
    app = Resilient(
        open_database(database_url), handlers=HANDLERS, providers=[crm, shop], secrets=[new_key()],
        on_needs_reauth=tell, destinations={"bus": sent},
        webhooks=[Inbound(provider="crm", secrets=secret_of, jobs=hook, resource_key=where_to)],
        schedules=[Schedule(nothing, None, every="1h", for_each="crm/*", name="each")],
    )  # fmt: skip
    APP[:] = [app]
    yield app
    await app.close()


async def connected(app, clock):
    for key in (ANN, BOB):
        await app.connections.add(key, token=f"t-{key}")
    for n, host in ((7, f"{NAME}.invalid"), (8, "bob.invalid")):
        await app.connections.import_(
            f"shop/{n}", access_token="x", refresh_token="y", expires_at=clock.now() - timedelta(hours=1),
            details={"host": host},
        )  # fmt: skip
    await app.connections.authorize_url(HERS, details={"host": f"{NAME}.invalid"})


async def hooked(app):
    for account in (NAME, "bob"):
        for doc in ({"id": "evt1", "t": "x"}, {"t": "mail"}, {"id": "evt2", "t": "x", "to": "intake"}):
            body = json.dumps(doc).encode()
            sign = hmac.new(secret_of(account)[0].encode(), body, hashlib.sha256).hexdigest()
            headers = {"x-sign": sign, "content-type": "application/json"}
            answer = await app.webhooks.receive("crm", Delivery(headers, body, f"{URL}/{account}"), account=account)
            assert answer.job is not None


async def worked(app, api):
    """Jobs that ended in every way, and what hangs on them."""
    for key in (ANN, BOB, f"{ANN}/contacts"):
        await app.enqueue(use, resource_key=key, ordering_key="o", unique_key=f"u {key}", tags={"of": key})
        await app.enqueue(fail, "for good", resource_key=key)
        await app.enqueue(fail, "for now", resource_key=key)
        blocker = await app.enqueue(nothing, resource_key=key, delay=7200)
        await app.enqueue(nothing, resource_key=BOB, after=[blocker], on_dead="run")
        await app.enqueue(pull, resource_key=key)
        async with app.workflow("order") as flow:
            one = flow.step(nothing, None, resource_key=key)
            flow.step(fail, "for good", resource_key=key, after=one)
        async with app.workflow("of two") as flow:
            one = flow.step(nothing, None, resource_key=BOB)
            flow.step(fail, "for good", resource_key=key, after=one)
    with Session(app.database.sync_engine) as session:
        for key in (ANN, BOB):
            app.outbox.publish(session, Moved(number=1), subject=key, key=key, to=["bus"])
        session.commit()
    for key in (HERS, "shop/8"):
        await app.enqueue(use, resource_key=key)
    await app.worker(rng=None).drain(timeout=LIMIT)
    api.status = 503
    for key in (ANN, BOB):
        await app.enqueue(use, resource_key=key)
    await app.worker().drain(timeout=LIMIT)
    api.status = 200


async def died(app, api):
    """Their customers are about to be told."""
    for key in (ANN, BOB):
        api.bad.add(f"t-{key}")
        await app.enqueue(use, resource_key=key)
    await app.worker().drain(timeout=LIMIT)
    await app.enqueue(lean, resource_key=BOB)
    await app.enqueue(lean, resource_key="else/where")
    await app.worker().drain(timeout=LIMIT)


def rows_with(name):
    """Per table, the rows in which a name stands, as text."""

    def look(c, d):
        found = {}
        for table in tables.metadata.sorted_tables:
            rows = [json.dumps(dict(row), default=str) for row in d.execute(c, sa.select(table)).mappings()]
            found[table.name.removeprefix("resilient_")] = [row for row in rows if name in row]
        return {table: rows for table, rows in found.items() if rows}

    return look


async def filled(app, api, clock):
    await connected(app, clock)
    await hooked(app)
    await app.schedules.tick()
    clock.advance(hours=2)
    await app.schedules.tick()
    await worked(app, api)
    clock.advance(minutes=5)
    await died(app, api)
    await hear(app)  # a process writes its alerts a second later at most


# Where the engine itself writes an account's name, or what leads to it; a feature that is not used above hides nothing.
EXPECTED = {
    "alert", "attempt", "audit", "connection", "cursor", "inbox", "job", "order", "rate_limit", "resource",
    "schedule_account", "step", "turn",
}  # fmt: skip


async def test_after_an_erasure_no_row_of_any_table_has_the_name(app, api, clock):
    await filled(app, api, clock)
    before = await app.database.transaction(rows_with(NAME))
    assert before.keys() == EXPECTED
    others = await app.database.transaction(rows_with("bob"))
    for key in (ANN, HERS):
        dry = await app.accounts.erase(key, dry_run=True)
        assert (await app.accounts.erase(key)).rows == dry.rows
    await app.grants.close()  # what this process has counted, and not written yet
    after = await app.database.transaction(rows_with(NAME))
    assert after.keys() == {"audit"}  # who did what, and that it was erased
    kept = await app.database.transaction(rows_with("bob"))
    for found in (kept, others):
        del found["turn"], found["alert"]  # what waited for an erased job may run; alerts come by the second
    assert {table: len(rows) for table, rows in kept.items()} == {table: len(rows) for table, rows in others.items()}
    clock.advance(minutes=2)
    await app.worker().drain(timeout=LIMIT)
    assert TOLD == [BOB]


async def test_an_export_shows_each_row_that_has_the_name(app, api, clock):
    await filled(app, api, clock)
    texts: dict[str, list[str]] = {}
    for key in (ANN, HERS):
        async for row in app.accounts.export(key):
            texts.setdefault(row["table"], []).append(json.dumps(row))
    stored = await app.database.transaction(rows_with(NAME))
    stored["resource"] = [row for row in stored["resource"] if '"key": "crm",' not in row]  # the provider's own row
    stored["job"] = [row for row in stored["job"] if '"kind": "lean"' not in row]  # of others, which wait for it
    for table, rows in stored.items():
        assert len([text for text in texts[table] if NAME in text]) == len(rows), table
    assert not any("t-crm" in text for rows in texts.values() for text in rows)


async def keys(app):
    return await app.database.transaction(lambda c, d: set(d.run(c, "SELECT key FROM {resource}").scalars()))


async def test_a_token_endpoint_that_others_use_keeps_its_state(app, clock):
    at = {"access_token": "x", "refresh_token": "y", "expires_at": clock.now() - timedelta(hours=1)}
    for key in (HERS, "shop/8", "shop/9"):
        await app.connections.import_(key, **at, details={"host": f"{NAME}.invalid"})
    endpoint = f"shop:token@{NAME}.invalid:443"
    with contextlib.suppress(ResourceStopped):
        await app.credentials(HERS)
    await app.grants.close()
    for key in (HERS, "shop/8"):
        assert [row["key"] async for row in app.accounts.export(key) if row["table"] == "resource"] == [key]
        await app.accounts.erase(key)
        assert endpoint in await keys(app)
    assert {row["key"] async for row in app.accounts.export("shop/9") if row["table"] == "resource"} == {
        endpoint, "shop/9",
    }  # fmt: skip
    await app.accounts.erase("shop/9")
    assert await app.database.transaction(rows_with(NAME)) == {}


async def test_of_webhooks_those_of_its_own_address_are_erased(app):
    await app.connections.add(ANN, token="t")
    await hooked(app)
    exported = [row async for row in app.accounts.export(ANN)]
    assert len([row for row in exported if row["table"] == "inbox"]) == 3
    await app.accounts.erase(ANN)
    assert sorted(job.resource_key for job in await app.jobs.list()) == [BOB, BOB, "crm/intake"]
    assert len((await app.database.transaction(rows_with("bob")))["inbox"]) == 3


async def noted(app):
    """Who was well lately at the provider, as its own row says."""
    query = """SELECT "window" FROM {resource} WHERE key = 'crm'"""
    window = await app.database.transaction(lambda c, d: d.run(c, query, window=JSON).scalar())
    return set(window["well"])


async def test_the_breaker_of_the_provider_forgets_one_account_alone(app):
    for key in (ANN, BOB, f"{BOB}/{NAME}"):
        await app.enqueue(nothing, resource_key=key)
    for key in (ANN, BOB):
        await app.connections.add(key, token="t")
        await app.enqueue(use, resource_key=key)
    await app.worker().drain(timeout=LIMIT)
    await app.accounts.erase(f"{BOB}/{NAME}")
    assert await noted(app) == {NAME, "bob"}
    await app.accounts.erase(ANN)
    assert await noted(app) == {"bob"}


async def test_payloads_that_no_database_reads_are_in_nobodys_way(app):
    event = {"provider": "crm", "event": "x", "delivery": "d", "account": NAME, "body": "a\x00\\b"}
    for key in (ANN, BOB, "else/where", "crm/intake"):
        await app.enqueue(raw, event | {"account": "bob"} if key == BOB else event, resource_key=key)
        await app.enqueue(raw, {"account": NAME, "provider": "crm", "text": "a\x00b"}, resource_key=key)
    exported = [row["resource_key"] async for row in app.accounts.export(ANN) if row["table"] == "job"]
    assert sorted(exported) == sorted([ANN, ANN, "crm/intake", "else/where"])
    assert (await app.accounts.erase(ANN)).rows["job"] == 4
    assert await app.jobs.count(kind="raw") == 4


@pytest.mark.parametrize("without", ["tags", "payload"])
async def test_a_notice_is_found_by_its_tag_or_by_what_it_says(app, api, without):
    """Older code gave it no tag; what a sealed payload says nobody reads."""
    for key in (ANN, BOB):
        await app.connections.add(key, token=f"t-{key}")
    await died(app, api)
    sets = "tags = NULL" if without == "tags" else "payload = 'null'"
    await app.database.transaction(lambda c, d: d.run(c, f"UPDATE {{job}} SET {sets} WHERE kind = 'tell'"))
    assert len([row async for row in app.accounts.export(ANN) if row.get("kind") == "tell"]) == 1
    await app.accounts.erase(ANN)
    assert await app.jobs.count(kind="tell") == 1


# -- while it goes on --------------------------------------------------------------------------------------------------


async def rows_left(app):
    """The rows that name her, beside the audit's."""
    rows = await app.database.transaction(rows_with(NAME))
    return {table: some for table, some in rows.items() if table != "audit"}


async def test_what_another_process_noticed_just_before_is_not_written(app, database_url, clock):
    other = Resilient(database_url, handlers=[nothing], clock=clock.now, upgrade=False)
    await app.connections.add(ANN, token="t")
    for kind, key in (("one", ANN), ("two", f"{ANN}/contacts"), ("three", BOB), ("all", ANN), ("all", BOB)):
        other.alerts.add(ended("new_error", kind, "bug", "x", error=f"of {key}", resource=key, job="j"))
    other.alerts.add(of_credentials(ANN, "revoked", clock.now()))
    await app.accounts.erase(ANN)
    await hear(other)
    assert await rows_left(app) == {}
    alerts = {alert.subject: (alert.detail["resource"], alert.count) for alert in await app.alerts.list()}
    assert alerts == {"three": (BOB, 1), "all": ("an erased account", 2)}
    clock.advance(600)  # it may come back
    other.alerts.add(ended("new_error", "k", "bug", "x", error="e", resource=ANN, job="j"))
    await hear(other)
    assert len(await app.alerts.list()) == 3
    await other.close()


async def test_however_many_changes_come_after_an_erasure_it_is_not_forgotten(app, database_url, clock):
    other = Resilient(database_url, handlers=[nothing], clock=clock.now, upgrade=False)
    await app.connections.add(ANN, token="t")
    other.alerts.add(ended("new_error", "one", "bug", "x", error=f"of {ANN}", resource=ANN, job="j"))
    await app.accounts.erase(ANN)
    for _ in range(250):
        await app.audit.begin("ann", "something else", BOB)
    await hear(other)
    assert await rows_left(app) == {}
    await other.close()


async def test_an_erasure_that_was_refused_keeps_no_alert_back(app, clock):
    async with app.workflow("order") as flow:
        flow.step(nothing, None, resource_key=ANN)
    with pytest.raises(InvalidInput, match="not over"):
        await app.accounts.erase(ANN)
    app.alerts.add(ended("new_error", "k", "bug", "x", error="e", resource=ANN, job="j"))
    await hear(app)
    assert [alert.detail["resource"] for alert in await app.alerts.list()] == [ANN]


async def test_housekeeping_that_looks_meanwhile_leaves_nothing_behind(app, monkeypatch):
    await app.connections.add(ANN, token="t")
    await app.connections.revoke(ANN)
    others = store.others

    def looked(c, d, name, table, *, dry_run):
        app.alerts._look(c, d)
        return others(c, d, name, table, dry_run=dry_run)

    monkeypatch.setattr(store, "others", looked)
    await app.accounts.erase(ANN)
    assert await rows_left(app) == {}


async def test_a_death_that_comes_meanwhile_is_told_to_nobody(app, api, monkeypatch):
    await app.connections.add(ANN, token=f"t-{ANN}")
    attempts = store.attempts

    def died_first(c, d, *args, **options):
        grant = connections.lock(c, d, ANN).grant
        fuse.die_if_version(c, d, grant, "refused", app.grants.fuse)
        return attempts(c, d, *args, **options)

    monkeypatch.setattr(store, "attempts", died_first)
    await app.accounts.erase(ANN)
    assert await rows_left(app) == {}
    assert await app.jobs.count(kind="tell") == 0


@pytest.mark.parametrize("kind", [FailureKind.THROTTLED, FailureKind.TRANSIENT, FailureKind.AUTH, None])
async def test_the_answer_to_a_refresh_that_comes_too_late_leaves_nothing_behind(app, clock, monkeypatch, kind):
    at = {"access_token": "x", "refresh_token": "y", "expires_at": clock.now() - timedelta(hours=1)}
    await app.connections.import_(HERS, **at, details={"host": f"{NAME}.invalid"})

    async def ask(*_):
        await app.accounts.erase(HERS)
        if kind is None:
            return TokenAnswer({"access_token": "z", "refresh_token": "q", "expires_in": 3600})
        return TokenAnswer(failure=Failure(kind, code="no", retry_in=60.0, provider_wide=True))

    monkeypatch.setattr(app.grants, "_ask", ask)
    with pytest.raises(ResourceStopped):
        await app.credentials(HERS)
    await app.grants.close()
    assert await rows_left(app) == {}


@pytest.mark.parametrize("step", [*store.OTHERS, "end"])
async def test_one_that_is_broken_off_anywhere_is_ended_by_the_next(app, clock, monkeypatch, step):
    at = {"access_token": "x", "refresh_token": "y", "expires_at": clock.now() - timedelta(hours=1)}
    for key, host in ((HERS, NAME), ("shop/8", "bob")):
        await app.connections.import_(key, **at, details={"host": f"{host}.invalid"})
        with contextlib.suppress(ResourceStopped):
            await app.credentials(key)
        await app.enqueue(nothing, resource_key=key)
    endpoint = f"shop:token@{NAME}.invalid:443"
    await app.grants.close()
    app.alerts.add(of_credentials(endpoint, "revoked", clock.now()))
    await hear(app)
    assert endpoint in await keys(app)
    others = store.others

    def broken(c, d, name, table, *, dry_run):
        if table == step:
            raise OSError("the process ends")
        return others(c, d, name, table, dry_run=dry_run)

    with monkeypatch.context() as patch:
        patch.setattr(store, "others", broken)
        with pytest.raises(OSError, match="ends") if step != "end" else contextlib.nullcontext():
            await app.accounts.erase(HERS)
    await app.accounts.erase(HERS)
    assert await rows_left(app) == {}
    assert "shop:token@bob.invalid:443" in await keys(app)
    assert [row async for row in app.accounts.export(HERS) if row["table"] != "audit"] == []
