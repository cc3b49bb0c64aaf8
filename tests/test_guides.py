"""README's and the guides' other programs run too: handlers, transactions, sync, workflows."""

from __future__ import annotations

import ast
import re
from contextlib import asynccontextmanager
from functools import partial
from inspect import CO_COROUTINE
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlmodel
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import registry

import resilient
from resilient import Item, Provider, Resilient, handler, testing

ROOT = Path(__file__).parent.parent


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


async def run(source, names):
    """A block with ``await`` at its top level."""
    code = compile(source, "a guide", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    if code.co_flags & CO_COROUTINE:
        await eval(code, names)  # noqa: S307 - our own text
    else:
        exec(code, names)  # noqa: S102 - our own text
    return names


def public():
    return {"__name__": "guide", **{name: getattr(resilient, name) for name in resilient.__all__}}


@pytest.fixture
async def sessions(tmp_path):
    """Async sessions on the app's own file."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/app.db")
    yield lambda: AsyncSession(engine, expire_on_commit=False)
    await engine.dispose()


async def test_readme(tmp_path, sessions):
    first, second, third = (one.replace("app.db", f"{tmp_path}/app.db") for one in blocks("README.md"))
    names = await run(first, public())
    async with names["app"] as app, sessions() as session:
        await run(second, {**names, "session": session})
        await session.commit()
        assert await app.jobs.count() == 2
    await run(third, {**names, "url": "sqlite://"})


def answering(**answers):
    """A client whose server answers by the last part of the path."""

    def answer(request):
        return httpx.Response(200, json=answers[request.url.path.rpartition("/")[2]])

    return httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="https://api.example.com")


class Mail(BaseModel):
    to: str = "ada@example.com"

    def __init__(self, *_, **values):
        super().__init__(**values)


async def test_handlers(tmp_path, sessions):
    one, many, through, call, enqueueing, served, sealed = blocks("docs/handlers.md")
    names = await run(one, {**public(), "Mail": Mail})
    send = names["send"]
    assert await send(testing.job(Mail(), client=answering(messages={"id": "7"}))) == "7"

    class Refused(Exception):
        pass

    class Smtp:
        async def send(self, mail):
            if mail.to == "bad":
                raise Refused("no such box")

    @asynccontextmanager
    async def smtp_connection():
        yield Smtp()

    batch = testing.batch([Mail(), Mail(to="bad")])
    await (await run(many, {**names, "smtp_connection": smtp_connection, "Refused": Refused}))["send"](batch)
    assert [str(error) for error in batch.failed.values()] == ["no such box"]

    copy = (await run(through, {**names, "Copy": type("Copy", (BaseModel,), {"__annotations__": {"id": int}})}))["copy"]
    job = testing.job(copy.model(id=7), client=answering(**{"7": {"name": "Ada"}, "chat.postMessage": {}}))
    await copy(job)
    assert testing.bench_of(job).went_through == ["slack/team-1"]

    class Vendor:
        async def create(self, **words):
            return httpx.Response(201, headers=words["headers"])

    Vendor.charges = Vendor()
    source = call.replace("create(..., ", "create(").replace("answer.status,", "answer.status_code,")
    await run(source.replace("answer.body", "answer.content"), {**names, "job": job, "vendor": Vendor()})
    assert testing.bench_of(job).calls[0].reported[0] == 201

    async with Resilient(f"sqlite:///{tmp_path}/app.db", handlers=[send]) as app, sessions() as session:
        named = {**names, "app": app, "session": session, "Item": Item}
        lines = enqueueing.replace("), ...]", ")]").splitlines()
        for line in (lines[0], *lines[2:], lines[1]):  # SQLite has one writer: the caller's transaction comes last
            await run(line, named)
        await session.commit()
        assert await app.jobs.count(resource="smtp/acct-1") == 3
        assert await app.jobs.count() == 4
        visitors = httpx.ASGITransport((await run(served, named))["api"])
        async with httpx.AsyncClient(transport=visitors, base_url="http://shop") as visitor:
            answer = await visitor.post("/mails", json={"to": "bob@example.com"})
        assert (await app.jobs.get(answer.json()["job"])).payload == {"to": "bob@example.com"}
    assert (await run(sealed, {**public(), "Card": Mail}))["charge"].sealed


async def test_transactions(fake_provider, resilient_app, resilient_url, drain):
    class Base(sqlmodel.SQLModel, registry=registry()):
        pass

    class Order(Base, table=True):
        id: int | None = sqlmodel.Field(default=None, primary_key=True)
        amount: int = 5
        state: str = "new"
        charge: str | None = None

    class Item(Base, table=True):
        name: str = sqlmodel.Field(primary_key=True)

    class Charge(BaseModel):
        order: int

    class Shipment(Charge):
        pass

    class Cursor(BaseModel):
        after: str | None = None

    shipped = []

    @handler("order.ship")
    async def ship(job):
        shipped.append(job.payload)

    names = {**public(), "Order": Order, "Item": Item, "Charge": Charge, "Shipment": Shipment, "Cursor": Cursor}
    names["ship"] = ship
    for block in blocks("docs/transactions.md"):
        await run(block, names)
    pages = {"": {"items": [{"name": "a"}], "next": "p2"}, "p2": {"items": [{"name": "b"}], "next": None}}
    fake = fake_provider(Provider(name="shop", base_url="https://shop.example"), enforce=False)
    fake.on("POST /charges", {"id": "ch_7"})
    fake.on("GET /items", lambda request: pages[request.query.get("after", "")])
    charge, import_page = names["charge"], names["import_page"]
    app = resilient_app(handlers=[charge, import_page, ship], providers=[fake.provider])
    engine = create_async_engine(resilient_url.replace("sqlite:", "sqlite+aiosqlite:"))
    async with engine.begin() as c:
        await c.run_sync(Base.metadata.create_all)
    async with AsyncSession(engine) as session:
        session.add(Order(id=1))
        await session.commit()
    await app.enqueue(charge, Charge(order=1), resource_key="shop")
    await app.enqueue(import_page, Cursor(), resource_key="shop")
    await drain(app)
    async with AsyncSession(engine) as session:
        order = await session.get(Order, 1)
        assert (order.state, order.charge) == ("charged", "ch_7")
        assert [await session.get(Item, name) is not None for name in "ab"] == [True, True]
    assert shipped == [{"order": 1}]
    await engine.dispose()


async def test_sync(fake_provider, resilient_app, resilient_url, drain):
    class Base(sqlmodel.SQLModel, registry=registry()):
        pass

    class IssueRow(Base, table=True):
        id: int = sqlmodel.Field(primary_key=True)
        repo: str
        title: str
        seen: int

    def upsert_issues(session, repo, items, pass_id):
        for one in items:
            session.merge(IssueRow(id=one.id, repo=repo, title=one.title, seen=pass_id))

    (block,) = blocks("docs/sync.md")
    names = await run(block, {"__name__": "guide", "IssueRow": IssueRow, "upsert_issues": upsert_issues})
    fake = fake_provider("github")
    issues = [{"id": n, "title": f"issue {n}", "updated_at": "2026-01-01T00:00:00Z"} for n in (1, 2, 3)]
    feed = fake.records("repos/a/b/issues", issues, pages="rest", size=2)
    app = resilient_app(handlers=[names["sync_issues"]], providers=[fake.provider])
    await app.connections.import_("github/acct-7", **fake.account("acct-7").tokens)
    engine = sqlmodel.create_engine(resilient_url)
    Base.metadata.create_all(engine)
    for full_passes, there in ((1, [1, 2, 3]), (2, [1, 3])):
        await app.enqueue("issues.sync", {"repo": "a/b"}, resource_key="github/acct-7")
        await drain(app)
        with sqlmodel.Session(engine) as session:
            assert [row.id for row in session.exec(sqlmodel.select(IssueRow))] == there, full_passes
        feed.delete(2)
        await app.streams.reset("github.issues")
    engine.dispose()


async def test_workflows(tmp_path, sessions):
    class Contact(BaseModel):
        id: int

    class Order(BaseModel):
        pass

    class Receipt(BaseModel):
        pass

    ran = []

    def does(kind):
        @handler(kind)
        async def run(job: resilient.Job[Any]) -> None:
            ran.append(job.kind)

        return run

    kinds = {name: does(name) for name in ("sync_contact", "fetch_page", "build_index")}
    kinds |= {name: does(name) for name in ("reserve", "release", "ship", "notify")}
    ordered, after, together = blocks("docs/workflows.md")
    names = {**public(), **kinds, "Contact": Contact, "Order": Order, "Receipt": Receipt, "order": Order()}
    declared = await run(together.partition("\nasync with")[0], dict(names))
    handlers = [*kinds.values(), declared["charge"], declared["refund"]]
    async with Resilient(f"sqlite:///{tmp_path}/app.db", handlers=handlers) as app, sessions() as session:
        names |= {"app": app, "session": session, "urls": ["/1", "/2"]}
        await run(after, names)
        await run(together, names)
        await run(ordered, names)
        await session.commit()
        (workflow,) = await app.workflows.list()
        assert [step.name for step in workflow.steps] == ["order.charge", "reserve", "ship", "notify"]
        await app.worker().drain()
    assert ran.index("build_index") > max(n for n, kind in enumerate(ran) if kind == "fetch_page")
    assert {"sync_contact", "reserve", "ship", "notify"} <= set(ran)


async def test_tracing(tmp_path, monkeypatch):
    """The guide's provider is made, and not made the process's own."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import in_memory_span_exporter as memory

    exporter = memory.InMemorySpanExporter()
    monkeypatch.setattr(trace, "set_tracer_provider", partial(monkeypatch.setattr, trace, "_TRACER_PROVIDER"))
    (source,) = blocks("docs/tracing.md")

    @handler("contact.push")
    async def push(job: resilient.Job[int]) -> None:
        pass

    source = source.replace("app.db", f"{tmp_path}/app.db").replace("ConsoleSpanExporter()", "exporter")
    names = await run(source, {**public(), "push": push, "exporter": exporter})
    async with names["app"] as app:
        await app.enqueue(push, 1, resource_key="crm/acme")
        await app.worker().drain(timeout=30)
    names["provider"].shutdown()
    assert [span.name for span in exporter.get_finished_spans()] == ["enqueue contact.push", "process contact.push"]
