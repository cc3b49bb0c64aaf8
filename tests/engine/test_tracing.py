"""Traces: enqueue, run and request by the SDK's in-memory exporter, and what never stands in them."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import threading

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from opentelemetry.semconv import schemas
from opentelemetry.trace import SpanKind, StatusCode
from sqlalchemy.orm import Session

from resilient import (
    Batch,
    Event,
    Fixed,
    InvalidInput,
    Job,
    Permanent,
    Provider,
    Resilient,
    ResourceStopped,
    Retry,
    Snooze,
    SyncBatch,
    SyncJob,
    Tracing,
    Transient,
    handler,
    log_fields,
)
from resilient.core.base import tracing
from resilient.store.accounts.secrets import new_key
from resilient.testing import FakeProvider
from tests.helpers import drain, until, use_up

TWICE = Retry(max_attempts=2, delay=Fixed(0))


class Api:
    """Answers with the status in the path; keeps the headers of what came."""

    def __init__(self):
        self.headers = []
        self.statuses = []

    async def __call__(self, scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        status = self.statuses.pop(0) if self.statuses else 200
        extra = [(b"location", b"/there")] if status == 307 else []
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"2"), *extra]})
        await send({"type": "http.response.body", "body": b"{}"})


class Spans:
    def __init__(self):
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("program")

    def __call__(self, name=None):
        spans = self.exporter.get_finished_spans()
        return [span for span in spans if name is None or span.name == name]

    def one(self, name):
        (span,) = self(name)
        return span


@pytest.fixture
def spans():
    return Spans()


@pytest.fixture
async def make(database, spans, api):
    made = []

    def make(*handlers, tenants=False, share=1.0, facts=None, **options):
        provider = Provider(name="api", base_url=api.url, **(facts or {}))
        app = Resilient(
            database,
            handlers=handlers,
            providers=[provider],
            tracing=Tracing(spans.provider, tenants=tenants, share=share),
            **options,
        )
        made.append(app)
        return app

    yield make
    for app in made:
        await app.close()


def links(span):
    return [(one.context.trace_id, one.context.span_id) for one in span.links]


def place(span):
    return (span.context.trace_id, span.context.span_id)


@handler("contact.push")
async def push(job: Job[dict]) -> None:
    (await job.client.post("/v1/contacts/secret-path?token=canary", json={})).raise_for_status()


@handler("contact.push")
def push_sync(job: SyncJob[dict]) -> None:
    job.client.post("/v1/contacts/secret-path?token=canary", json={}).raise_for_status()


@pytest.mark.parametrize("function", [push, push_sync])
async def test_enqueue_run_and_request(make, spans, api, function):
    app = make(function)
    with spans.tracer.start_as_current_span("web request") as web:
        job = await app.enqueue("contact.push", {}, resource_key="api/acme")
    await drain(app)
    enqueue, process, post = (spans.one(name) for name in ("enqueue contact.push", "process contact.push", "POST"))
    assert (enqueue.kind, process.kind, post.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER, SpanKind.CLIENT)
    assert enqueue.parent.span_id == web.get_span_context().span_id
    assert process.parent is None
    assert links(process) == [place(enqueue)]
    assert place(process)[0] != place(enqueue)[0], "a link, no parent: hours may lie between"
    assert post.parent.span_id == process.context.span_id
    assert dict(enqueue.attributes) == {
        "messaging.system": "resilient", "messaging.operation.name": "enqueue", "messaging.operation.type": "send",
        "messaging.destination.name": "contact.push", "messaging.message.id": str(job.id),
    }  # fmt: skip
    assert dict(process.attributes) == {
        "messaging.system": "resilient", "messaging.operation.name": "process", "messaging.operation.type": "process",
        "messaging.destination.name": "contact.push", "messaging.message.id": str(job.id),
        "resilient.provider": "api", "resilient.attempt": 1, "resilient.execution": 1, "resilient.outcome": "succeeded",
    }  # fmt: skip
    port = int(api.url.rpartition(":")[2])
    assert dict(post.attributes) == {
        "http.request.method": "POST", "http.response.status_code": 200, "server.address": "127.0.0.1",
        "server.port": port, "url.full": f"http://127.0.0.1:{port}/[hidden]", "network.protocol.version": "1.1",
        "resilient.provider": "api",
    }  # fmt: skip
    assert {span.status.status_code for span in spans()} == {StatusCode.UNSET}
    assert "traceparent" not in api.headers[0], "no provider hears of it whose facts do not say so"
    assert enqueue.instrumentation_scope.name == "resilient"
    assert enqueue.instrumentation_scope.schema_url == tracing.SCHEMA_URL == schemas.Schemas.V1_44_0.value


async def test_what_tenants_choose_is_told_only_if_that_is_said(make, spans, api):
    app = make(push, tenants=True)
    await app.enqueue("contact.push", {}, resource_key="api/acme")
    await drain(app)
    assert spans.one("process contact.push").attributes["resilient.resource_key"] == "api/acme"
    post = spans.one("POST").attributes
    assert post["resilient.resource_key"] == "api/acme"
    assert post["url.full"].startswith(f"{api.url}/v1/contacts/secret-path")
    assert "canary" not in post["url.full"]


async def test_without_leave_no_span_has_a_word_of_a_tenants(make, spans, api):
    app = make(push)
    await app.enqueue("contact.push", {"name": "acme"}, resource_key="api/acme")
    api.statuses = [500, 500, 500, 500]
    await drain(app)
    everything = " ".join(span.to_json() for span in spans())
    assert "acme" not in everything
    assert "canary" not in everything


async def test_the_provider_hears_of_it_where_its_facts_allow(make, spans, api):
    app = make(push, facts={"propagates_trace": True})
    await app.enqueue("contact.push", {}, resource_key="api/acme")
    await drain(app)
    post = spans.one("POST").context
    assert api.headers[0]["traceparent"].startswith(f"00-{post.trace_id:032x}-{post.span_id:016x}-")


async def test_each_sending_is_a_span_of_its_own(make, spans, api):
    @handler("contact.get")
    async def get(job: Job[dict]) -> None:
        (await job.client.get("/v1", follow_redirects=True)).raise_for_status()

    app = make(get)
    api.statuses = [503, 307, 200]
    await app.enqueue("contact.get", {}, resource_key="api/acme")
    await drain(app)
    gets = spans("GET")
    names = ("http.response.status_code", "http.request.resend_count", "error.type")
    assert [tuple(span.attributes.get(name) for name in names) for span in gets] == [
        (503, None, "503"),
        (307, 1, None),
        (200, 2, None),
    ]
    assert [s.status.status_code for s in gets] == [StatusCode.ERROR, StatusCode.UNSET, StatusCode.UNSET]
    assert gets[0].attributes["resilient.error_kind"] == "transient"


@pytest.mark.parametrize("tenants", [True, False])
async def test_retries_are_runs_of_their_own_and_errors_are_redacted(make, spans, tenants):
    @handler("contact.push", retry=TWICE)
    async def fails(job: Job[dict]) -> None:
        if job.attempt == 1:
            raise Transient("they said password=hunter2pass")
        raise KeyError("Authorization: Bearer abcdefghijkl of ada@example.com")

    app = make(fails, tenants=tenants)
    await app.enqueue("contact.push", {}, resource_key="api/acme")
    await drain(app)
    enqueue, (first, second) = spans.one("enqueue contact.push"), spans("process contact.push")
    assert links(first) == links(second) == [place(enqueue)]
    assert place(first)[0] != place(second)[0]
    assert [(s.attributes["resilient.attempt"], s.attributes["resilient.outcome"]) for s in (first, second)] == [
        (1, "retry"), (2, "dead"),
    ]  # fmt: skip
    assert (first.status.status_code, first.attributes["error.type"]) == (StatusCode.ERROR, "transient")
    assert second.status.status_code == StatusCode.ERROR
    (event,) = second.events
    assert event.name == "exception"
    assert event.attributes["exception.type"] == "KeyError"
    assert ("exception.stacktrace" in event.attributes) is ("exception.message" in event.attributes) is tenants
    everything = first.to_json() + second.to_json()
    assert "hunter2pass" not in everything
    assert "abcdefghijkl" not in everything
    assert ("ada@example.com" in everything) is tenants


async def test_what_only_waits_has_not_failed(make, spans):
    @handler("contact.push")
    async def waits(job: Job[dict]) -> Snooze:
        return Snooze(3600)

    app = make(waits)
    await app.enqueue("contact.push", {}, resource_key="api/acme")
    await drain(app)
    process = spans.one("process contact.push")
    assert process.status.status_code == StatusCode.UNSET
    assert process.attributes["resilient.outcome"] == "snooze"


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_batch_is_one_span_with_a_link_to_each_enqueue(make, spans, is_async):
    within = []

    @handler("contact.push", batch=10)
    async def push_all(batch: Batch[int]) -> None:
        within.append(trace.get_current_span().get_span_context().span_id)
        batch.fail(batch[0], Permanent("no"))

    @handler("contact.push", batch=10)
    def push_all_sync(batch: SyncBatch[int]) -> None:
        within.append(trace.get_current_span().get_span_context().span_id)
        batch.fail(batch[0], Permanent("no"))

    app = make(push_all if is_async else push_all_sync)
    for n in range(3):
        await app.enqueue("contact.push", n, resource_key="api/acme")
    await drain(app)
    process = spans.one("process contact.push")
    assert process.attributes["messaging.batch.message_count"] == 3
    assert sorted(links(process)) == sorted(place(one) for one in spans("enqueue contact.push"))
    assert within == [process.context.span_id]
    assert [event.attributes["resilient.outcome"] for event in process.events if event.name == "resilient.job"] == [
        "dead"
    ]
    assert process.status.status_code == StatusCode.ERROR


async def test_many_jobs_are_enqueued_under_one_span(make, spans):
    app = make(push)
    await app.enqueue_many("contact.push", [{}] * 60, resource_key="api/acme")
    enqueue = spans.one("enqueue contact.push")
    assert enqueue.attributes["messaging.batch.message_count"] == 60
    await drain(app)
    assert {one for span in spans("process contact.push") for one in links(span)} == {place(enqueue)}


async def test_transactions_and_follow_ups_are_within_the_run(make, spans, database):
    within = []

    @handler("order.place")
    async def place_order(job: Job[dict]) -> None:
        async with job.prepare():
            within.append(trace.get_current_span().get_span_context().span_id)
        async with job.complete():
            within.append(trace.get_current_span().get_span_context().span_id)
            job.then("contact.push", {})

    app = make(place_order, push)
    await app.ready()
    web = spans.tracer.start_as_current_span("web request")
    with Session(database.sync_engine) as session, session.begin(), web:
        app.sync.enqueue("order.place", {}, resource_key="api/acme", session=session, unique_key="1")
    await drain(app)
    order = spans.one("process order.place")
    assert links(order) == [place(spans.one("enqueue order.place"))]
    assert within == [order.context.span_id] * 2
    assert links(spans.one("process contact.push")) == [place(order)]


async def test_steps_of_a_workflow_are_linked_to_who_began_it(make, spans):
    app = make(push)
    with spans.tracer.start_as_current_span("web request") as web:
        async with app.workflow("order", resource_key="api/acme") as flow:
            first = flow.step("contact.push", {}, name="a")
            flow.step("contact.push", {}, name="b", after=first)
    await drain(app)
    context = web.get_span_context()
    assert [links(span) for span in spans("process contact.push")] == [[(context.trace_id, context.span_id)]] * 2


class Placed(Event, type="order.placed"):
    number: int


async def test_events_are_linked_from_their_publishing_to_their_sending(make, spans, database):
    messages = []

    async def sink(message):
        messages.append(message)

    app = make(destinations={"crm": sink}, routes={Placed: ["crm"]})
    await app.ready()
    with Session(database.sync_engine) as session, session.begin():
        app.outbox.publish(session, Placed(number=1), key="7")
    await drain(app)
    create, send, process = (
        spans.one(f"create {Placed.event_type}"),
        spans.one("send crm"),
        spans.one("process outbox.crm"),
    )
    assert links(send) == links(process) == [place(create)]
    assert send.parent.span_id == process.context.span_id
    assert messages[0].traceparent.split("-")[1:3] == [
        f"{n:0{w}x}" for n, w in zip(place(create), (32, 16), strict=True)
    ]


async def test_a_cancelled_request_and_a_timeout_end_their_spans(make, spans, serve):
    jobs, arrived = [], threading.Event()

    async def never(scope, receive, send):
        arrived.set()
        await asyncio.Event().wait()

    address = serve(never)

    @handler("contact.push", timeout=600, retry=Retry(max_attempts=1))
    async def slow(job: Job[dict]) -> None:
        jobs.append(job)
        await job.client.get(address)

    app = make(slow)
    await app.enqueue("contact.push", {}, resource_key="api/acme")
    draining = asyncio.create_task(drain(app))
    await until(arrived.is_set)
    use_up(jobs[0])
    await draining
    process = spans.one("process contact.push")
    assert process.attributes["error.type"] == "timeout"
    assert spans.one("GET").attributes["error.type"] == "CancelledError"
    assert spans.one("GET").attributes["server.address"] == "[hidden]", "not the provider's"


async def test_a_trace_that_nobody_can_read_is_no_reason_to_fail(make, spans, database):
    app = make(push)
    job = await app.enqueue("contact.push", {}, resource_key="api/acme")
    for document in ('{"traceparent": "nonsense"}', "[1]", '{"traceparent": 7}'):
        value = "CAST(:document AS json)" if database.dialect.is_postgresql else ":document"
        sql, values = f"UPDATE {{job}} SET trace = {value}", {"document": document}
        await database.transaction(lambda c, d, sql=sql, values=values: d.run(c, sql, values))
        assert tracing._links([json.loads(document)]) == []
    await drain(app)
    assert (await app.jobs.get(job.id)).state == "succeeded"
    assert links(spans.one("process contact.push")) == []


@pytest.mark.of_asyncio
async def test_the_engines_own_tasks_are_in_nobodys_trace(make, spans, monkeypatch):
    """What a job's first request begins (connections, readers of gates) goes on after the job, for others too."""
    app, contexts, create = make(push), [], asyncio.BaseEventLoop.create_task

    def noted(loop, coroutine, *, name=None, context=None):
        own = context if context is not None else contextvars.copy_context()
        if "/resilient/" in coroutine.cr_code.co_filename:
            contexts.append((coroutine.__qualname__, own.run(log_fields), own.run(tracing.current_id)))
        return create(loop, coroutine, name=name, context=context)

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_task", noted)
    await app.enqueue("contact.push", {}, resource_key="api/acme")
    with spans.tracer.start_as_current_span("main"):
        worker = app.worker(concurrency=2)
        running = asyncio.create_task(worker.run())
        await until(lambda: spans("process contact.push"))
        worker.stop()
        await running
    main = f"{spans.one('main').context.trace_id:032x}"
    assert "Executor._slot" in [name for name, *_ in contexts]
    assert [one for one in contexts if one[1:] not in (({}, None), ({}, main))] == []
    assert spans.one("process contact.push").parent is None, "whoever started the worker"


async def test_without_an_sdk_nothing_is_kept_and_nothing_is_made(database, api):
    app = Resilient(database, handlers=[push], providers=[Provider(name="api", base_url=api.url)])
    assert app.ground.tracing.tracer() is None
    await app.enqueue("contact.push", {}, resource_key="api/acme")
    assert await database.transaction(lambda c, d: d.run(c, "SELECT trace FROM {job}").scalar_one()) is None
    off = Tracing(TracerProvider(), enabled=False)
    assert off.tracer() is None
    await app.close()


# -- logs -------------------------------------------------------------------------------------------------------------


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)

    def fields(self, message):
        (record,) = [one for one in self.records if one.getMessage() == message]
        names = ("job_id", "kind", "resource_key", "attempt", "trace_id")
        return tuple(getattr(record, f"resilient_{name}") for name in names)


@pytest.fixture
def records():
    found, factory = Records(), logging.getLogRecordFactory()
    root = logging.getLogger("somebodys.program")
    root.addHandler(found)
    root.setLevel(logging.INFO)
    yield found
    root.removeHandler(found)
    logging.setLogRecordFactory(factory)


@pytest.mark.parametrize("is_async", [True, False])
async def test_each_record_of_a_handler_says_whose_it_is(make, spans, records, is_async):
    log, fields = logging.getLogger("somebodys.program.deep"), []

    def speak(job):
        log.info("hello %s", job.payload, extra={"job_id": "the program's own"})
        thread = threading.Thread(target=log.info, args=("a thread of its own",))
        thread.start()
        thread.join()
        fields.append(log_fields())

    @handler("contact.push")
    async def say(job: Job[int]) -> None:
        speak(job)
        await asyncio.sleep(0)

    @handler("contact.push")
    def say_sync(job: SyncJob[int]) -> None:
        speak(job)

    app = make(say if is_async else say_sync)
    jobs = [await app.enqueue("contact.push", n, resource_key=f"api/a{n}") for n in range(2)]
    await drain(app)
    log.info("outside")
    for n, job in enumerate(jobs):
        (span,) = [s for s in spans("process contact.push") if s.attributes["messaging.message.id"] == str(job.id)]
        want = (str(job.id), "contact.push", f"api/a{n}", 1, f"{span.context.trace_id:032x}")
        assert records.fields(f"hello {n}") == want
    assert records.fields("outside") == (None,) * 5
    assert log_fields() == {}
    assert sorted(one["resource_key"] for one in fields) == ["api/a0", "api/a1"]


async def test_records_of_a_batch_name_its_jobs(make, records):
    @handler("contact.push", batch=20)
    def say(batch: SyncBatch[int]) -> None:
        logging.getLogger("somebodys.program").info("batch of %d", len(batch))

    app = make(say)
    jobs = await app.enqueue_many("contact.push", range(12), resource_key="api/acme")
    await drain(app)
    ids, kind, key, attempt, _ = records.fields("batch of 12")
    assert (kind, key, attempt) == ("contact.push", "api/acme", None)
    assert set(ids.split()) - {"+2"} <= {str(job.id) for job in jobs}
    assert len(ids.split()) == 11


async def test_a_programs_own_factory_of_records_stays(make, records):
    def own(*args, **kwargs):
        record = logging.LogRecord(*args, **kwargs)
        record.own = "mine"
        return record

    logging.setLogRecordFactory(own)

    @handler("contact.push")
    async def say(job: Job[int]) -> None:
        logging.getLogger("somebodys.program").info("both")

    app = make(say)
    for _ in range(2):
        job = await app.enqueue("contact.push", 1, resource_key="api/acme")
        records.records.clear()
        await drain(app)
        assert records.records[0].own == "mine"
        assert records.fields("both")[0] == str(job.id)
    assert logging.getLogRecordFactory()._make is own, "two workers, one layer"


# -- what is not sampled ----------------------------------------------------------------------------------------------


class Sampled(Spans):
    """Spans whose roots a sampler drops."""

    def __init__(self, sampler):
        super().__init__()
        self.provider = TracerProvider(sampler=sampler)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))


async def kept_traces(database):
    return await database.transaction(lambda c, d: [one.trace for one in d.run(c, "SELECT trace FROM {job}")])


async def test_what_is_not_sampled_is_not_kept_with_the_job_and_not_described(make, database, api, monkeypatch):
    descriptions = []
    monkeypatch.setattr("resilient.wire.requests.span._described", lambda *_: descriptions.append(1) or {})
    dropped = Sampled(ParentBased(ALWAYS_OFF))
    app = make(push, facts={"propagates_trace": True})
    app.ground.tracing._own = dropped.provider
    await app.enqueue("contact.push", {}, resource_key="api/acme")
    assert await kept_traces(database) == [None], "nobody will see that span: there is nothing to link to"
    await drain(app)
    assert (dropped(), descriptions) == ([], [])
    flags = int(api.headers[0]["traceparent"][-2:], 16)
    assert not flags & 1, "the provider is told that the trace is not sampled"


async def test_a_sampler_of_its_own_mind_gets_the_whole_request(make, api):
    whole = Sampled(ParentBased(ALWAYS_OFF, local_parent_not_sampled=ALWAYS_ON))
    app = make(push)
    app.ground.tracing._own = whole.provider
    await app.enqueue("contact.push", {}, resource_key="api/acme")
    await drain(app)
    (post,) = whole()
    assert (post.name, post.attributes["http.request.method"], post.attributes["resilient.provider"]) == (
        "POST", "POST", "api",
    )  # fmt: skip
    assert post.attributes["http.response.status_code"] == 200


async def test_what_others_wrote_is_read_as_what_we_wrote(make, spans, database):
    app = make(push)
    parents = [f"{version}-{n:032x}-{n:016x}-01" for n, version in ((1, "00"), (2, "01"))]
    traces = [{"traceparent": parents[0]}, {"traceparent": parents[1] + "-more", "tracestate": "a=b"}]
    for one in traces:
        await app.enqueue("contact.push", {}, resource_key="api/acme")
        await database.transaction(
            lambda c, d, one=one: d.run(
                c, "UPDATE {job} SET trace = :trace WHERE state = 'ready'", {"trace": json.dumps(one)}
            )
        )
        await drain(app)
    assert [links(span) for span in spans("process contact.push")] == [[(1, 1)], [(2, 2)]]


# -- refreshes --------------------------------------------------------------------------------------------------------


async def test_a_refresh_is_a_span_and_counted(database, clock, spans):
    with FakeProvider("github", clock=clock.now) as fake:
        app = Resilient(
            database, providers=[fake.provider], secrets=[new_key()], clock=clock.now, tracing=Tracing(spans.provider)
        )
        await app.ready()
        await app.connections.import_("github/acme", **fake.account("acme").tokens)
        clock.advance(days=1)
        with spans.tracer.start_as_current_span("main"):
            await app.credentials("github/acme")
        fake.revoke()
        clock.advance(days=1)
        with pytest.raises(ResourceStopped):
            await app.credentials("github/acme")
        await app.close()
    well, dead = spans("refresh github")
    assert (well.kind, well.parent) == (SpanKind.CLIENT, None)
    assert dict(well.attributes) == {"http.request.method": "POST", "resilient.provider": "github"}
    assert dead.attributes["error.type"] == "auth"
    assert app.ground.counts.refreshes == {("github", "ok"): 1, ("github", "auth"): 1}
    assert "acme" not in well.to_json() + dead.to_json()


async def test_of_a_share_of_runs_opentelemetry_is_told(make, spans, monkeypatch):
    """The others are traces of their own all the same, which nobody collects, nor what their handlers begin."""
    seen = {}

    @handler("contact.push")
    async def look(job: Job[int]) -> None:
        with spans.tracer.start_as_current_span("within"):
            await job.client.post("/v1/contacts", json={})
            seen[job.payload] = (log_fields()["trace_id"], log_fields()["trace_id"])

    app = make(look, share=0.25)
    rolls = iter([0.1, 0.25, 0.9, 0.2])
    monkeypatch.setattr(app.ground.tracing, "roll", lambda: next(rolls))
    for n in range(4):
        await app.enqueue(look, n, resource_key="api/acme")
    await drain(app)
    names = [span.name for span in spans() if not span.name.startswith("enqueue")]
    assert sorted(names) == ["POST", "POST", "process contact.push", "process contact.push", "within", "within"]
    assert all(first == again for first, again in seen.values())
    assert len({first for first, _ in seen.values()}) == 4
    assert all(set(one) != {"0"} and len(one) == 32 for one, _ in seen.values())


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_one(share):
    with pytest.raises(InvalidInput, match="it is from 0"):
        Tracing(share=share)
