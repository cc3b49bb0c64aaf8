"""What Prometheus reads: a process's counts, the database's gauges from one of them, labels of the program alone."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.event import listen

import resilient.metrics
from resilient import (
    Callback,
    DatabaseUnreachable,
    Delivery,
    Event,
    FullJitter,
    Inbound,
    InvalidInput,
    Job,
    Limit,
    Permanent,
    Provider,
    Resilient,
    Retry,
    Throttled,
    Transient,
    WebhookEvent,
    handler,
    providers_by_name,
)
from resilient.store.db import database
from resilient.store.gates import limits
from resilient.surface import metrics
from resilient.surface.metrics import MEANINGS, AppCollector, registry
from resilient.surface.probes import Address
from tests.helpers import LIMIT, drain
from tests.serving import serving

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
SECRET = b"canary"


@handler("push", retry=Retry(max_attempts=2, delay=FullJitter(base=0, cap=0)))
async def push(job: Job[str]) -> None:
    if job.payload == "wrong":
        raise Permanent("no such contact")
    if job.payload == "later" and job.attempt == 1:
        raise Transient("not now")


@pytest.fixture
def make(database_url):
    made = []

    def make(**options):
        limits = {"crm/*": [Limit(1000, per=1)]}
        made.append(Resilient(database_url, **{"handlers": [push], "limits": limits, **options}))
        return made[-1]

    yield make
    for app in made:
        asyncio.run(app.close())


@pytest.fixture
async def app(make):
    app = make()
    await app.ready()
    return app


def values(collector):
    """Every sample of a collector, by name and labels."""
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


async def test_what_ended_is_counted(app):
    for payload, key in [("ok", "crm/1"), ("wrong", "crm/1"), ("later", "crm/2"), ("ok", "a-tenants-word/1")]:
        await app.enqueue(push, payload, resource_key=key)
    await drain(app)
    seen = values(AppCollector(app))
    assert seen["resilient_jobs_enqueued_total", "push"] == 4
    assert seen["resilient_executions_total", "", "crm", "push", "succeeded"] == 2
    assert seen["resilient_executions_total", "", "other", "push", "succeeded"] == 1
    assert seen["resilient_executions_total", "crm", "dead", "permanent", "push"] == 1
    assert seen["resilient_executions_total", "crm", "push", "retry", "transient"] == 1
    assert seen["resilient_execution_duration_seconds_count", "push"] == 5
    assert not [name for name in seen if "a-tenants-word" in str(name)]


async def test_how_long_jobs_waited_for_their_slot(make, clock):
    app = make(clock=clock.now)
    await app.ready()
    await app.enqueue(push, "ok", resource_key="crm/1")
    await app.enqueue(push, "ok", resource_key="crm/1", delay=80)
    clock.advance(90)
    await drain(app)
    seen = values(AppCollector(app))
    assert seen["resilient_job_wait_seconds_count", "push"] == 2
    assert seen["resilient_job_wait_seconds_bucket", "10.0", "push"] == 1, "a delay is not a wait"
    assert seen["resilient_job_wait_seconds_bucket", "60.0", "push"] == 1
    assert 99 <= seen["resilient_job_wait_seconds_sum", "push"] <= 100


async def test_how_long_requests_waited_for_their_limits(make):
    @handler("get")
    async def get(job: Job[None]) -> None:
        await job.client.get("/")

    async def ok(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    limits = {"account": [Limit(1, per=0.2)]}
    async with serving(ok) as url:
        app = make(handlers=[get], providers=[Provider(name="api", base_url=url, limits=limits)])
        await app.ready()
        await app.enqueue_many(get, [None, None], resource_key="api/1")
        await drain(app)
    seen = values(AppCollector(app))
    assert seen["resilient_limit_wait_seconds_count", "api"] == 2
    assert seen["resilient_limit_wait_seconds_count", "other"] == 0
    assert seen["resilient_limit_wait_seconds_sum", "api"] > 0


async def answer(send, status, headers=()):
    headers = [(b"content-length", b"0"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body"})


async def test_a_throttle_counts_once_however_many_requests_it_refuses(make, clock):
    """Three on their way at once are refused, then one alone; then a handler says so itself."""
    arrived, together, later = [], asyncio.Event(), (b"retry-after", b"30")

    @handler("get")
    async def get(job: Job[str]) -> None:
        if job.payload == "says so" and job.execution == 1:
            raise Throttled(clock.now() + timedelta(seconds=30))
        (await job.client.get("/")).raise_for_status()

    async def server(_scope, _receive, send):
        arrived.append(1)
        if len(arrived) < 3:
            await together.wait()
        together.set()
        await answer(send, 429 if len(arrived) <= 4 else 200, [later] if len(arrived) <= 4 else [])

    async with serving(server) as url:
        app = make(handlers=[get], providers=[Provider(name="api", base_url=url)], clock=clock.now, learn=None)
        await app.ready()
        await app.enqueue_many(get, ["", "", ""], resource_key="api/1")
        throttles, rests = [], []
        for _ in range(3):
            await drain(app)
            throttles.append(values(AppCollector(app))["resilient_throttles_total", "api"])
            rests += [one.key for one in await app.resources.list(gate="cooldown")]
            clock.advance(60)
        await app.enqueue(get, "says so", resource_key="api/2")
        await drain(app)
        rests += [one.key for one in await app.resources.list(gate="cooldown")]
        clock.advance(60)
        await drain(app)
    seen = values(AppCollector(app))
    assert rests == ["api/1", "api/1", "api/2"]
    assert throttles == [1, 2, 2]
    assert seen["resilient_throttles_total", "api"] == 3
    assert seen["resilient_throttles_total", "other"] == 0
    assert seen["resilient_requests_total", "GET", "api", "throttled"] == 4
    assert await app.jobs.count(state="succeeded") == 4


class Told(Event, type="told"):
    pass


async def test_events_are_counted_as_destinations_take_them(make, clock):
    taken = []

    async def shop(message):
        taken.append(message)
        if message.key == "refused":
            raise Permanent("no")
        if message.key == "away" and sum(one.key == "away" for one in taken) == 1:
            raise ConnectionError("gone")

    async def never(message): ...

    retry = Retry(max_attempts=3, delay=FullJitter(base=0, cap=0))
    destinations = {"shop": Callback(shop, retry=retry), "idle": never}
    app = make(destinations=destinations, routes={Told: ["shop"]}, clock=clock.now)
    await app.ready()

    def publish(c, _):
        for key in ("well", "refused", "away"):
            app.outbox.publish(c, Told(), key=key)

    await app.database.transaction(publish)
    clock.advance(40)
    await drain(app)
    clock.advance(20)
    await drain(app)
    seen = values(AppCollector(app))
    told = {one.key: one for one in await app.outbox.list()}
    assert [told[key].state for key in ("well", "refused", "away")] == ["succeeded", "dead", "succeeded"]
    events = {labels[1:]: value for labels, value in seen.items() if labels[0] == "resilient_events_published_total"}
    assert events.pop(("idle", "ok")) == 0
    assert events.pop(("ok", "shop")) == 2
    assert events.pop(("permanent", "shop")) == 1
    assert sum(events.values()) == 1
    assert sum(v for k, v in seen.items() if k[0] == "resilient_events_published_total") == len(taken)
    waits = [(one.published_at - one.created_at).total_seconds() for one in told.values() if one.published_at]
    assert seen["resilient_event_delay_seconds_count", "shop"] == 2
    assert seen["resilient_event_delay_seconds_sum", "shop"] == pytest.approx(sum(waits)) == 80
    assert seen["resilient_event_delay_seconds_count", "idle"] == 0
    await app.outbox.replay(since=timedelta(hours=1), key="well")
    clock.advance(300)
    await drain(app)
    again = values(AppCollector(app))
    assert again["resilient_events_published_total", "ok", "shop"] == 3
    assert again["resilient_event_delay_seconds_count", "shop"] == 2, "a replay is late on purpose"


async def test_webhooks_are_counted_by_what_they_were_answered(make, monkeypatch):
    @handler("hook")
    async def hook(job: Job[WebhookEvent]) -> None: ...

    def resource(event):
        if event.event == "fails":
            raise ValueError("our own mistake")
        return "github/1"

    inbound = Inbound(provider="github", secrets=[SECRET.decode()], jobs={"[!u]*": hook}, resource_key=resource)
    app = make(handlers=[hook], providers=[providers_by_name()["github"]()], webhooks=[inbound])
    await app.ready()

    async def deliver(event="push", key=SECRET, body=b"{}", method="POST", to="github"):
        sign = hmac.new(key, body, hashlib.sha256).hexdigest()
        headers = {"X-Hub-Signature-256": f"sha256={sign}", "X-GitHub-Event": event, "X-GitHub-Delivery": "1"}
        return (await app.webhooks.receive(to, Delivery(headers, body, "https://shop.example/", method))).status

    said = [await deliver(), await deliver(), await deliver(body=b"[]"), await deliver(key=b"another")]
    said += [await deliver(event="unknown"), await deliver(method="GET"), await deliver(to="a-tenants-word")]
    said.append(await deliver(body=b'"' + b"a" * app.ground.encoder.max_payload + b'"'))
    with pytest.raises(ValueError, match="our own mistake"):
        await deliver(event="fails")
    with monkeypatch.context() as patch:
        patch.setattr(app.database, "transaction", raising(DatabaseUnreachable("gone")))
        said.append(await deliver(body=b"[4]"))
    assert said == [200, 200, 200, 401, 200, 405, 404, 413, 503]
    seen = values(AppCollector(app))
    answers = {labels[1:]: value for labels, value in seen.items() if labels[0] == "resilient_webhooks_received_total"}
    assert answers.pop(("github", "stored")) == await app.jobs.count() == 2
    assert answers == {
        ("github", "repeated"): 1, ("github", "refused"): 1, ("github", "ignored"): 1, ("github", "wrong_method"): 1,
        ("other", "unknown"): 1, ("github", "too_large"): 1, ("failed", "github"): 1, ("github", "not_stored"): 1,
    }  # fmt: skip


def raising(error):
    async def raises(*_, **__):
        raise error

    return raises


async def test_transactions_are_counted_by_what_they_are_for(make):
    """Each is a COMMIT of the database, and one that failed is none."""
    app, commits = make(), []
    if app.database.is_sqlite:
        listen(app.database.sync_engine, "connect", lambda c, _: c.set_trace_callback(commits.append))
    await app.ready()
    for n in range(3):
        await app.enqueue(push, "ok", resource_key=f"crm/{n}")
    await app.enqueue_many(push, ["ok"] * 5, resource_key="crm/1")
    with pytest.raises(ZeroDivisionError):
        await app.database.transaction(lambda _c, _d: 1 / 0)
    await drain(app)
    numbers = {operation: sum(one.buckets) for operation, one in app.ground.counts.transactions.items()}
    assert numbers["enqueue"] == 4
    assert all(numbers[operation] for operation in ("claim", "finish", "heartbeat", "stage"))
    if app.database.is_sqlite:
        assert sum(numbers.values()) == commits.count("COMMIT")
    seen = values(AppCollector(app))
    assert seen["resilient_transaction_duration_seconds_count", "enqueue"] == 4
    assert seen["resilient_transaction_duration_seconds_count", "rescue"] == numbers["rescue"]
    assert 0 < seen["resilient_transaction_duration_seconds_sum", "enqueue"] < LIMIT


async def test_a_transaction_begins_with_the_wish_for_it(sqlite_url, monkeypatch):
    """What waits for the one writer is slow, though the database is not."""
    app, now = Resilient(sqlite_url, handlers=[push]), [0.0]
    await app.ready()
    taken, free = asyncio.Event(), threading.Event()
    monkeypatch.setattr(database, "time", SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic))
    loop = asyncio.get_running_loop()

    def slow(_c, _d):
        loop.call_soon_threadsafe(taken.set)
        assert free.wait(LIMIT)

    writing = asyncio.create_task(app.database.transaction(slow))
    await taken.wait()
    waiting = asyncio.create_task(app.database.transaction(limits.draw, [], []))
    await asyncio.sleep(0)
    now[0] = 7.0
    free.set()
    await asyncio.gather(writing, waiting)
    assert app.ground.counts.transactions["limit"].sum == 7.0
    await app.close()


async def test_declared_series_begin_at_zero(app):
    seen = values(AppCollector(app))
    assert seen["resilient_throttles_total", "crm"] == 0
    assert seen["resilient_transaction_duration_seconds_count", "claim"] == 0
    assert seen["resilient_executions_total", "", "other", "push", "succeeded"] == 0
    assert seen["resilient_rescues_total", "push"] == 0
    assert seen["resilient_jobs_runnable", "crm", "push"] == 0


async def test_gauges_are_what_the_database_holds(app):
    for payload, key in [("ok", "crm/1"), ("ok", "crm/2"), ("wrong", "crm/3"), ("ok", "unknown/1")]:
        await app.enqueue(push, payload, resource_key=key)
    await app.enqueue(push, "ok", resource_key="crm/1", delay=3600)
    await app.resources.pause("crm/2")
    seen = values(AppCollector(app))
    assert seen["resilient_jobs", "crm", "push", "ready"] == 3
    assert seen["resilient_jobs", "other", "push", "ready"] == 1
    assert seen["resilient_jobs", "crm", "push", "scheduled"] == 1
    assert seen["resilient_resources_stopped", "crm", "pause"] == 1
    assert seen["resilient_jobs_behind_gate", "crm", "pause"] == 1
    behind_gate = 0 if app.database.dialect.is_postgresql else 1  # SQLite has no view that looks at gates
    assert seen["resilient_jobs_runnable", "crm", "push"] == 2 + behind_gate
    assert seen["resilient_oldest_runnable_age_seconds", "crm"] > 0
    assert seen["resilient_workers",] == 0
    assert (seen["resilient_exporter",], seen["resilient_database_up",]) == (1, 1)
    assert seen["resilient_jobs_cut_off", "ready"] == 0
    assert not [name for name in seen if "unknown" in str(name)]


async def test_counts_end_at_a_bound_and_say_so(app, monkeypatch):
    from resilient.store.inspect import gauges

    monkeypatch.setattr(gauges, "COUNTED", 3)
    await app.enqueue_many(push, ["ok"] * 5, resource_key="crm/1")
    seen = values(AppCollector(app))
    assert seen["resilient_jobs", "crm", "push", "ready"] == 3
    assert seen["resilient_jobs_cut_off", "ready"] == 1


async def test_one_process_shows_the_database_and_another_takes_over(make, clock):
    first, second = make(clock=clock.now), make(clock=clock.now)
    await first.ready()
    one, other = AppCollector(first), AppCollector(second)
    for collector in (one, other):
        collector.exporter.monotonic = lambda: clock.now().timestamp()

    def exporters():
        return [values(collector)["resilient_exporter",] for collector in (one, other)]

    assert exporters() == [1, 0]
    clock.advance(30)
    assert exporters() == [1, 0]
    clock.advance(30)
    assert exporters() == [1, 0], "its lease was prolonged"
    clock.advance(metrics.LEASE.total_seconds() + 1)
    assert values(other)["resilient_exporter",] == 1, "the first was silent"
    assert exporters() == [0, 1]


async def test_a_scrape_works_without_the_database(app, monkeypatch):
    await app.enqueue(push, "ok", resource_key="crm/1")
    await drain(app)

    def away(*_):
        raise DatabaseUnreachable("gone")

    monkeypatch.setattr(app.database, "transaction_sync", away)
    seen = values(AppCollector(app))
    assert seen["resilient_executions_total", "", "crm", "push", "succeeded"] == 1
    assert (seen["resilient_exporter",], seen["resilient_database_up",]) == (0, 0)


async def test_it_mounts_in_a_web_application_and_in_a_registry_of_ones_own(app, monkeypatch):
    import httpx

    read, threads = AppCollector.collect, []
    monkeypatch.setattr(AppCollector, "collect", lambda self: threads.append(threading.get_ident()) or read(self))
    own = CollectorRegistry()
    own.register(resilient.metrics.collector(app))
    transport = httpx.ASGITransport(resilient.metrics.asgi(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        text = (await client.get("/metrics")).text
    assert threads
    assert threading.get_ident() not in threads, "the database is read beside the loop"
    names = {family.name for family in text_string_to_metric_families(text)}
    assert names == set(MEANINGS)
    assert names >= {family.name for family in own.collect()} > {"resilient_build_info"}


async def test_every_metric_is_documented(app):
    text = DOCS.read_text()
    for family in registry(app).collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        row = re.search(rf"^\| `{name}` \|(.*)", text, re.MULTILINE)
        assert row is not None, f"docs/metrics.md does not tell of {name}"
        assert labels <= set(re.findall(r"\w+", row[1])), name


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("9100", "127.0.0.1", 9100), (":9100", "", 9100), ("10.0.0.5:0", "10.0.0.5", 0), ("[::1]:80", "::1", 80)],
)
def test_addresses(text, host, port):
    assert Address.of("--metrics", text) == (host, port)


@pytest.mark.parametrize("text", ["", "here", "9100:", "1:2:3", "65536", "http://127.0.0.1:9100"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(InvalidInput, match="--metrics"):
        Address.of("--metrics", text)
