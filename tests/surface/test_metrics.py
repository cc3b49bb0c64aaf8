"""What Prometheus reads: a process's counts, the database's gauges from one of them, labels of the program alone."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import resilient.metrics
from resilient import FullJitter, Limit, Permanent, Provider, Resilient, Retry, Transient, handler
from resilient.core.base.errors import DatabaseUnreachable, InvalidInput
from resilient.engine.inspect import exporter
from resilient.engine.run.job import Job
from resilient.surface.metrics import MEANINGS, AppCollector, registry
from resilient.surface.probes import Address
from tests.helpers import drain
from tests.serving import serving

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


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


async def test_declared_series_begin_at_zero(app):
    seen = values(AppCollector(app))
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
    clock.advance(exporter.LEASE.total_seconds() + 1)
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
